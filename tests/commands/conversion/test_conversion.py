"""A converted checkpoint holds the same bits under other keys, all of them, or does not exist."""

import errno
import io
import shutil
import weakref
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import active_children

import pytest
import torch

from moe_optim.checkpoint.files import publishing
from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.flat_states import MANIFEST
from moe_optim.checkpoint.integrity import checkpoint_defect, corrupt_files
from moe_optim.checkpoint.state_manifest import StateManifest
from moe_optim.commands.conversion import file_plan
from moe_optim.commands.conversion.conversion import (
    ConversionRequest,
    convert_checkpoint,
    plan_conversion,
)
from moe_optim.commands.conversion.file_plan import torch_dist_checkpoint, write_common_state
from moe_optim.commands.conversion.layer_view import LayerView, Rename
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.commands.conversion.torch_dist_writer import TorchDistWriter
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.experts.keys.layouts import LAYOUTS, get_layout
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.checkpoints.exported_models import in_files
from tests.support.checkpoints.stored_checkpoints import (
    EXPERTS,
    FC1,
    FC2,
    FFN,
    FLAT,
    LAYERS,
    STATES,
    common_state,
    interleaved,
    read_object,
    read_with_torch,
    stored_tensors,
    write_torch_dist,
)

COMMON = "common_state/shard_0_1"
PREFIXES = ("", *(f"optimizer.state.{state}." for state in STATES))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_torch_dist(tmp_path_factory.mktemp("source") / "c", stored_tensors())


def of_each_layer(tensors):
    """Return tensors under keys of one layer each, as Megatron stores layers that differ."""
    return {
        key.replace(".layers.", f".layers.{layer}."): value[layer].clone()
        for key, value in tensors.items()
        if ".layers." in key
        for layer in range(LAYERS)
    }


def test_experts_that_were_frozen_in_one_layer_have_no_states_there(tmp_path):
    tensors = of_each_layer(stored_tensors())
    frozen = [key for key in tensors if key.startswith("optimizer") and ".1.mlp.experts." in key]
    left = {key: value for key, value in tensors.items() if key not in frozen}
    source = write_torch_dist(tmp_path / "frozen", left)
    convert_checkpoint(plan_of(source, "hf", format="safetensors"), tmp_path / "hf")
    assert len(open_checkpoint(tmp_path / "hf").tensors) == len(left)
    assert len(frozen) == 2 * len(STATES)


def plan_of(source, to, **request):
    renames = request.pop("renames", ())
    view = LayerView(open_checkpoint(source), renames)
    return plan_conversion(view, ConversionRequest(to=get_layout(to), **request))


def convert(source, target, to, **request):
    plan = plan_of(source, to, **request)
    convert_checkpoint(plan, target)
    return plan


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_gives_every_bit_again(layout, source, tmp_path):
    """torch_dist, to safetensors in any layout, and back: experts come back one tensor a layer, as
    Megatron stores layers that are not alike; everything else comes back as it was."""
    convert(source, tmp_path / "there", layout, format="safetensors")
    convert(tmp_path / "there", tmp_path / "back", "grouped", format="torch_dist")
    want = {}
    for key, tensor in stored_tensors().items():
        parts = {key: tensor}
        if ".experts." in key:
            heads = [key.replace("layers.", f"layers.{layer}.") for layer in range(LAYERS)]
            parts = dict(zip(heads, tensor, strict=True))
        want |= parts
    back = tmp_path / "back" / "iter_0000007"
    assert_same_tensors(read_with_torch(back), want)
    assert (checkpoint_defect(back), list(corrupt_files(back))) == (None, [])


def test_hugging_face_gets_all_gate_rows_first_whatever_megatron_had(tmp_path):
    """Weights, masters and moments alike: a model of the layout hf knows no interleaving."""
    stored = stored_tensors()
    contiguous = {key: tensor.clone() for key, tensor in stored.items() if FC1 in key}
    stored |= {key: interleaved(tensor, 4) for key, tensor in contiguous.items()}
    source = write_torch_dist(tmp_path / "source", stored, common_state(4))
    convert(source, tmp_path / "hf", "hf", format="safetensors")
    got = in_files(tmp_path / "hf")
    for prefix in PREFIXES:
        for layer in range(LAYERS):
            head = f"{prefix}decoder.layers.{layer}.mlp.experts."
            want = contiguous[prefix + FC1][layer]
            assert_bytes_equal(got[f"{head}gate_up_proj"], want, what=head)
            assert_bytes_equal(got[f"{head}down_proj"], stored[prefix + FC2][layer], what=head)


