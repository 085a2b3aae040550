"""Transformer Engine's own linears and experts, trained through quantized copies of bf16 weights.

Compared with weights that are quantized one by one in plain torch, to the bit.
"""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.step import DETERMINISTIC_ENVIRONMENT
from moe_optim.calibration.calibrate import set_calibrated_amax
from moe_optim.calibration.fake_quantization import PER_EXPERT_GRIDS
from moe_optim.config import MoEOptimConfig
from moe_optim.experts.operands import copies_of
from moe_optim.experts.weight_copies import copy_weights
from moe_optim.formats import FORMATS
from moe_optim.formats.reference.fake import fake_quantize, fake_quantize_blocks
from moe_optim.weights.te.recipe import import_error
from tests.gpu.test_coexistence_on_gpu import DROP_AND_PAD, FUSED_GRADIENTS, OVERLAP, SMALL
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import normal_weights
from tests.support.training_runs.side_runs import EAGER, Machine, Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(import_error() is not None, reason="needs Transformer Engine"),
]
EXPERTS, ROWS, COLS, SPLITS = 4, 256, 384, [64, 0, 160, 32]
AGREEING = [name for name, format in FORMATS.items() if format.directions_agree]
VALUES = normal_weights(EXPERTS, ROWS, COLS).bfloat16()
AMAX = VALUES.abs().amax((1, 2), keepdim=True).float() * 0.25
"""Calibrated amaxes, which clip."""


class OneRank:
    """A process group of one."""

    def size(self):
        return 1


def quantize(name):
    """Return the known weights in a format, or on a grid by the calibrated amaxes."""
    if (grid := PER_EXPERT_GRIDS.get(name)) is not None:
        return fake_quantize(VALUES, AMAX, grid.bits)
    return fake_quantize_blocks(VALUES, FORMATS[name])


def make_linear(*, fuses, delays=False, copied=None, quantized=None):
    """Return a linear of known weights: copied in one format, or stored as another has them."""
    from transformer_engine.pytorch import GroupedLinear

    class Linear(GroupedLinear):
        _split_grouped_checkpoint_tensor = None  # by which Megatron's class is known
        _pg_collection = SimpleNamespace(expt_tp=OneRank())

    linear = Linear(
        *(EXPERTS, COLS, ROWS),
        bias=False,
        params_dtype=torch.bfloat16,
        device="cuda",
        fuse_wgrad_accumulation=fuses,
        delay_wgrad_compute=delays,
    )
    values = VALUES if quantized is None else quantize(quantized)
    for weight, value in zip(linear.parameters(), values, strict=True):
        weight.data.copy_(value)
        if fuses:
            weight.main_grad = torch.zeros(weight.shape, device="cuda")
            weight.grad_added_to_main_grad = False
    if copied is not None:
        config = MoEOptimConfig(format="bf16", compute=copied)
        copy_weights(torch.nn.ModuleList([linear]), config, "experts")
    return linear


def train(linear, microbatches=2):
    """Return outputs, gradients of tokens, and sums of those of weights."""
    seen, weights = [], list(linear.parameters())
    sums = [torch.zeros(weight.shape, device="cuda") for weight in weights]
    for seed in range(microbatches):
        tokens = normal_weights(sum(SPLITS), COLS, seed=10 + seed).bfloat16().cuda()
        tokens.requires_grad_()
        output = linear(tokens, SPLITS)
        output.backward(normal_weights(*output.shape, seed=20 + seed).bfloat16().cuda())
        linear.backward_dw()
        seen += [output.detach(), tokens.grad]
        for total, weight in zip(sums, weights, strict=True):
            if not linear.fuse_wgrad_accumulation:
                total += weight.grad
            weight.grad = None
    return [*seen, *sums]


