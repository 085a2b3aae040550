"""Transformer Engine's own tensor classes behind our storage, and training with them."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as benchmark
from benchmarks.step import DETERMINISTIC_ENVIRONMENT
from moe_optim.formats import FP8_BLOCK, FP8_BLOCK_FP32, get_format
from moe_optim.rules import FP32_SCALES
from moe_optim.weights.te.fields import read_values, te_formats_of
from moe_optim.weights.te.recipe import import_error, make_quantizer
from moe_optim.weights.te.storage import TransformerEngineStorage, make_te_storages
from tests.gpu.test_coexistence_on_gpu import SMALL
from tests.support.bytes import assert_bytes_equal
from tests.support.gpu_sharing import places
from tests.support.inputs import normal_weights, wide_range_weights
from tests.support.states.buckets import bind
from tests.support.training_runs.side_runs import EAGER, Machine, Run
from tests.weights.te.test_storage import assert_all_hold, bucket_memory, requantize
from tools.upstream.engine_version import FORMATS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(import_error() is not None, reason="needs Transformer Engine"),
]
RECIPE = Path(__file__).parents[2] / "recipes" / "hopper_fp8_block.yaml"
FIELDS = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")


@pytest.mark.parametrize("format", [FP8_BLOCK, FP8_BLOCK_FP32], ids=lambda format: format.name)
@pytest.mark.parametrize("shape", [(256, 384), (1536, 2048), (144, 272)], ids=str)
def test_requantizing_fp8_blocks_gives_what_their_own_quantizer_makes(shape, format):
    """Every field that products read, bit by bit, of the real class; views stay valid."""
    quantizer = make_quantizer(format)
    first, second = (normal_weights(*shape, seed=seed).cuda() for seed in (1, 2))
    weight, want = quantizer(first.bfloat16()), quantizer(second.bfloat16())
    assert te_formats_of(weight) == (format,)
    storage = TransformerEngineStorage(weight, format)
    bind(storage, {"rowwise_data": torch.zeros_like(storage.quantized.rowwise_data)})
    view = weight.detach()
    requantize(storage, second.unsqueeze(0))
    for bucket in (weight, view):
        for field in FIELDS:
            got, expected = getattr(bucket, field), getattr(want, field)
            if field.endswith("scale_inv"):  # the quantizer does not write all of the padding
                direction = "columnwise" if "column" in field else "rowwise"
                _, down, across = format.scale_shape(storage.shape, direction)
                got, expected = got[:down, :across], expected[:down, :across]
            assert_bytes_equal(got, expected, what=field)
    assert torch.equal(weight.dequantize(), want.dequantize())
    assert torch.equal(read_values(weight), want.dequantize())


@pytest.mark.parametrize("format", [get_format(name) for name in FORMATS], ids=FORMATS)
@pytest.mark.parametrize("apart", [False, True], ids=["one tensor", "a tensor an expert"])
def test_requantizing_reaches_every_field_of_the_real_classes(format, apart):
    """The reference is the oracle: not all of these have a quantizer on Hopper."""
    masters = torch.stack([wide_range_weights(256, 384, seed=seed) for seed in range(3)])
    storages = make_te_storages(
        format,
        (3, 256, 384),
        apart=apart,
        name="weight",
        device="cuda",
        record_amax=False,
        backend="auto",
    )
    for storage, own in zip(storages, masters.split(1) if apart else [masters], strict=True):
        bind(storage, bucket_memory(storage))
        requantize(storage, own.cuda())
        assert_all_hold(storage._param, own, format)
        assert_all_hold(storage._param.detach(), own, format)
        values = storage.dequantize("rowwise")
        assert_bytes_equal(read_values(storage._param).view(values.shape), values, what="values")


SMALL_MODEL = [f"megatron_args.{flag}={json.dumps(value)}" for flag, value in SMALL.items()]


def assert_stocks_losses(tmp_path, changes, *flags):
    """Bench a few steps of the recipe with changes: every loss equals stock Megatron's, with
    algorithms that are deterministic in themselves."""
    report = tmp_path / "step.json"
    options = ["--rounds", "1", "--iterations", "6", "--json", str(report), "--deterministic"]
    command = ["step", str(RECIPE), *options, "--set", *changes]
    with places(1):
        assert benchmark.main([*command, "--", *flags] if flags else command) == 0
    losses = json.loads(report.read_text())["losses"]
    assert losses["stock"]
    assert losses["plugin"] == losses["stock"]


@pytest.mark.usefixtures("alone")
def test_training_with_its_products_gives_stocks_losses(tmp_path):
    """FP8 blocks end to end, at the recipe's own size, in shards cut between blocks."""
    assert_stocks_losses(tmp_path, ["moe_optim.layout=aligned"])


