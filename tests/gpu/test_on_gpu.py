"""What the CPU suite shows must hold on a GPU too: the same bytes, the same loop, over NCCL."""

import json
from pathlib import Path

import pytest
import torch

from moe_optim.commands.cli import main as cli
from moe_optim.formats import FORMATS, BlockScaledFormat, reference
from tests.support.bytes import assert_bytes_equal
from tests.support.gpu_sharing import places
from tests.support.inputs import wide_range_weights

RECIPES = Path(__file__).parents[2] / "recipes"
SHORT = ["--train-iters", "20", "--eval-interval", "10", "--save-interval", "10"]


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_oracle_gives_the_same_bytes_on_both_devices(format: BlockScaledFormat):
    """Plain torch rounds alike on CPU and GPU, in every buffer of every format."""
    master = wide_range_weights(3, 256, 384)
    here = reference.quantize(master, format)
    there = reference.quantize(master.cuda(), format)
    for name, buffer in here.buffers().items():
        assert_bytes_equal(there.buffers()[name].cpu(), buffer, what=f"{format.name} {name}")
    for direction in ("rowwise", "columnwise"):
        values = reference.dequantize(here, direction)
        assert_bytes_equal(reference.dequantize(there, direction).cpu(), values, what=direction)


def train(out: Path, *options: str, recipe: str = "quickstart.yaml") -> dict:
    """Run the command, which must succeed, and return its summary."""
    with places(torch.cuda.device_count()):
        assert cli.main(["train", str(RECIPES / recipe), "--out", str(out), *options]) == 0
    return json.loads((out / "summary.json").read_text())


@pytest.mark.gpu
@pytest.mark.slow
def test_quickstart_trains_on_one_gpu(tmp_path: Path):
    """One rank over NCCL: quantized experts, evaluation, checkpoint, and a loss that falls."""
    summary = train(tmp_path / "run", "--ranks", "1", "--", *SHORT)
    assert summary["optimizer"] == "GroupedDistributedOptimizer"
    assert summary["quantized_parameters"] > 0
    assert summary["loss_last"] < summary["loss_first"]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("format", ["mxfp8", "bf16"])
def test_quickstart_trains_on_two_gpus(format: str, tmp_path: Path):
    """Two ranks over NCCL, gather overlapped with the forward pass."""
    summary = train(tmp_path / "run", "--set", f"moe_optim.format={format}", "--", *SHORT)
    assert summary["world_size"] == 2
    assert summary["loss_last"] < summary["loss_first"]


@pytest.mark.four_gpus
def test_quickstart_trains_with_experts_spread_over_gpus(tmp_path: Path):
    """Half of the experts on each of two ranks, and the same on two more."""
    summary = train(tmp_path / "run", "--", *SHORT, recipe="quickstart_ep2.yaml")
    assert summary["world_size"] == 4
    assert summary["quantized_parameters"] > 0
    assert summary["loss_last"] < summary["loss_first"]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, "stock", marks=pytest.mark.multi_gpu),
        pytest.param(4, "aligned", marks=pytest.mark.four_gpus),
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_wires_agree_on_gpus(format: str, ranks: int, layout: str, tmp_path: Path):
    """Quantized bytes overlapped with the forward pass, and bf16 gathered in the step and quantized
    by everyone, give the same losses, to the bit. Steps are fused in both: with ``layout: stock``
    they would be Megatron's, whose norm is rounded otherwise.

    On two ranks the second run has the other layout, too; it cuts the same but of FP8 blocks, whose
    block rows of 128 rows no experts of this size fill. From three ranks on NCCL adds gradients
    in an order that depends on who owns an element, so there both have the same one.
    """
    options = ["--ranks", str(ranks), "--set", f"moe_optim.format={format}", "moe_optim.step=fused"]
    if layout == "stock" and format == "fp8_block":  # which Megatron cuts inside of blocks then
        options += ["megatron_args.--num-experts=5", "megatron_args.--moe-ffn-hidden-size=288"]
    bf16 = [
        "moe_optim.wire=bf16",
        f"moe_optim.layout={layout}",
        "megatron_args.--overlap-param-gather=false",
    ]
    quantized = train(tmp_path / "quantized", *options, "--", *SHORT)
    by_everyone = train(tmp_path / "bf16", *options, *bf16, "--", *SHORT)
    for key in ("loss_first", "loss_last", "validation_losses"):
        assert quantized[key] == by_everyone[key]