@pytest.mark.parametrize("format", AGREEING)
@pytest.mark.parametrize("delays", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("fuses", [False, True], ids=["apart", "fused"])
def test_a_linear_reads_copies_as_it_would_read_quantized_weights(fuses, delays, format):
    linear = make_linear(fuses=fuses, delays=delays, copied=format)
    copies_of(linear).begin_step()
    oracle = make_linear(fuses=fuses, delays=delays, quantized=format)
    for number, pair in enumerate(zip(train(linear), train(oracle), strict=True)):
        assert_bytes_equal(*pair, what=f"tensor {number}")
    if fuses:
        pairs = zip(linear.parameters(), oracle.parameters(), strict=True)
        for number, (mine, theirs) in enumerate(pairs):
            assert_bytes_equal(mine.main_grad, theirs.main_grad, what=f"main_grad {number}")
            assert mine.grad_added_to_main_grad and (mine.main_grad.any() or number == 1)


@pytest.mark.parametrize("grid", PER_EXPERT_GRIDS)
@pytest.mark.parametrize("delays", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("fuses", [False, True], ids=["apart", "fused"])
def test_calibrated_grids_clip_values_and_gradients(fuses, delays, grid):
    linear = make_linear(fuses=fuses, delays=delays, copied=grid)
    set_calibrated_amax(linear, AMAX)
    copies_of(linear).begin_step()
    oracle = make_linear(fuses=fuses, delays=delays, quantized=grid)
    got, want = train(linear), train(oracle)
    if fuses:
        got += [weight.main_grad for weight in linear.parameters()]
        want += [weight.main_grad for weight in oracle.parameters()]
    passes = (VALUES.abs() <= AMAX).cuda()
    want[-EXPERTS:] = [
        torch.where(one, grad, 0) for one, grad in zip(passes, want[-EXPERTS:], strict=True)
    ]
    for number, pair in enumerate(zip(got, want, strict=True)):
        assert_bytes_equal(*pair, what=f"tensor {number}")


def test_a_step_launches_one_kernel_for_all_experts_and_microbatches(monkeypatch):
    from moe_optim.kernels.plan import BoundKernel

    launches, call = [], BoundKernel.__call__

    def counting(kernel, *given):
        launches.append(kernel)
        call(kernel, *given)

    monkeypatch.setattr(BoundKernel, "__call__", counting)
    for format, expected in (("mxfp4", 1), ("nvfp4_rows", 2), ("e4m3_per_expert", 1 + 3)):
        linear = make_linear(fuses=True, copied=format)
        set_calibrated_amax(linear, AMAX)  # clips the sums of each microbatch
        for _ in range(2):
            copies_of(linear).begin_step()
            train(linear, 3)
            assert len(launches) == expected
            launches.clear()


BF16 = {"--fp8-format": False, "--fp8-recipe": False, "--fp8-param-gather": False}
BF16 |= {"--eval-interval": 2, "--eval-iters": 1}
FULL = {"--recompute-granularity": "full", "--recompute-method": "uniform"}
FULL |= {"--recompute-num-layers": 1}
SELECTIVE = {"--recompute-granularity": "selective", "--recompute-modules": ["moe"]}
TRAINING = {
    "mxfp4": ("mxfp4", {}, ()),
    "nvfp4_rows, overlapped": ("nvfp4_rows", OVERLAP, ()),
    "int4, accumulated by products": ("int4", FUSED_GRADIENTS, ("plain-head",)),
    "int4_g128, recomputed": ("int4_g128", FULL, ()),
    "mxfp8_rows, experts recomputed": ("mxfp8_rows", SELECTIVE, ()),
    "mxfp4, padded": ("mxfp4", DROP_AND_PAD, ()),
    "int8_per_expert, accumulated by products": (
        "int8_per_expert",
        FUSED_GRADIENTS,
        ("plain-head",),
    ),
}
LINEARS = 2 * 2  # layers, linears of one


@pytest.mark.slow
def test_losses_are_those_of_weights_quantized_by_hand(tmp_path):
    """And every linear is copied once per step, whatever else is on; evaluations copy more."""
    runs = {}
    for name, (format, flags, switches) in TRAINING.items():
        flags = {**SMALL, **BF16, **flags}
        plugin = ("format=bf16", f"compute={format}")
        runs[name] = Run(flags, plugin, 1, (*switches, "copies"))
        by_hand = (*switches, f"by-hand-{format}")
        runs[f"{name} by hand"] = Run(flags, ("format=bf16",), 1, by_hand)
    runs["bf16"] = Run({**SMALL, **BF16}, ("format=bf16",))
    machine = Machine(tmp_path, 3, environment=DETERMINISTIC_ENVIRONMENT | EAGER)
    done = {name: reports[0] for name, reports in machine.train(runs).items()}
    assert {name: report.error for name, report in done.items()} == dict.fromkeys(runs)
    for name in TRAINING:
        mine, theirs = done[name], done[f"{name} by hand"]
        assert len(mine.losses) == 4 and mine.losses == theirs.losses, name
        assert mine.losses != done["bf16"].losses, name
        grown = [b - a for a, b in zip([0, *mine.copies], mine.copies, strict=False)]
        assert [grown[0], grown[1], grown[3]] == [LINEARS] * 3, name
