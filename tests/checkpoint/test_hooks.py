"""Saves and loads through Megatron's own functions: checked, recorded, and nothing unasked."""

import dataclasses
import inspect
import io
import random
import shutil
import signal
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moe_optim.checkpoint.files.folders import CHECKSUM_MANIFEST, read_checksums
from moe_optim.checkpoint.integrity import checkpoint_defect, corrupt_files
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import LayoutError, StateError
from moe_optim.formats import MXFP8, reference
from tests.support.checkpoints.checkpoint_journey import (
    HIDDEN,
    Journey,
    Station,
    owned_states,
    run_once,
)
from tests.support.checkpoints.stored_checkpoints import stored_tensors, write_torch_dist
from tests.support.hostile.damage import flip_in
from tests.support.hostile.hostile_checkpoints import rewrite
from tests.support.hostile.hostile_pickles import Command

FC2 = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
GROUPED, INDEXED = Station(), Station(experts="indexed")
QUICK = GROUPED.but(knobs=(("check_on_load", "quick"),))
RESHARDABLE = "fully_reshardable"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of ranks and a name, which gives what these ranks found."""
    jobs = {
        1: {
            "weights alone": _save_weights_alone,
            "resumed": _resume,
            "foreign": _foreign,
            "plain": _load_plain,
            "arguments": _read_arguments,
            "files of ranks": _read_legacy,
        },
        2: {
            "damaged": _load_damaged,
            "checksums": _save_with_megatrons_checksums,
            "later": _save_later,
            "reload": _reload,
            "amaxes": _amax_optional,
            "elsewhere": _load_elsewhere,
            "code": _load_code,
        },
        3: {"masters": _load_weights_alone},
    }
    return run_once(tmp_path_factory.mktemp("hooks"), jobs)


def _said(act: Callable[[], Any]) -> str:
    try:
        act()
    except (LayoutError, StateError) as error:
        return str(error)
    return "loaded"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda folder: flip_in(folder, FC2),
    "cut": lambda folder: (folder / "__0_0.distcp").write_bytes(
        (folder / "__0_0.distcp").read_bytes()[:-100]
    ),
    "missing": lambda folder: (folder / "__0_0.distcp").unlink(),
}


def _load_damaged(folder: Path) -> dict[str, list[str]]:
    said = {}
    Journey(GROUPED).fill().save(folder / "whole", RESHARDABLE)
    assert (folder / "whole" / CHECKSUM_MANIFEST).exists()
    for name, damage in DAMAGES.items():
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.copytree(folder / "whole", folder / name)
            damage(folder / name)
        torch.distributed.barrier()
        stations = (INDEXED, QUICK)
        said[name] = [_said(lambda s=s, n=name: Journey(s).load(folder / n)) for s in stations]
    return said


def test_a_damaged_file_is_named_on_every_rank(found):
    """Ranks share the reading, and the one that finds something does not leave the others waiting:
    all of them raise, and name the file. A quick check compares sizes, and reads no data."""
    for said in found(2, "damaged"):
        for name, (checked, quick) in said.items():
            assert ".distcp" in checked
            assert quick == "loaded" if name == "flipped" else "__0_0.distcp is " in quick
        assert all("__0_0.distcp is missing" in one for one in said["missing"])
        assert all("__0_0.distcp is cut off" in one for one in said["cut"])


def _save_weights_alone(folder: Path) -> str:
    """Save as with ``--no-save-optim``: nothing in the state is this package's own."""
    from megatron.core import dist_checkpointing

    model = {"model": Journey(GROUPED).fill().state(RESHARDABLE)["model"]}
    folder.mkdir()
    dist_checkpointing.save(model, str(folder))
    (folder / "metadata.json").write_text((folder / "metadata.json").read_text() + " ")
    return _said(lambda: dist_checkpointing.load(model, str(folder)))


def test_checksums_of_weights_alone_are_recorded_as_well(found):
    """What changed since is found, though every other file and record of it is in order."""
    (said,) = found(1, "weights alone")
    assert "metadata.json does not have the SHA-256 that was recorded" in said