@pytest.mark.parametrize(("before", "after"), [(0, 4), (4, 0)])
def test_in_torch_dist_a_new_interleave_moves_rows_of_fc1_and_nothing_else(before, after, tmp_path):
    """Stacked keys stay; fc2, other tensors and objects keep their bytes; the arguments that are
    recorded name the new interleave."""
    stored = stored_tensors()
    contiguous = {key: tensor.clone() for key, tensor in stored.items() if FC1 in key}
    if before:
        stored |= {key: interleaved(tensor, before) for key, tensor in contiguous.items()}
    source = write_torch_dist(tmp_path / "source", stored, common_state(before))
    convert(source, tmp_path / "out", "grouped", glu_interleave=after)
    out = tmp_path / "out" / "iter_0000007"
    want = stored | {
        key: interleaved(tensor, after) if after else tensor for key, tensor in contiguous.items()
    }
    assert_same_tensors(read_with_torch(out), want)
    assert read_object(out, "rng_state/shard_0_1") == read_object(source, "rng_state/shard_0_1")
    assert TorchDistReader(out).recorded.glu_interleave == after
    (state,) = torch.load(io.BytesIO(read_object(out, COMMON)), weights_only=False)
    assert state == common_state(after or None)
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "7"


def test_manifests_of_optimizer_states_name_the_new_interleave(tmp_path):
    """Which the plug-in compares with the model before it loads states."""
    name = f"optimizer.distributed.dp_group_idx_0.{MANIFEST}.0123abcd/shard_0_1"
    manifest = StateManifest(buffers=(), glu_interleave=None, versions={"torch": "2"})
    objects = {name: [manifest.to_dict()]}
    source = write_torch_dist(tmp_path / "source", stored_tensors() | objects)
    convert(source, tmp_path / "out", "grouped", glu_interleave=4)
    content = read_object(tmp_path / "out" / "iter_0000007", name)
    (saved,) = torch.load(io.BytesIO(content), weights_only=True)
    assert StateManifest.from_dict(saved, "here") == replace(manifest, glu_interleave=4)


def test_in_torch_dist_without_a_new_interleave_everything_stays(source, tmp_path):
    """As are interleaved rows of cut experts, which are refused elsewhere: ranks of expert tensor
    parallelism interleave the rows that each has, which are stored apart."""
    common = common_state(4, expert_tensor_parallel_size=2)
    cut = write_torch_dist(tmp_path / "cut", stored_tensors(), common)
    for given in (source, cut):
        out = tmp_path / f"{given.name} out"
        convert(given, out, "sequential")
        assert_same_tensors(read_with_torch(out / "iter_0000007"), stored_tensors())
        assert read_object(out / "iter_0000007", COMMON) == read_object(given, COMMON)
    with pytest.raises(LayoutError, match="--expert-tensor-parallel-size 2"):
        plan_of(cut, "hf", format="safetensors")


def test_safetensors_of_other_names_become_megatrons(source, tmp_path):
    """Keys of Hugging Face are renamed on the way, states behind their prefix as well."""
    rename = Rename("decoder.", "model.")
    convert(source, tmp_path / "hf", "hf", format="safetensors", renames=[rename])
    assert "model.layers.0.mlp.experts.gate_up_proj" in in_files(tmp_path / "hf")
    back = Rename("model.", "decoder.")
    convert(tmp_path / "hf", tmp_path / "back", "grouped", format="torch_dist", renames=[back])
    got = read_with_torch(tmp_path / "back" / "iter_0000007")
    key = f"optimizer.state.exp_avg.{FC1}"
    want = stored_tensors()[key][1]
    assert_bytes_equal(got[key.replace("layers.", "layers.1.")], want, what=key)
    with pytest.raises(ConfigError, match="--rename: expected names of Megatron's to stay"):
        plan_of(source, "grouped", renames=[rename])


@pytest.mark.parametrize(
    ("stored_as", "layout"), [("experts.experts.", "hf"), ("experts.", "sequential")]
)
def test_what_experts_have_besides_weights_comes_along(stored_as, layout, tmp_path):
    """Amaxes, which keep a name of torch_dist, and LoRA's weights with their states, as
    Megatron-Bridge names them in checkpoints, and as state dicts name them."""
    more = {
        prefix + fc.replace("experts.experts.", stored_as).replace("weight", f"adapter.{name}"): (
            torch.rand(LAYERS, EXPERTS, 2, 3)
        )
        for prefix in PREFIXES
        for fc in (FC1, FC2)
        for name in ("linear_in.weight", "linear_out.weight")
    }
    for name in ("weight_amax", "calibrated_amax"):
        more[FC1.replace("weight", name)] = torch.rand(LAYERS, EXPERTS, 1, 1)
    source = write_torch_dist(tmp_path / "source", stored_tensors() | more)
    convert(source, tmp_path / "there", layout, format="safetensors")
    convert(tmp_path / "there", tmp_path / "back", "grouped", format="torch_dist")
    back = read_with_torch(tmp_path / "back" / "iter_0000007")
    assert_same_tensors({key: back[key] for key in more}, more)


