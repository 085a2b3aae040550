"""Megatron's experts of Transformer Engine under this optimizer, in formats no Hopper multiplies.

Modules, tensor classes, recipes, hooks and checkpoints are theirs; kernels are torch's, see
``tools/upstream/native_products.py``. Runs on GPUs with ``pytest --gpus``, a rank on each, and on
a CPU with ``TRANSFORMER_ENGINE_PATH``, which lists folders with Transformer Engine and what it
imports; group products then ask for tokens on a GPU, and are left out.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.formats import get_format, reference
from moe_optim.weights.te import recipe as quantizer
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.gpu_sharing import places
from tests.support.modules import serving
from tests.support.modules.amax import amax_of, saved_amaxes
from tests.support.states.given_values import draw_values
from tests.weights.te.test_storage import assert_holds
from tools.upstream.engine_version import FORMATS

PATH = os.environ.get("TRANSFORMER_ENGINE_PATH", "")
HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.any_device,
    pytest.mark.skipif(
        not (PATH or (HAS_GPU and quantizer.import_error() is None)),
        reason="needs Transformer Engine, see TRANSFORMER_ENGINE_PATH",
    ),
]
RANKS = min(2, torch.cuda.device_count()) if HAS_GPU else 2  # sums of three have an order
AT_ONCE = max(1, (os.cpu_count() or 1) // (2 * RANKS)) if HAS_GPU else 1
BLOCKS = ("fp8_block", "fp8_block_fp32")  # Megatron has no groups of them
GROUPED = tuple(name for name in FORMATS if name not in BLOCKS) if HAS_GPU else ()
AUTO = ("mxfp8", "nvfp4", *BLOCKS)  # what Megatron's own flags make
CLASSES = {
    "mxfp8": "MXFP8Tensor",
    "mxfp8_2d": "MXFP8Tensor",
    "nvfp4": "NVFP4Tensor",
    "fp8_block": "Float8BlockwiseQTensor",
    "fp8_block_fp32": "Float8BlockwiseQTensor",
}
TRAIN = ["--train-iters", "4", "--eval-interval", "2", "--save-interval", "2"]
TRAIN += ["--dist-ckpt-optim-fully-reshardable"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]
UNTRAINED = ("--lr", "0", "--min-lr", "0", "--weight-decay", "0")
CUT = ("--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "2")
CUT += ("--sequence-parallel", "--moe-ffn-hidden-size", "128")
APART = ("--expert-model-parallel-size", "2")
MUON = ("--optimizer", "muon")
SINGLE = {"experts": {"moe_single_grouped_weight": True}}
GIVEN = ("before", "after")
EXPERT = re.compile(r"layers\.(\d+)\..*(linear_fc\d)\.weight(\d*)")
"""Layer, linear and number of what one parameter holds; without a number, of all local experts."""


@dataclass(frozen=True)
class Run:
    """One launch: of which format, with what, and whose checkpoint it goes on from."""

    format: str
    flags: tuple[str, ...] = ()
    knobs: tuple[tuple[str, Any], ...] = ()
    resumed_from: str | None = None

    @property
    def is_single(self) -> bool:
        """Whether one parameter holds all experts of a linear."""
        return bool(dict(self.knobs).get("experts", {}).get("moe_single_grouped_weight"))


def list_runs() -> dict[str, Run]:
    runs = {}
    for format in FORMATS:
        runs[format] = Run(format, (*OVERLAP,))
        runs[f"{format} wire bf16"] = Run(format, (), (("wire", "bf16"), ("layout", "stock")))
        knobs = (("record_amax", True),)
        runs[f"{format} recorded"] = Run(format, (*OVERLAP,), knobs)
        runs[f"{format} resumed"] = Run(format, (), (("offloaded", True),), format)
        for when in GIVEN:
            runs[f"{format} given {when}"] = Run(format, UNTRAINED, (("given", when),))
    for format in ("mxfp8", "nvfp4") if RANKS == 2 else ():
        runs[f"{format} recorded cut"] = Run(format, CUT, (("record_amax", True),))
    for format in AUTO:
        runs[f"{format} auto"] = Run(format, (*OVERLAP,), (("format", "auto"),))
    for format in GROUPED:
        recorded = (*SINGLE.items(), ("record_amax", True))
        runs[f"{format} single recorded"] = Run(format, (), recorded)
        runs[f"{format} single"] = Run(format, (), tuple(SINGLE.items()))
        knobs = (*SINGLE.items(), ("offloaded", True))
        runs[f"{format} single resumed"] = Run(format, (), knobs, format)
        for when in GIVEN:
            knobs = (*SINGLE.items(), ("given", when))
            runs[f"{format} single given {when}"] = Run(format, UNTRAINED, knobs)
        runs[f"{format} resumed from single"] = Run(format, (), (), f"{format} single")
    return runs


LEFT = {  # weights with one scale, which Megatron gathers
    "stock": Run("tensorwise", (*OVERLAP,), (("plugin", False),)),
    "left": Run("tensorwise", (), (("step", "stock"),)),
    "left, fused": Run("tensorwise", (), (("step", "fused"),)),
    "left, resumed": Run("tensorwise", (), (("step", "stock"),), "left"),
    "left, fused, resumed": Run("tensorwise", (*OVERLAP,), (("step", "fused"),), "left, fused"),
    "left, Muon": Run("tensorwise", MUON, (("step", "fused"),)),
    "left, Muon, stock": Run("tensorwise", (*MUON, *OVERLAP), (("step", "stock"),)),
    "left, Muon, resumed": Run("tensorwise", (*MUON, *OVERLAP), (("step", "fused"),), "left, Muon"),
}
ELSEWHERE = {}  # the same, after a load at other parallel sizes, by step
if RANKS == 2:
    LEFT["left, fused, cut"] = Run("tensorwise", CUT, (("step", "fused"),))
    for step in ("stock", "fused"):
        ELSEWHERE[step] = Run("tensorwise", APART, (("step", step),), "left, fused")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what every rank of every run saw, by the run's name."""
    root = tmp_path_factory.mktemp("runs")
    runs = list_runs() | LEFT | {f"elsewhere, {step}": run for step, run in ELSEWHERE.items()}
    with ThreadPoolExecutor(AT_ONCE) as pool:  # those that others go on from come first
        for wave in (False, True):
            names = [name for name, run in runs.items() if bool(run.resumed_from) is wave]
            list(pool.map(lambda name: launch(root, name, runs[name]), names))
    return {name: Seen(folder_of(root, name)) for name in runs}


