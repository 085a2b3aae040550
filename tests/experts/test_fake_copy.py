"""bf16 experts whose products read the values of a grid, by a live or a calibrated amax."""

import pytest
import torch
from torch.nn.functional import grouped_mm

from moe_optim.calibration.fake_quantization import PER_EXPERT_GRIDS
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.operands import live_amax
from moe_optim.formats.reference.fake import clip_gradient, fake_quantize
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights

SHAPE = (3, 64, 32)
ENDS = torch.tensor([5, 5, 16], dtype=torch.int32)
every_layout = pytest.mark.parametrize("layout", ["grouped", "indexed"])
every_grid = pytest.mark.parametrize("grid", PER_EXPERT_GRIDS.values(), ids=PER_EXPERT_GRIDS)
INT8 = PER_EXPERT_GRIDS["int8_per_expert"]


def values(seed=0):
    return wide_range_weights(*SHAPE, seed=seed, exponents=(-4, 4)).bfloat16()


def amax_of(weight):
    return weight.abs().amax((1, 2), keepdim=True).float()


def tokens():
    return torch.randn(16, SHAPE[2], generator=torch.Generator().manual_seed(1)).bfloat16()


def make(grid=INT8, layout="grouped", amax=None, **options):
    linear = GroupedLinear(
        *SHAPE, format=None, compute=grid, expert_layout=layout, name="fc1", **options
    )
    linear.load_values(values())
    linear.register_buffer("calibrated_amax", amax)
    return linear


def run(linear):
    """Return output, dgrad and wgrad [E, R, C] of a forward and a backward pass."""
    given = tokens().requires_grad_()
    output = linear(given, ENDS)
    output.backward(output.detach())
    linear.backward_dw()
    wgrads = [weight.grad for weight in linear.weights()]
    wgrad = wgrads[0] if linear.expert_layout == "grouped" else torch.stack(wgrads)
    linear.zero_grad()
    return output.detach(), given.grad, wgrad.clone()


def by_definition(weight, grid, amax, *, clips):
    quantized = fake_quantize(weight, amax, grid.bits)
    output = grouped_mm(tokens(), quantized.transpose(1, 2), offs=ENDS)
    dgrad = grouped_mm(output, quantized, offs=ENDS)
    wgrad = grouped_mm(output.t(), tokens(), offs=ENDS)
    return output, dgrad, clip_gradient(weight, amax, wgrad) if clips else wgrad


def assert_same(got, want):
    for name, mine, theirs in zip(("output", "dgrad", "wgrad"), got, want, strict=True):
        assert_bytes_equal(mine, theirs, what=name)


@every_grid
@every_layout
def test_products_are_those_of_the_grid_of_the_weights_as_they_are(layout, grid):
    want = by_definition(values(), grid, amax_of(values()), clips=False)
    linear = make(grid, layout)
    assert_same(run(linear), want)
    assert f"compute={grid.name}" in repr(linear)
    assert not [name for name in linear.state_dict() if not name.startswith("weight")]
    assert not torch.equal(want[0], grouped_mm(tokens(), values().transpose(1, 2), offs=ENDS))


@every_grid
@every_layout
@pytest.mark.parametrize("delay", [False, True], ids=["", "delayed"])
@pytest.mark.parametrize("shared", [False, True], ids=["an amax an expert", "one amax"])
def test_a_calibrated_amax_is_taken_and_clips_gradients(shared, delay, layout, grid):
    amax = amax_of(values()) * 0.25
    amax = amax.amax().view(1, 1, 1) if shared else amax
    want = by_definition(values(), grid, amax, clips=True)
    assert_same(run(make(grid, layout, amax, delay_wgrad=delay)), want)
    assert not torch.equal(want[2], by_definition(values(), grid, amax, clips=False)[2])


def test_a_backward_pass_takes_the_amaxes_of_its_forward_pass():
    """Weights exchanged for an evaluation in between leave none of theirs."""
    linear = make()
    given = tokens().requires_grad_()
    output = linear(given, ENDS)
    kept = linear.weight.detach().clone()
    linear.weight.data.copy_(values(1) * 8)
    linear.eval()(tokens(), ENDS)
    linear.weight.data.copy_(kept)
    output.backward(output.detach())
    assert_bytes_equal(given.grad, run(make())[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_live_amaxes_are_plain_torchs(dtype):
    """Of one tensor or of many; an expert with NaN has none, and the others theirs."""
    weight = values().to(dtype)
    weight[1, 3, 4] = torch.nan
    want = weight.abs().amax((1, 2))
    for weights in ([weight], [one.clone() for one in weight]):
        assert torch.equal(live_amax(weights).nan_to_num(-1), want.nan_to_num(-1))
    assert want.isnan().tolist() == [False, True, False]