def test_flat_states_are_refused_with_the_flag_to_save_with(tmp_path):
    flat = {FLAT: torch.zeros(64)}
    source = write_torch_dist(tmp_path / "source", stored_tensors(states=False) | flat)
    with pytest.raises(
        LayoutError, match="--dist-ckpt-optim-fully-reshardable, or .*--weights-only"
    ):
        plan_of(source, "hf", format="safetensors")
    assert FLAT in plan_of(source, "hf", format="safetensors", weights_only=True).left_out


def test_states_that_some_experts_lack_are_refused(tmp_path):
    """Router and embedding have all states, experts lack some: it would be half a state."""
    tensors = stored_tensors()
    lacking = [f"optimizer.state.exp_avg.{key}" for key in (FC1, FC2)]
    by_layer = of_each_layer(tensors)
    for number, (given, keys, message) in enumerate(
        (
            (tensors, lacking, "no optimizer.state.exp_avg.decoder.layers.0"),
            (tensors, lacking[1:], "optimizer.state.exp_avg.decoder.layers.0"),
            (
                by_layer,
                [key for key in by_layer if ".exp_avg." in key and ".1.mlp.experts." in key],
                r"exp_avg\..*\.1\.mlp\.router\.weight: expected experts",
            ),
        )
    ):
        left = {key: value for key, value in given.items() if key not in keys}
        source = write_torch_dist(tmp_path / str(number), left)
        with pytest.raises(LayoutError, match=message):
            plan_of(source, "hf", format="safetensors")


CONTRADICTIONS = {
    "--from hf: expected one of grouped": {"source_layout": get_layout("hf")},
    f"divides {FFN}, .* got 3": {"glu_interleave": 3},
    **{
        f"--experts {to}: expected a GLU interleave of 0, as all gate rows come first, got 4": {
            "to": to,
            "format": "safetensors",
            "glu_interleave": 4,
        }
        for to in ("hf", "hf_per_expert")
    },
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_what_contradicts_the_checkpoint_or_itself_is_refused_by_name(message, source):
    with pytest.raises((ConfigError, LayoutError), match=message):
        plan_of(source, **({"to": "grouped"} | CONTRADICTIONS[message]))


class CountingReader:
    """Reads through another reader and knows how many bytes of what it gave are still alive."""

    def __init__(self, reader):
        self._reader, self.live, self.peak = reader, 0, 0

    def __getattr__(self, name):
        return getattr(self._reader, name)

    def read(self, name, *index):
        tensor = self._reader.read(name, *index)
        self.live += tensor.nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor, self._forget, tensor.nbytes)
        return tensor

    def _forget(self, nbytes):
        self.live -= nbytes


def test_no_more_than_an_expert_is_held(source, tmp_path):
    """Wherever experts are stored apart, or can be."""
    convert(source, tmp_path / "apart", "grouped", format="safetensors")
    reader = CountingReader(open_checkpoint(tmp_path / "apart"))
    request = ConversionRequest(to=get_layout("hf_transposed"), format="safetensors")
    plan = plan_conversion(LayerView(reader), request)
    convert_checkpoint(plan, tmp_path / "out")
    of_layer = 4 * EXPERTS * 3 * FFN * stored_tensors()[FC1].shape[-1]
    assert (
        reader.peak == max(part.nbytes for part in plan.experts) // EXPERTS == of_layer // EXPERTS
    )
    assert reader.live == 0
    assert plan.total_bytes > LAYERS * of_layer


def cut(shape, at):
    """Yield boxes of a tensor [layers, experts, ...] or [rows, columns], cut unevenly.

    Experts 0 and 1 of a layer are one chunk, 2 is cut by rows and 3 by columns.
    """
    if len(shape) == 2:
        yield from (((0, 0), (at, shape[1])), ((at, 0), (shape[0] - at, 3)))
        yield (at, 3), (shape[0] - at, shape[1] - 3)
        return
    rows, columns = shape[2:]
    for layer in range(shape[0]):
        yield (layer, 0, 0, 0), (1, 2, rows, columns)
        yield (layer, 2, 0, 0), (1, 1, at, columns)
        yield (layer, 2, at, 0), (1, 1, rows - at, columns)
        yield (layer, 3, 0, 0), (1, 1, rows, at)
        yield (layer, 3, 0, at), (1, 1, rows, columns - at)