def _save_with_megatrons_checksums(folder: Path) -> bool:
    """Save and load with ``--verify-integrity``, which hashes every file, this package's too."""
    Journey(GROUPED).fill().save(folder, RESHARDABLE, verify_integrity=True)
    assert list(corrupt_files(folder)) == []
    assert Journey(GROUPED).scramble().load(folder, verify_integrity=True).check()
    return (folder / "integrity.json").exists()


def test_megatrons_checksums_fit_those_of_this_package_beside_them(found):
    assert found(2, "checksums") == [True, True]


def _save_later(folder: Path) -> list[Any]:
    """Save over a checkpoint as ``--async-save`` does; look at it before and after the writing."""
    journey = Journey(GROUPED).fill()
    journey.save(folder, RESHARDABLE)
    later = {"async_sharded_save": True, "async_strategy": "mcore"}
    request = journey.save(folder, RESHARDABLE, **later)
    seen = [checkpoint_defect(folder), (folder / CHECKSUM_MANIFEST).exists()]
    torch.distributed.barrier()
    request.execute_sync()
    torch.distributed.barrier()
    files = {path.name for path in folder.glob("*.distcp")}
    return [*seen, checkpoint_defect(folder), files == read_checksums(folder).archives.keys()]


def test_an_async_save_counts_as_incomplete_and_is_recorded_when_it_is_finalized(found):
    for seen in found(2, "later"):
        assert seen == ["no metadata.json: it was not saved to the end", False, None, True]


def _reload(folder: Path) -> dict[str, str]:
    """Make masters of state dicts in several layouts, and of damaged ones."""
    for own, given in ((GROUPED, INDEXED), (INDEXED, GROUPED)):
        source = Journey(given).fill()
        values = {
            name: (source.local_part(param) / 2**10).bfloat16()
            for name, param in source.model.named_parameters()
        }
        kept = dict(values)
        journey = Journey(own).scramble()
        journey.optimizer.reload_model_params(state_dict={"model": values})
        assert values.keys() == kept.keys()
        assert all(values[name] is kept[name] for name in kept)
        for param, start, states in _owned(journey):
            want = (journey.local_part(param) / 2**10).bfloat16().float().view(-1)
            got = states["param"].view(-1)
            assert torch.equal(got, want[start : start + got.numel()]), str(param.shape)
    journey = Journey(GROUPED).fill()
    parameters = journey.model.named_parameters()
    whole = {name: journey.local_part(param).bfloat16() for name, param in parameters}
    dense = "decoder.layers.0.dense.weight"
    others = {name: value for name, value in whole.items() if name != dense}
    damaged = {
        "missing": others,
        "twice": {**whole, f"module.{dense}": whole[dense]},
        "of another shape": {**whole, dense: whole[dense][:, 1:]},
        "only ends alike": {**others, f"teacher.{dense}": whole[dense]},
    }
    said = {}
    for name, state in damaged.items():
        before = [states["param"].clone() for _, _, states in _owned(journey)]
        said[name] = _said(
            lambda state=state: journey.optimizer.reload_model_params(state_dict={"model": state})
        )
        after = [states["param"] for _, _, states in _owned(journey)]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), name
    return said


def _owned(journey: Journey):
    return [one for part in journey.parts for one in owned_states(part)]


def test_masters_reload_from_any_layout_by_whole_names(found):
    """``reload_model_params(state_dict=...)``: masters are the values of the dict, which stays
    as it was; what is missing, double, of another shape or only ends like a name changes nothing
    (B4, B5)."""
    for said in found(2, "reload"):
        assert "decoder.layers.0.dense.weight is there 0 times" in said["missing"]
        assert "decoder.layers.0.dense.weight is there 2 times" in said["twice"]
        assert f"{[HIDDEN, HIDDEN - 1]}, expected {[HIDDEN, HIDDEN]}" in said["of another shape"]
        assert "is there 0 times" in said["only ends alike"]


