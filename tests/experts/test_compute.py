"""GEMMs of bf16 weights in low precision read current values, of a format or a grid."""

import copy
import pickle

import pytest
import torch
from torch.nn.functional import grouped_mm

from moe_optim.calibration.fake_quantization import PER_EXPERT_GRIDS
from moe_optim.errors import LayoutError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.operands import live_amax
from moe_optim.formats import INT4, MXFP8, NVFP4
from moe_optim.formats.reference.fake import (
    clip_gradient,
    fake_quantize,
)
from moe_optim.kernels.member_table import MemberTable
from tests.support.bytes import assert_bytes_equal
from tests.support.formats import REPRESENTATIVE_FORMATS
from tests.support.inputs import wide_range_weights
from tests.support.modules.compiling import make_linear

SHAPE = (3, 64, 32)
ENDS = torch.tensor([5, 5, 16], dtype=torch.int32)
INT8 = PER_EXPERT_GRIDS["int8_per_expert"]
every_grid = pytest.mark.parametrize("grid", PER_EXPERT_GRIDS.values(), ids=PER_EXPERT_GRIDS)
every_layout = pytest.mark.parametrize("layout", ["grouped", "indexed"])
every_format = pytest.mark.parametrize(
    "format", REPRESENTATIVE_FORMATS.values(), ids=REPRESENTATIVE_FORMATS
)


def values(seed=0):
    """Return weights whose rowwise and columnwise copies differ where the format has two."""
    return wide_range_weights(*SHAPE, seed=seed, exponents=(-8, 8)).bfloat16()


def make_computing(format=MXFP8, layout="grouped", seed=0, **options):
    return make_linear(None, layout, compute=format, seed=seed, **options)


def make_storing(format=MXFP8, layout="grouped", seed=0):
    return make_linear(format, layout, seed=seed)


def make_tokens():
    return torch.randn(16, SHAPE[2], generator=torch.Generator().manual_seed(1)).bfloat16()


def run(linear, before_backward=lambda: None):
    """Return output, dgrad and wgrads of a forward and a backward pass."""
    tokens = make_tokens().requires_grad_()
    output = linear(tokens, ENDS)
    before_backward()
    output.backward(output.detach())
    linear.backward_dw()
    wgrads = [weight.grad.clone() for weight in linear.weights()]
    linear.zero_grad()
    return [output.detach(), tokens.grad, *wgrads]


def assert_same_passes(got, want):
    for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert_bytes_equal(mine, theirs, what=["output", "dgrad", "wgrad"][min(index, 2)])


@pytest.fixture
def requantizations(monkeypatch):
    """Return a list that grows by one with every call."""
    calls, launch = [], MemberTable.launch

    def counting(table):
        calls.append(table)
        launch(table)

    monkeypatch.setattr(MemberTable, "launch", counting)
    return calls


@every_format
@every_layout
def test_products_are_those_of_storage(format, layout):
    linear = make_computing(format, layout)
    assert_same_passes(run(linear), run(make_storing(format, layout)))
    assert not torch.equal(linear.operand("rowwise"), values())
    if format is MXFP8:  # else no test here could tell the copies apart
        assert not torch.equal(linear.operand("rowwise"), linear.operand("columnwise"))


@every_layout
@pytest.mark.parametrize("format", [MXFP8, INT4], ids=lambda format: format.name)
def test_a_forward_and_its_backward_pass_share_one_requantization(format, layout, requantizations):
    """One call for all experts."""
    linear = make_computing(format, layout)
    for passes in (1, 2, 3):
        run(linear)
        assert len(requantizations) == passes
        assert requantizations[-1].num_members == SHAPE[0]


def lay_in_buffer(linear):
    """Make the weights views of one buffer, as Megatron's DDP does, and return it."""
    buffer = torch.cat([weight.detach().flatten() for weight in linear.weights()])
    parts = buffer.split([weight.numel() for weight in linear.weights()])
    for weight, part in zip(linear.weights(), parts, strict=True):
        weight.data = part.view(weight.shape)
    return buffer


def _write_in_place(linear):
    with torch.no_grad():
        for weight, part in zip(linear.weights(), linear._cut(values(1)), strict=True):
            weight.copy_(part)


def _write_through_data(linear):
    for weight, part in zip(linear.weights(), linear._cut(values(1)), strict=True):
        weight.data.copy_(part)


def _write_the_buffer(linear):
    """As a gather does, also one that was begun before the forward pass and ends after it."""
    buffer = lay_in_buffer(linear)
    run(linear)
    buffer.copy_(values(1).flatten())


def _lay_elsewhere(linear):
    for weight, part in zip(linear.weights(), linear._cut(values(1)), strict=True):
        weight.data = part.clone()


CHANGES = {
    "they are written": _write_in_place,
    "they are written through data": _write_through_data,
    "a gather arrives": _write_the_buffer,
    "they are laid elsewhere": _lay_elsewhere,
    "a state dict is loaded": lambda linear: linear.load_state_dict(
        make_computing(layout=linear.expert_layout, seed=1).state_dict()
    ),
}


@every_layout
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_products_follow_the_weights(layout, change):
    linear = make_computing(layout=layout)
    before = run(linear)
    change(linear)
    after = run(linear)
    assert_same_passes(after, run(make_storing(layout=layout, seed=1)))
    assert not torch.equal(after[0], before[0])