class Seen:
    """What the ranks of a run saw; asking for it fails with its log if the run has failed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def ranks(self) -> list[dict[str, Any]]:
        log = self.folder / "log"
        assert not log.exists(), log.read_text()
        files = sorted(self.folder.glob("rank*.pt"))
        assert len(files) == RANKS
        return [torch.load(file, weights_only=False) for file in files]

    @property
    def losses(self) -> list[dict[int, float]]:
        return [rank["losses"] for rank in self.ranks]


def folder_of(root: Path, name: str) -> Path:
    return root / name.replace(" ", "-")


def launch(root: Path, name: str, run: Run) -> None:
    folder = folder_of(root, name)
    folder.mkdir()
    flags = [*TRAIN, *run.flags]
    if run.resumed_from is None:
        flags += ["--save", str(folder / "checkpoints")]
    else:
        saved = folder_of(root, run.resumed_from) / "checkpoints"
        flags += ["--load", str(saved), "--ckpt-step", "2"]
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[3]), PATH, os.environ.get("PYTHONPATH", "")]
        ),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1",
        "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM": str(int(run.is_single)),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), "-m", "tests.support.te.native_train"]
    command += [str(folder), run.format, json.dumps(dict(run.knobs)), *flags]
    with places(RANKS):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    if done.returncode:  # those who ask for its ranks find the log instead
        (folder / "log").write_text(done.stdout[-3000:] + done.stderr[-6000:])


@pytest.mark.parametrize("name", list_runs())
def test_products_read_the_reference_of_the_masters(name, found):
    """Every field of every expert, on every rank, after training, evaluation and loading; initial
    values are freed; and nothing has taken the memory of a bucket from a weight."""
    run = list_runs()[name]
    for rank in found[name].ranks:
        assert rank["weights"]
        for weight in rank["weights"].values():
            assert weight["class"] == ("GroupedTensor" if run.is_single else CLASSES[run.format])
            assert weight["initial_is_freed"] and not weight["has_moved"]
            for fields, master in zip(weight["fields"], weight["master"], strict=True):
                assert_holds(SimpleNamespace(**fields), master, get_format(run.format))


@pytest.mark.parametrize("name", [name for name in list_runs() if "recorded" in name])
def test_amaxes_are_those_of_the_masters(name, found):
    """Recorded at the last gather, and in the checkpoint under the numbers of experts: of whole
    ones, also where a rank has a part of each."""
    saved = saved_amaxes(found[name].folder / "checkpoints" / "iter_0000004")
    ranks, is_cut, differing = found[name].ranks, list_runs()[name].flags == CUT, 0
    for rank in ranks:
        assert rank["weights"]
        for key, weight in rank["weights"].items():
            want = amax_of(weight["master"])
            assert_bytes_equal(weight["amax"], want, what=key)
            if is_cut:  # every rank has a part of the same experts
                parts = [amax_of(other["weights"][key]["master"]) for other in ranks]
                differing += not torch.equal(*parts)
                want = torch.maximum(*parts)
            layer, linear, number = EXPERT.search(key).groups()
            of_layer = saved[f"decoder.layers.mlp.experts.experts.{linear}.weight_amax"][int(layer)]
            mine = of_layer[int(number)] if number else of_layer
            assert_bytes_equal(mine.view(-1), want, what=f"saved {key}")
    assert bool(differing) == is_cut


@pytest.mark.parametrize("name", [name for name, run in list_runs().items() if run.flags != CUT])
def test_exported_bytes_are_those_that_products_read(name, found):
    """Data and scales as they lie in the tensors, less padding, which is what the reference makes
    of the masters: of one tensor of all experts as of one each."""
    format = get_format(list_runs()[name].format)
    for rank in found[name].ranks:
        exported = exported_experts(rank["exported"])
        assert rank["weights"]
        for key, weight in rank["weights"].items():
            layer, linear, number = EXPERT.search(key).groups()
            experts = (
                exported[layer, linear][int(number) :][:1] if number else exported[layer, linear]
            )
            for tensors, fields, master in zip(
                experts, weight["fields"], weight["master"], strict=True
            ):
                (want,) = serving.experts_of(reference.quantize(master.unsqueeze(0), format))
                assert_same_tensors(tensors, want, what=key)
                data, scale, *_ = tensors.values()
                stored = fields["_rowwise_scale_inv"][: scale.shape[0], : scale.shape[1]]
                assert_bytes_equal(data.view(torch.uint8), fields["_rowwise_data"], what=key)
                assert_bytes_equal(scale.view(stored.dtype), stored, what=f"{key}, scales")


@pytest.mark.skipif(RANKS != 2, reason="two ranks share every expert")
def test_experts_that_ranks_share_are_exported_whole(found):
    """Gates of both ranks, then ups of both; parts of NVFP4 have global scales of their own."""
    ranks = found["mxfp8 recorded cut"].ranks
    exported = [exported_experts(rank["exported"]) for rank in ranks]
    assert ranks[0]["weights"]
    for key in ranks[0]["weights"]:
        layer, linear, number = EXPERT.search(key).groups()
        parts = [rank["weights"][key]["master"] for rank in ranks]
        if linear == "linear_fc1":
            halves = zip(*(part.chunk(2, 1) for part in parts), strict=True)
            whole = torch.cat([half for of_both in halves for half in of_both], 1)
        else:
            whole = torch.cat(parts, 2)
        (want,) = serving.experts_of(reference.quantize(whole, get_format("mxfp8")))
        for given in exported:
            assert_same_tensors(given[layer, linear][int(number)], want, what=key)
    for rank in found["nvfp4 recorded cut"].ranks:
        assert "expected one global scale per expert" in rank["exported"]


@pytest.mark.parametrize("format", FORMATS)
def test_both_wires_and_layouts_give_the_same_losses(format, found):
    """Quantized, aligned and overlapped against bf16, stock and in the step."""
    assert found[format].losses == found[f"{format} wire bf16"].losses


@pytest.mark.parametrize("format", AUTO)
def test_without_a_format_it_is_that_of_megatrons_flags(format, found):
    """The same losses as with its name."""
    assert found[f"{format} auto"].losses == found[format].losses


@pytest.mark.parametrize("format", FORMATS)
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(format, found):
    """Also if weights and masters are elsewhere for a while, as during a rollout."""
    assert found[f"{format} resumed"].losses == later(found[format].losses)


@pytest.mark.parametrize("format", GROUPED)
def test_one_tensor_of_all_experts_trains_as_one_an_expert(format, found):
    """Losses, and checkpoints of either kind loaded into the other."""
    apart = found[format].losses
    assert found[f"{format} single"].losses == apart
    assert found[f"{format} single resumed"].losses == later(apart)
    assert found[f"{format} resumed from single"].losses == later(apart)


@pytest.mark.parametrize("name", [name for name in list_runs() if "given" in name])
def test_masters_start_from_the_values_that_were_loaded(name, found):
    """Not from those of the initialization, which Transformer Engine keeps: loaded into a model
    that has an optimizer, from the values themselves; before, from what quantizing left."""
    format = get_format(list_runs()[name].format)
    for rank in found[name].ranks:
        assert rank["weights"]
        for key, weight in rank["weights"].items():
            shape = weight["master"].shape
            want = draw_values(key.removeprefix("module."), shape if shape[0] > 1 else shape[1:])
            want = want.view(shape)
            if name.endswith("before"):
                q = reference.quantize(want, format)
                want = reference.dequantize_bf16(
                    q.rowwise_data, q.rowwise_scale, format, "rowwise", global_amax=q.global_amax
                )
            assert torch.equal(weight["master"], want.float()), key  # a step makes 0 of -0


def test_weights_that_are_left_to_megatron_train_as_without_the_plugin(found):
    """Losses, evaluations and norms, with gathers overlapped there and not here."""
    for ours, stock in zip(found["left"].ranks, found["stock"].ranks, strict=True):
        for what in ("losses", "validation_losses", "norms"):
            assert ours[what] == stock[what], what


def test_a_fused_step_casts_them_itself(found):
    """Megatron casts for its own steps, and after a load; all ranks alike."""
    casts = {name: [rank["stocks_casts"] for rank in found[name].ranks] for name in LEFT}
    assert all(of_rank == of_ranks[0] for of_ranks in casts.values() for of_rank in of_ranks)
    [once] = casts["left, fused, resumed"][0]
    for name in casts.keys() & {"left, fused", "left, fused, cut", "left, Muon"}:
        assert casts[name][0] == []
    assert casts["left"][0] == casts["stock"][0] == casts["left, Muon, stock"][0] == [once] * 4
    assert casts["left, resumed"][0] == [once] * 3


@pytest.mark.parametrize("name", ["left", "left, fused", "left, Muon"])
def test_weights_that_are_left_to_megatron_resume_to_the_bit(name, found):
    assert found[f"{name}, resumed"].losses == later(found[name].losses)


@pytest.mark.skipif(RANKS != 2, reason="parallel sizes of two ranks")
def test_weights_that_are_left_to_megatron_go_on_at_other_parallel_sizes(found):
    """Experts apart, which ranks shared: the first loss is that of the uninterrupted run."""
    uninterrupted = [rank[3] for rank in found["left, fused"].losses]
    for step in ELSEWHERE:
        assert [rank[3] for rank in found[f"elsewhere, {step}"].losses] == uninterrupted


CAST = [*(name for name in LEFT if name != "stock"), *(f"elsewhere, {step}" for step in ELSEWHERE)]


@pytest.mark.parametrize("name", CAST)
def test_weights_that_are_left_to_megatron_are_those_of_the_masters(name, found):
    """Cast with the amax of the whole weight, on every rank, after training and after a load."""
    for rank in found[name].ranks:
        assert rank["weights"]
        for key, weight in rank["weights"].items():
            assert weight["class"] == "Float8Tensor"
            codes, inverse = cast_to_one_scale(weight["master"][0])
            (fields,) = weight["fields"]
            assert_bytes_equal(fields["values"], (codes.float() * inverse).bfloat16(), what=key)


@pytest.mark.parametrize("name", [n for n in LEFT if n != "stock" and LEFT[n].flags != CUT])
def test_weights_that_are_left_to_megatron_are_exported_as_they_are(name, found):
    """Codes, and the scale for each row."""
    for rank in found[name].ranks:
        exported = exported_experts(rank["exported"])
        assert rank["weights"]
        for key, weight in rank["weights"].items():
            codes, inverse = cast_to_one_scale(weight["master"][0])
            layer, linear, number = EXPERT.search(key).groups()
            want = {"weight": codes, "weight_scale": inverse.expand(len(codes), 1)}
            assert_same_tensors(exported[layer, linear][int(number)], want, what=key)


@pytest.mark.skipif(RANKS != 2, reason="two ranks share every expert")
def test_parts_with_a_scale_each_are_not_exported_as_one_expert(found):
    for rank in found["left, fused, cut"].ranks:
        assert "linear_fc1: expected one scale an expert" in rank["exported"]


def cast_to_one_scale(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 codes of a weight, and what they are multiplied by."""
    values = master.bfloat16().float()
    amax = values.abs().max()
    scale = torch.full_like(amax, 448.0) / amax  # rounded once, which `448.0 / amax` is not
    return (values * scale).to(torch.float8_e4m3fn), 1.0 / scale


def exported_experts(given: dict[str, torch.Tensor]) -> dict[tuple[str, str], list[Any]]:
    """Return of each layer and linear the tensors of every expert in order, by their endings."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, tensor in given.items():
        layer, expert, linear, ending = re.search(
            r"layers\.(\d+)\..*local_experts\.(\d+)\.(\w+)\.(\w+)", name
        ).groups()
        found.setdefault((layer, linear), {}).setdefault(expert, {})[ending] = tensor
    return {place: list(experts.values()) for place, experts in found.items()}


def later(ranks: list[dict[int, float]]) -> list[dict[int, float]]:
    """Return the losses of iterations 3 and 4."""
    return [{step: rank[step] for step in (3, 4)} for rank in ranks]