def _amax_optional(folder: Path) -> list[list[float]]:
    """Load a checkpoint without amaxes into a model that records them, and one with them."""
    recording = GROUPED.but(knobs=(("record_amax", True),))
    Journey(GROUPED).fill().save(folder / "without", RESHARDABLE)
    Journey(recording).scramble().load(folder / "without").check()
    Journey(recording).fill().save(folder / "with", RESHARDABLE)
    journey = Journey(recording).scramble().load(folder / "with")
    assert journey.check()
    assert Journey(GROUPED).scramble().load(folder / "with").check()
    linears = [layer.mlp.experts.linear_fc1 for layer in journey.model.decoder.layers]
    got = [linear.amax().view(-1).tolist() for linear in linears]
    want = [
        journey.local_part(linear.weight).bfloat16().float().abs().amax((1, 2)).tolist()
        for linear in linears
    ]
    return [*got, *want]


def test_amaxes_are_taken_where_a_checkpoint_has_them(found):
    """A checkpoint without amaxes loads into a model that records them, and the other way round."""
    for first, second, *want in found(2, "amaxes"):
        assert [first, second] == want


def _resume(folder: Path) -> tuple[int, int]:
    """Load a checkpoint as Megatron does and as we do: count bytes that are not the masters'."""
    from moe_optim.optimizer.distributed import GroupedDistributedOptimizer
    from tests.support.states.masters import full_master

    def wrong_bytes(journey: Journey) -> int:
        count = 0
        for layer in journey.model.decoder.layers:
            weight = layer.mlp.experts.linear_fc1.weight
            master = full_master(journey.optimizer, weight)
            want = reference.quantize(master.view(weight.shape), MXFP8)
            got = weight.quantized_storage.quantized
            for name, buffer in want.buffers().items():
                other = got.buffers()[name]
                count += int((buffer.view(torch.uint8) != other.view(torch.uint8)).sum())
        return count

    journey = Journey(GROUPED.but(format="mxfp8"))
    generator = torch.Generator().manual_seed(1)
    for _, _, states in _owned(journey.fill()):
        states["param"].copy_(torch.randn(states["param"].shape, generator=generator))
    journey._write_weights()
    journey.save(folder, RESHARDABLE)
    ours = Journey(GROUPED.but(format="mxfp8")).load(folder)
    gather = GroupedDistributedOptimizer.gather_weights
    GroupedDistributedOptimizer.gather_weights = lambda self: None
    try:
        stock = Journey(GROUPED.but(format="mxfp8")).load(folder)
    finally:
        GroupedDistributedOptimizer.gather_weights = gather
    return wrong_bytes(stock), wrong_bytes(ours)


def test_weights_come_from_masters_after_a_load_and_not_from_weights(found):
    """F8: quantizing again what was dequantized for the checkpoint, as Megatron does, gives other
    bytes than the masters give; after our load there is no such byte."""
    ((stock, ours),) = found(1, "resumed")
    assert stock > 0
    assert ours == 0