def test_chunks_of_any_cut_are_read_once_and_end_where_they_belong(source, tmp_path, monkeypatch):
    tensors = {k: v for k, v in stored_tensors(states=False).items() if v.dim() in (2, 4)}
    assert {FC1, FC2} < tensors.keys() and EXPERTS == 4
    (tmp_path / "apart").mkdir()
    with torch_dist_checkpoint(tmp_path / "apart", 7) as (folder, writer):
        write_common_state(writer, 7, {})
        for key, tensor in tensors.items():
            whole = TensorInfo(tuple(tensor.shape), tensor.dtype)
            for start, size in cut(tensor.shape, 2):
                box = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
                writer.write_chunk(key, whole, start, tensor[box].contiguous())
        writer.finish()
    load, loaded = TorchDistReader._load_chunk, []

    def count(reader, blob):
        loaded.append(blob)
        return load(reader, blob)

    monkeypatch.setattr(TorchDistReader, "_load_chunk", count)
    convert(tmp_path / "apart", tmp_path / "hf", "hf", format="safetensors")
    chunks = sum(len(list(cut(tensor.shape, 2))) for tensor in tensors.values())
    assert len(loaded) == len(set(loaded)) == chunks
    convert(source, tmp_path / "whole", "hf", format="safetensors", weights_only=True)
    got, want = in_files(tmp_path / "hf"), in_files(tmp_path / "whole")
    assert_same_tensors(got, {key: want[key] for key in got})
    assert len(got) == 2 * LAYERS + len(tensors) - 2


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}


@pytest.mark.parametrize("asked", [{"glu_interleave": 4}, {"format": "safetensors"}], ids=str)
def test_any_number_of_processes_writes_the_same_bytes(asked, source, tmp_path):
    plan = plan_of(source, "grouped", **asked)
    convert_checkpoint(plan, tmp_path / "1", workers=1)
    done = []
    convert_checkpoint(plan, tmp_path / "3", done.append, workers=3)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    assert len(contents(tmp_path / "3")) > 3 and sum(done) == plan.total_bytes


def test_an_interrupt_ends_all_processes_and_leaves_nothing(source, tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    before = active_children()
    with pytest.raises(KeyboardInterrupt):
        plan = plan_of(source, "hf", format="safetensors")
        convert_checkpoint(plan, tmp_path / "out", interrupt, workers=2)
    assert [*tmp_path.iterdir()] == [] and active_children() == before


class FullDisk(io.BytesIO):
    """A file on a disk without space."""

    def write(self, _):
        raise OSError(errno.ENOSPC, "No space left on device")

    writelines = write


def refuse_to_write(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("asked", [{"glu_interleave": 4}, {}, {"format": "safetensors"}], ids=str)
def test_a_disk_that_fills_up_is_named_and_nothing_is_left(asked, source, tmp_path, monkeypatch):
    """In pieces of experts, in those of other tensors, and in safetensors."""
    monkeypatch.setattr(file_plan, "write_file", refuse_to_write)
    monkeypatch.setattr(TorchDistWriter, "_piece", lambda *_: nullcontext(FullDisk()))
    plan = plan_of(source, "grouped", **asked)
    with pytest.raises(StateError, match="out: expected .* got: .*No space left.* Free some"):
        convert_checkpoint(plan, tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


def test_a_disk_that_is_too_small_is_found_before_writing(source, tmp_path, monkeypatch):
    plan = plan_of(source, "hf", format="safetensors")
    usage = shutil.disk_usage(tmp_path)._replace(free=plan.disk_bytes - 1)
    monkeypatch.setattr(publishing.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StateError, match=f"expected {plan.disk_bytes:,} bytes free"):
        convert_checkpoint(plan, tmp_path / "out", lambda _: pytest.fail("something was written"))
    assert [*tmp_path.iterdir()] == []


def test_a_source_that_cannot_record_an_interleave_keeps_its_own(tmp_path):
    source = write_torch_dist(tmp_path / "source", stored_tensors(), {"iteration": 1})
    with pytest.raises(LayoutError, match="expected moe_mlp_glu_interleave_size in its metadata"):
        convert(source, tmp_path / "out", "grouped", glu_interleave=4)
    assert [*tmp_path.iterdir()] == [source]
