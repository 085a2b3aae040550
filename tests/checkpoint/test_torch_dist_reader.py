"""A torch_dist checkpoint is read as torch reads it, no more of it than asked, or refused."""

import io
import re
import shutil

import pytest
import torch

from moe_optim.checkpoint.files import untrusted_files
from moe_optim.checkpoint.files.archives import Archive
from moe_optim.checkpoint.files.pickles import Made
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.commands.conversion.layer_view import LayerView, Rename
from moe_optim.commands.conversion.object_edits import replace_int
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.errors import ConfigError, LayoutError, MoEOptimError, StateError
from tests.support.bytes import assert_bytes_equal
from tests.support.checkpoints.stored_checkpoints import (
    EXPERTS,
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


def test_a_rename_also_applies_behind_the_prefix_of_states(template):
    view = LayerView(open_checkpoint(template), [Rename("decoder.", "model.")])
    key = "model.layers.0.mlp.experts.linear_fc2.weight"
    assert {key, f"optimizer.state.param.{key}"} <= view.tensors.keys()
    with pytest.raises(ConfigError, match="--rename decodr.=x: expected keys of .* got none"):
        LayerView(open_checkpoint(template), [Rename("decodr.", "x")])


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


def cut(name):
    def damage(folder):
        path = folder / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return damage


def remove(name):
    return lambda folder: (folder / name).unlink()


def overwrite(folder):
    path = folder / "__0_0.distcp"
    path.write_bytes(b"\0" * path.stat().st_size)


def misspell_dtype(folder):
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"bfloat16", b"bfloau16"))


DAMAGE = {
    "__0_0.distcp: .* The file is cut off": cut("__0_0.distcp"),
    "__0_0.distcp: expected a file with .*, got none": remove("__0_0.distcp"),
    "__0_0.distcp: .* got .* The file is cut off or damaged": overwrite,
    ".metadata is cut off": cut(".metadata"),
    ".metadata: expected the index .*, got no such file": remove(".metadata"),
    ".metadata is cut off or foreign: it names torch.bfloau16": misspell_dtype,
    "metadata.json: expected JSON": cut("metadata.json"),
    "metadata.json: .* Saving was not finished": remove("metadata.json"),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_checkpoint_is_refused_with_its_file(message, folder):
    DAMAGE[message](folder)
    with pytest.raises(StateError, match=f"{re.escape(str(folder))}.*{message}"):
        reader = open_checkpoint(folder)
        for name in reader.tensors:
            reader.read(name)


def test_of_a_run_the_newest_checkpoint_is_taken(folder):
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert open_checkpoint(folder.parent).path == folder
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(StateError, match="latest_checkpointed.*expected the iteration .* got '8'"):
        open_checkpoint(folder.parent)


FOREIGN = {
    "an empty folder": lambda path: path.mkdir(),
    "note.txt": lambda path: (path.mkdir(), (path / "note.txt").write_text("x")),
    "no such file or folder": lambda path: None,
    "sharded_backend 'zarr'": lambda path: (
        path.mkdir(),
        (path / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
    ),
}


@pytest.mark.parametrize("found", FOREIGN)
def test_what_is_no_checkpoint_is_refused_with_what_was_found(found, tmp_path):
    FOREIGN[found](tmp_path / "it")
    with pytest.raises((LayoutError, StateError), match=f"it: expected .* got .*{found}") as caught:
        open_checkpoint(tmp_path / "it")
    assert isinstance(caught.value, MoEOptimError)


def test_only_the_pieces_that_overlap_are_read(tmp_path, monkeypatch):
    """A layer of a tensor that is stored in pieces costs the pieces of that layer."""
    from moe_optim.checkpoint.files.reader import TensorInfo
    from moe_optim.commands.conversion.torch_dist_writer import TorchDistWriter

    whole = stored_tensors()[FC1]
    info = TensorInfo(tuple(whole.shape), whole.dtype)
    with TorchDistWriter(tmp_path) as writer:
        for layer in reversed(range(LAYERS)):
            for expert in range(0, EXPERTS, 2):
                piece = whole[layer : layer + 1, expert : expert + 2].clone()
                writer.write_chunk(FC1, info, (layer, expert, 0, 0), piece)
        writer.finish()
    reader = TorchDistReader(tmp_path)
    loaded = []
    load = reader._load_chunk
    monkeypatch.setattr(reader, "_load_chunk", lambda blob: loaded.append(blob) or load(blob))
    assert_bytes_equal(reader.read(FC1, 1), whole[1], what="one layer")
    assert sorted(blob.offset for blob in loaded) == [(1, 0, 0, 0), (1, 2, 0, 0)]
    assert_bytes_equal(reader.read(FC1), whole, what="all layers")