@pytest.mark.parametrize("knob", ["layout=stock", "layout=aligned", "wire=bf16"])
def test_training_with_fp32_scales_gives_stocks_losses(knob, tmp_path, monkeypatch):
    """Of FP8 blocks, whose scales Transformer Engine's variable sets."""
    monkeypatch.setenv(FP32_SCALES, "1")
    changes = ["moe_optim.format=auto", f"moe_optim.{knob}"]
    assert_stocks_losses(tmp_path, [*SMALL_MODEL, *changes])


NARROW = ["--use-precision-aware-optimizer"]
NARROW += ["--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
TENSORWISE = ["moe_optim.format=auto", "megatron_args.--fp8-recipe=tensorwise"]
TRAINED = {  # changes and flags
    "shards cut where Megatron cuts": (["moe_optim.layout=stock"], []),
    "left to Megatron": (["moe_optim.layout=stock", *TENSORWISE], []),
    "left to Megatron, fused": (["moe_optim.step=fused", *TENSORWISE], []),
    "moments in bf16, stepped by Transformer Engine": (["moe_optim.layout=stock"], NARROW),
    "moments in bf16, stepped by our kernel": (["moe_optim.step=fused"], NARROW),
}


@pytest.mark.parametrize(("changes", "flags"), TRAINED.values(), ids=TRAINED)
def test_training_gives_stocks_losses(changes, flags, tmp_path):
    """FP8 blocks end to end; FP8 with one scale, which Megatron quantizes and gathers after either
    step; and moments in bf16, to the bit of Transformer Engine's Adam."""
    assert_stocks_losses(tmp_path, [*SMALL_MODEL, *changes], *flags)


FEW = {"--num-experts": 16, "--vocab-size": 1000}
"""For less memory."""


def test_dense_weights_are_exported_as_transformer_engine_reads_them(tmp_path):
    """After every step, each that it quantized has the bytes of its own dequantization; and
    training goes on as without."""
    flags = {"--train-iters": 3, "--num-layers": 2, "--clip-grad": 0, "--deterministic-mode": True}
    flags |= FEW
    runs = {
        name: Run(flags, plugin=(), switches=switches)
        for name, switches in {"plain": (), "exporting": ("export",)}.items()
    }
    done = Machine(tmp_path, 2, environment=DETERMINISTIC_ENVIRONMENT | EAGER).train(runs)
    [plain], [exporting] = done["plain"], done["exporting"]
    assert plain.error is exporting.error is None
    assert exporting.exported == 4  # qkv and projection of both layers
    assert len(plain.losses) == 3
    assert exporting.losses == plain.losses


ITERATIONS = ["--optimizer-cuda-graph", "--cuda-graph-impl", "full_iteration"]
ITERATIONS += ["--overlap-grad-reduce", "--overlap-param-gather"]
GRAPHS = {
    "of the step": ["--optimizer-cuda-graph"],
    "of the step and of whole iterations": ITERATIONS,
    "of all, after one iteration": [*ITERATIONS, "--cuda-graph-warmup-steps", "1"],
}
STATIC = ["--deterministic-mode", "--te-rng-tracker", "--no-check-for-nan-in-loss-and-grad"]
STATIC += ["--moe-expert-capacity-factor", "4", "--moe-pad-expert-input-to-capacity"]
STATIC += ["--num-layers", "1", "--train-iters", "12", "--eval-interval", "4"]
STATIC += ["--save-interval", "1000", *(str(word) for pair in FEW.items() for word in pair)]
COMMAND = "import sys; from moe_optim.commands.cli.main import main; sys.exit(main())"


def train_with_graphs(out, flags):
    """Return the losses of a run in a process of its own, and whether its step became a graph."""
    command = [sys.executable, "-c", COMMAND, "train", str(RECIPE), "--out", str(out), "--"]
    with places(1):
        done = subprocess.run(
            [*command, *STATIC, *flags],
            env=os.environ | DETERMINISTIC_ENVIRONMENT,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    summary = json.loads((out / "summary.json").read_text())
    keys = ("loss_first", "loss_last", "validation_losses", "test_loss")
    log = "".join(path.read_text() for path in (out / "logs").rglob("*.log"))
    return [summary[key] for key in keys], "the step is a CUDA graph from now on" in log


def test_graphs_of_steps_give_eagers_losses(tmp_path):
    """With clipping active and evaluations in between, to the bit; what is compared says how many
    iterations and evaluations there were."""
    runs = {"none": [], **GRAPHS}
    folders = [tmp_path / name.replace(" ", "-") for name in runs]
    with ThreadPoolExecutor(len(runs)) as pool:
        found = dict(zip(runs, pool.map(train_with_graphs, folders, runs.values()), strict=True))
    eager, was_captured = found.pop("none")
    assert not was_captured
    assert found == dict.fromkeys(GRAPHS, (eager, True))
