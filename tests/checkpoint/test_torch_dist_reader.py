"""A torch_dist checkpoint is read as torch reads it, no more of it than asked, or refused."""

import io
import shutil

import pytest
import torch

from moe_optim.checkpoint.files import untrusted_files
from moe_optim.checkpoint.files.archives import Archive
from moe_optim.checkpoint.files.pickles import Made
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.commands.conversion.layer_view import LayerView
from moe_optim.commands.conversion.object_edits import replace_int
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.errors import StateError
from tests.support.bytes import assert_bytes_equal
from tests.support.checkpoints.stored_checkpoints import (
    FC1,
    LAYERS,
    Backend,
    common_state,
    read_object,
    stored_tensors,
    write_torch_dist,
)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return write_torch_dist(tmp_path_factory.mktemp("stored") / "iter_0000007", stored_tensors())


@pytest.fixture
def folder(template, tmp_path):
    return shutil.copytree(template, tmp_path / "iter_0000007")


@pytest.mark.parametrize("at_once", [0, 2**18], ids=["large archives", "small ones"])
def test_names_shapes_types_and_bits_are_those_that_torch_wrote(template, at_once, monkeypatch):
    monkeypatch.setattr(untrusted_files, "_READ_AT_ONCE", at_once)
    reader, expected = open_checkpoint(template), stored_tensors()
    assert reader.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        info = reader.tensors[name]
        assert (info.shape, info.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert_bytes_equal(reader.read(name), tensor, what=name)
    assert_bytes_equal(reader.read(FC1, 2), expected[FC1][2], what="the third layer")
    assert reader.objects.keys() == {"common_state/shard_0_1", "rng_state/shard_0_1"}


def test_the_bytes_of_an_object_are_those_that_were_compared(folder, monkeypatch):
    """Even if the file changes in between: they are unpickled."""
    monkeypatch.setattr(untrusted_files, "_READ_AT_ONCE", 0)
    reader = open_checkpoint(folder)
    (blob,) = reader.blobs["common_state/shard_0_1"]
    file, compare = folder / blob.file, Archive.compare_checksums
    saved = file.read_bytes()

    def compare_and_change(archive):
        compare(archive)
        file.write_bytes(bytes(len(saved)))

    monkeypatch.setattr(Archive, "compare_checksums", compare_and_change)
    assert reader.read_bytes(blob) == saved[blob.start : blob.end]
    assert file.read_bytes() != saved


def test_experts_of_every_layer_are_shown_as_state_dicts_have_them(template):
    view, stored = LayerView(open_checkpoint(template)), stored_tensors()
    for prefix in ("", "optimizer.state.exp_avg."):
        for layer in range(LAYERS):
            key = f"{prefix}decoder.layers.{layer}.mlp.experts.linear_fc1.weight"
            assert_bytes_equal(view.read(key), stored[prefix + FC1][layer], what=key)
    assert FC1 not in view.tensors
    assert "decoder.layers.mlp.router.weight" in view.tensors


def test_the_common_state_is_read_without_the_classes_that_it_names(template):
    """Arguments are plain values, and what only the training program knows is not made."""
    reader = TorchDistReader(template)
    args = reader.common_state["args"]
    backend = args.state["attention_backend"]
    assert isinstance(args, Made) and isinstance(backend, Made)
    assert (backend.by.name, backend.args) == (Backend.__name__, (2,))
    assert (reader.recorded.iteration, reader.recorded.glu_interleave) == (7, 0)


@pytest.mark.parametrize(("before", "after"), [(None, 32), (32, None), (16, 70_000), (0, 0)])
def test_one_number_of_a_common_state_is_replaced_and_nothing_else(before, after, tmp_path):
    folder = write_torch_dist(tmp_path / "c", {"x": torch.zeros(2)}, common_state(before))
    key = "common_state/shard_0_1"
    changed = replace_int(read_object(folder, key), "moe_mlp_glu_interleave_size", after)
    (state,) = torch.load(io.BytesIO(changed), weights_only=False)
    assert state == common_state(after)
    assert replace_int(changed, "no_such_key", 1) is None


def test_of_a_run_the_newest_checkpoint_is_taken(folder):
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert open_checkpoint(folder.parent).path == folder
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(StateError, match="latest_checkpointed.*expected the iteration .* got '8'"):
        open_checkpoint(folder.parent)