def test_evaluation_sees_weights_exchanged_through_data_and_training_sees_them_put_back():
    """No counter of torch moves, and no step lies between."""
    linear = make_computing()
    trained = run(linear)
    linear.eval()
    linear.weight.data.copy_(values(1))
    assert_same_passes(run(linear), run(make_storing(seed=1)))
    linear.weight.data.copy_(values(0))
    linear.train()
    assert_same_passes(run(linear), trained)


@pytest.mark.parametrize("format", [MXFP8, INT8], ids=lambda format: format.name)
def test_a_backward_pass_reads_what_its_forward_pass_read(format):
    """Weights that were exchanged for an evaluation in between are not its own, nor are amaxes."""
    linear, storing = (make_computing(format) for _ in range(2))
    gradients = []
    for one in (linear, storing):
        tokens = torch.ones(16, SHAPE[2]).bfloat16().requires_grad_()
        output = one(tokens, ENDS)
        if one is linear:
            kept = one.weight.detach().clone()
            one.weight.data.copy_(values(1) * 8)
            one.eval()(tokens.detach(), ENDS)
            one.weight.data.copy_(kept)
        output.float().sum().backward()
        gradients.append(tokens.grad)
    assert_bytes_equal(*gradients)


@pytest.mark.parametrize("format", [MXFP8, INT8], ids=lambda format: format.name)
def test_gradients_of_an_evaluation_are_those_of_its_own_weights(format):
    """Not of those that training read before; modules whose gradients are wanted may be in eval."""
    linear, other = make_computing(format), make_computing(format)
    run(linear)
    for one in (linear, other):
        one.load_values(values(1) * 8)
    assert_same_passes(run(linear.eval()), run(other))
    run(linear.train())
    for one in (linear, other):
        one.load_values(values(2) / 8)
    assert_same_passes(run(linear.eval(), before_backward=linear.train), run(other))


def test_a_copy_first_made_in_inference_mode_is_rewritten_in_training():
    computing, storing = make_computing(seed=1), make_storing()
    with torch.inference_mode():
        computing(torch.ones(3, SHAPE[2]).bfloat16(), torch.tensor([1, 2, 3], dtype=torch.int32))
    computing.load_values(values())
    assert_same_passes(run(computing), run(storing))


DUPLICATES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda linear: pickle.loads(pickle.dumps(linear)),
}


@pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES.keys())
def test_a_duplicate_multiplies_its_own_weights(duplicate):
    linear = make_computing()
    before = run(linear)
    other = duplicate(linear)
    other.load_values(values(1))
    assert_same_passes(run(other), run(make_storing(seed=1)))
    assert_same_passes(run(linear), before)


def test_a_shape_that_the_format_cannot_hold_is_refused_by_name():
    with pytest.raises(LayoutError, match=r"^fc2\.weight: nvfp4 needs .* got \[40, 32\]"):
        GroupedLinear(2, 40, 32, format=None, compute=NVFP4, name="fc2")


# A grid, by a live or a calibrated amax


def amax_of(weight):
    return weight.abs().amax((1, 2), keepdim=True).float()


def by_definition(grid, amax, *, clips):
    """Return output, dgrad and wgrad [E, R, C] of values on a grid."""
    quantized = fake_quantize(values(), amax, grid.bits)
    output = grouped_mm(make_tokens(), quantized.transpose(1, 2), offs=ENDS)
    dgrad = grouped_mm(output, quantized, offs=ENDS)
    wgrad = grouped_mm(output.t(), make_tokens(), offs=ENDS)
    return output, dgrad, clip_gradient(values(), amax, wgrad) if clips else wgrad


def stacked(output, dgrad, *wgrads):
    return output, dgrad, torch.cat([one.view(-1, *SHAPE[1:]) for one in wgrads])


@every_grid
@every_layout
def test_products_are_those_of_the_grid_of_the_weights_as_they_are(layout, grid):
    want = by_definition(grid, amax_of(values()), clips=False)
    assert_same_passes(stacked(*run(make_computing(grid, layout))), want)
    plain = grouped_mm(make_tokens(), values().transpose(1, 2), offs=ENDS)
    assert not torch.equal(want[0], plain)


@every_grid
@every_layout
@pytest.mark.parametrize("delay", [False, True], ids=["", "delayed"])
@pytest.mark.parametrize("shared", [False, True], ids=["an amax an expert", "one amax"])
def test_a_calibrated_amax_is_taken_and_clips_gradients(shared, delay, layout, grid):
    amax = amax_of(values()) * 0.25
    amax = amax.amax().view(1, 1, 1) if shared else amax
    linear = make_computing(grid, layout, delay_wgrad=delay)
    linear.register_buffer("calibrated_amax", amax)
    want = by_definition(grid, amax, clips=True)
    assert_same_passes(stacked(*run(linear)), want)
    assert not torch.equal(want[2], by_definition(grid, amax, clips=False)[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_live_amaxes_are_plain_torchs(dtype):
    """Of one tensor or of many; an expert with NaN has none, and the others theirs."""
    weight = values().to(dtype)
    weight[1, 3, 4] = torch.nan
    want = weight.abs().amax((1, 2))
    for weights in ([weight], [one.clone() for one in weight]):
        assert torch.equal(live_amax(weights).nan_to_num(-1), want.nan_to_num(-1))
    assert want.isnan().tolist() == [False, True, False]