def _load_weights_alone(folder: Path) -> tuple[int, int, bool]:
    """Load the weights of a bf16 run into quantized experts, without its optimizer state."""
    from megatron.core import dist_checkpointing

    source = Journey(GROUPED.but(format="bf16", bucket_size=1))
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _, _, states in _owned(source.fill()):
        states["param"].copy_(torch.randn(states["param"].shape, generator=generator))
    source._write_weights()
    source.save(folder, RESHARDABLE)
    weights = {name: p.detach().clone() for name, p in source.model.named_parameters()}
    journey = Journey(GROUPED.but(format="mxfp8", bucket_size=1)).scramble()
    metadata = {"dp_cp_group": journey.groups.dp_cp}
    state = {"model": journey.model.sharded_state_dict(metadata=metadata)}
    journey.model.load_state_dict(dist_checkpointing.load(state, str(folder))["model"])
    journey.optimizer.reload_model_params()
    names = {param: name for name, param in journey.model.named_parameters()}
    wrong = kept = 0
    begins_inside = False
    for param, start, states in _owned(journey):
        begins_inside |= param.dim() == 3 and start % (param.numel() // len(param)) > 0
        want = weights[names[param]].float().view(-1)
        got = states["param"].view(-1)
        wrong += int((got != want[start : start + got.numel()]).sum())
        kept += getattr(getattr(param, "quantized_storage", None), "initial", None) is not None
    return wrong, kept, begins_inside


def test_masters_of_loaded_weights_are_not_quantized_first(found):
    """Weights alone, of a bf16 checkpoint, into quantized experts: masters are the checkpoint's
    values and not what quantizing left of them, from where each rank's share begins, which for the
    second of three is inside an expert; nothing is kept longer than that takes."""
    assert found(3, "masters") == [(0, 0, False), (0, 0, True), (0, 0, True)]


def _load_elsewhere(folder: Path) -> str:
    """Load as from a storage that only Megatron can read: in the same layout, and in the other."""
    from moe_optim.checkpoint import loading, saving

    never = {"new": lambda _: False}
    with (
        mock.patch.object(loading, "is_local", **never),
        mock.patch.object(saving, "is_local", **never),
    ):
        Journey(GROUPED).fill().save(folder, "dp_reshardable")
        assert not (folder / CHECKSUM_MANIFEST).exists()
        assert Journey(GROUPED).scramble().load(folder).check()
        return _said(lambda: Journey(INDEXED).scramble().load(folder))


def test_flat_states_that_only_megatron_can_read_are_compared_when_they_are_loaded(found):
    """Manifests of a remote checkpoint cannot be read before: the same order loads, another one is
    refused."""
    for said in found(2, "elsewhere"):
        assert "expected experts where this model has them" in said


def _foreign(folder: Path) -> list[bool]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    import moe_optim

    Journey(GROUPED)  # has the functions replaced
    moe_optim.uninstall()
    folder.mkdir()
    tensor = torch.arange(12.0)
    state = {"x": ShardedTensor.from_rank_offsets("x", tensor)}
    dist_checkpointing.save(state, str(folder))
    loaded = dist_checkpointing.load(
        {"x": ShardedTensor.from_rank_offsets("x", torch.zeros(12))}, str(folder)
    )
    return [(folder / CHECKSUM_MANIFEST).exists(), torch.equal(loaded["x"], tensor)]


def test_states_of_no_interest_pass_as_they_are(found):
    """Without anything of this package in it, a state is saved and loaded by Megatron alone."""
    assert found(1, "foreign") == [[False, True]]


FIRST_BY_NAME = "a_state"


@dataclasses.dataclass
class OfTheUser:
    """What somebody's script may have put among Megatron's arguments."""

    width: int = 3


def _load_with(folder: Path, where: str, value: Any, trusted: bool) -> tuple[str, Any]:
    """Load a checkpoint of which an object holds something; return what was said and came back.

    It is put there after the save: Megatron sends objects around to compare them.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    import moe_optim

    Journey(GROUPED)  # has the functions replaced
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    objects = {
        name: ShardedObject(name, {"mine": None}, (ranks,), (rank,))
        for name in ("rng_state", FIRST_BY_NAME)
    }
    if rank == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save({"mine": None, "iteration": 7, **objects}, str(folder))
    content = io.BytesIO()
    torch.save([{"mine": value}], content)
    if rank == 0:
        begin = where if trusted else f"{where}/shard_0_"  # one is enough to refuse all
        rewrite(folder, lambda key, old: content.getvalue() if key.startswith(begin) else old)
        (folder / CHECKSUM_MANIFEST).unlink()
    torch.distributed.barrier()
    moe_optim.uninstall()
    moe_optim.install(MoEOptimConfig(trust_checkpoint_code=trusted))
    try:
        loaded = dist_checkpointing.load(dict(objects), str(folder))
    except LayoutError as error:
        return str(error), None
    return "", (loaded if where == "common_state" else loaded[where])["mine"]


def _load_code(folder: Path) -> dict[str, str]:
    said = {}
    for where in ("common_state", "rng_state", FIRST_BY_NAME):
        for name, value in {"code": Command(folder / "ran"), "a type": OfTheUser()}.items():
            said[f"{where}, {name}"], _ = _load_with(folder / where / name, where, value, False)
            assert not (folder / "ran").exists()
        _, got = _load_with(folder / where / "trusted", where, OfTheUser(4), True)
        assert got == OfTheUser(4)
    return said


def test_what_would_run_code_is_refused_by_its_name_on_every_rank(found):
    """Megatron unpickles arguments and random states by Python's own rules: what they name is
    looked at first. A type of the user's own is such a name, and loads if the user says so."""
    for said in found(2, "code"):
        assert len(said) == 6
        for name, message in said.items():
            where, _, what = name.partition(", ")
            named = "posix.mkdir" if what == "code" else f"{__name__}.OfTheUser"
            assert f".distcp: {where}/shard" in message
            assert f"it names {named}" in message
            assert "moe_optim.trust_checkpoint_code=true" in message


def _plain_values() -> dict[str, Any]:
    """Return what Megatron saves besides tensors, and what is as harmless."""
    import numpy
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.rerun_state_machine import RerunMode
    from megatron.core.transformer.enums import AttnBackend

    content = io.BytesIO(b"state")
    return {
        "values": [None, True, 3, 2**70, 1.5, "text", b"bytes", (1, 2), {"a": [1]}, 2j],
        "containers": [{1, 2}, frozenset([3]), slice(1, 2), range(3), bytearray(b"x")],
        "of collections": [OrderedDict(a=1), Counter("aab"), defaultdict(list, a=[1]), deque([1])],
        "paths": [Path("/a/b"), signal.SIGTERM, types.SimpleNamespace(a=1)],
        "enumerations": [AttnBackend.flash, ModelType.encoder_or_decoder, RerunMode.DISABLED],
        "dataclasses": [OptimizerConfig(lr=0.5)],
        "of torch": [torch.bfloat16, torch.Size([2]), torch.device("cpu"), torch.strided],
        "tensors": [torch.arange(3), torch.ones(2, 2).t(), torch.nn.Parameter(torch.ones(1))],
        "random states": [torch.get_rng_state(), random.getstate(), numpy.random.get_state()],
        "of numpy": [numpy.float64(1.5), numpy.arange(3), numpy.uint32(7), numpy.dtype("<f4")],
        "a stream": content,
    }


def _load_plain(folder: Path) -> tuple[list[str], list[str]]:
    import moe_optim

    names, refused = [], []
    for name, value in _plain_values().items():
        said, got = _load_with(folder / name, "rng_state", value, False)
        moe_optim.uninstall()
        names.append(name)
        if said or type(got) is not type(value):
            refused.append(f"{name}: {said}")
    return names, refused


def test_what_megatron_saves_is_plain_data(found):
    ((names, refused),) = found(1, "plain")
    assert len(names) == 11
    assert not refused


def _read_arguments(folder: Path) -> str:
    """Read common state as ``--use-checkpoint-args`` does, before there is a model."""
    from megatron.core import dist_checkpointing

    import moe_optim

    content = io.BytesIO()
    torch.save([{"args": Command(folder / "ran")}], content)
    write_torch_dist(folder, stored_tensors(states=False))
    common = "common_state/shard_0_1"
    rewrite(folder, lambda key, old: content.getvalue() if key == common else old)
    moe_optim.uninstall()
    moe_optim.install()
    said = _said(lambda: dist_checkpointing.load_common_state_dict(str(folder)))
    assert not (folder / "ran").exists()
    return said


def test_arguments_are_looked_at_before_there_is_an_optimizer(found):
    assert "it names posix.mkdir" in found(1, "arguments")[0]


def _read_legacy(folder: Path) -> str:
    """Read a file of ``--ckpt-format torch`` as Megatron's loading and its optimizer do."""
    from megatron.core.optimizer import distrib_optimizer
    from megatron.training import checkpointing

    for module in (checkpointing, distrib_optimizer):
        source = inspect.getsource(module)
        assert "torch.load(" in source and "weights_only" not in source, module
    folder.mkdir()
    torch.save({"args": Command(folder / "ran")}, folder / "model_optim_rng.pt")
    with pytest.raises(Exception, match="GLOBAL posix.mkdir"):
        torch.load(folder / "model_optim_rng.pt", map_location="cpu")
    return "ran" if (folder / "ran").exists() else "refused"


def test_files_of_ckpt_format_torch_run_no_code_in_megatron(found):
    """Megatron reads them as torch does by default, ``weights_only``: nothing has to be looked at
    before. Should that change, this says so."""
    assert found(1, "files of ranks") == ["refused"]
