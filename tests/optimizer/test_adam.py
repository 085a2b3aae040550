"""The mended Adam is torch's own to the bit, and counts its steps once, where they are saved."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.errors import ConfigError
from moe_optim.optimizer.adam import GroupStepAdam
from tests.support.bytes import assert_bytes_equal

SHAPES = ((8, 16), (33,), (2, 3, 5))
GROUPS = (  # parameters get different treatment, as Megatron gives biases and embeddings
    {"lr": 3e-3, "weight_decay": 0.1},
    {"lr": 1e-2, "weight_decay": 0.0},
    {"lr": 5e-4, "weight_decay": 0.01, "betas": (0.8, 0.99), "eps": 1e-6},
)
DEFAULTS = {"betas": (0.9, 0.95), "eps": 1e-8}
TORCHS = {True: torch.optim.AdamW, False: torch.optim.Adam}
both_modes = pytest.mark.parametrize("adam_w_mode", [True, False], ids=["AdamW", "Adam with L2"])


def make_parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
        for _ in GROUPS
    ]


def groups_of(parameters, chosen=GROUPS):
    return [{"params": own, **group} for own, group in zip(parameters, chosen, strict=True)]


def make_ours(parameters, adam_w_mode=True):
    return GroupStepAdam(groups_of(parameters), adam_w_mode=adam_w_mode, **DEFAULTS)


def make_torchs(parameters, adam_w_mode=True):
    return TORCHS[adam_w_mode](groups_of(parameters), **DEFAULTS)


def give_gradients(parameters, step, skip=()):
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(p for own in parameters for p in own):
        grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if index in skip else grad * 10.0 ** (step % 5 - 2)


def train(optimizer, parameters, steps):
    for step in steps:
        give_gradients(parameters, step)
        for group in optimizer.param_groups:  # a schedule, as Megatron's moves lr and decay
            group["lr"] = group["lr"] * 0.95
        optimizer.step()


def assert_same_parameters(got, want):
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a, b, strict=True):
            assert_bytes_equal(x, y)


def assert_same_moments(ours, ours_parameters, torchs, torchs_parameters):
    for a, b in zip(ours_parameters, torchs_parameters, strict=True):
        for x, y in zip(a, b, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                assert_bytes_equal(ours.state[x][name], torchs.state[y][name], what=name)


@settings(max_examples=20)
@given(
    adam_w_mode=st.booleans(),
    lr=st.floats(1e-6, 1.0),
    weight_decay=st.floats(0, 0.5),
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0, 0.9999),
    eps=st.floats(1e-12, 1e-3),
)
def test_any_setting_is_torchs_to_the_bit(adam_w_mode, lr, weight_decay, beta1, beta2, eps):
    mine, theirs = make_parameters(), make_parameters()
    chosen = {"lr": lr, "weight_decay": weight_decay, "betas": (beta1, beta2), "eps": eps}
    ours = GroupStepAdam(groups_of(mine, [chosen] * 3), adam_w_mode=adam_w_mode)
    torchs = TORCHS[adam_w_mode](groups_of(theirs, [chosen] * 3))
    train(ours, mine, range(4))
    train(torchs, theirs, range(4))
    assert_same_moments(ours, mine, torchs, theirs)
    assert_same_parameters(mine, theirs)


@pytest.mark.parametrize("name", ["amsgrad", "maximize"])
def test_settings_that_change_the_update_are_refused_wherever_they_are_given(name):
    message = f"^optimizer: parameter groups: {name}: expected False, .*got True. Leave it out.$"
    parameters = make_parameters()
    with pytest.raises(ConfigError, match=message):
        GroupStepAdam(parameters[0], **{name: True})
    with pytest.raises(ConfigError, match=message):
        GroupStepAdam([{"params": parameters[0], name: True}])
    optimizer = make_ours(parameters)
    others = TORCHS[True](groups_of(parameters), **DEFAULTS, **{name: True})
    with pytest.raises(ConfigError, match=message):
        optimizer.load_state_dict(others.state_dict())
    optimizer = make_ours(parameters)
    optimizer.param_groups[1][name] = True
    before = copy.deepcopy(parameters)
    give_gradients(parameters, 0)
    with pytest.raises(ConfigError, match=message):
        optimizer.step()
    assert_same_parameters(parameters, before)


# What moments are held in

HELD = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


def rounded(values, dtype):
    """Return what is left of a moment: bf16 as it is, the others scaled so that they fit."""
    if dtype is torch.bfloat16:
        return values.bfloat16().float()
    held, largest = (
        (torch.float16, 32752.0) if dtype is torch.float16 else (torch.float8_e4m3fn, 448.0)
    )
    scale = values.abs().max() / largest
    return (values * (1 / scale)).to(held).float() * scale


@pytest.mark.parametrize("first", HELD)
@pytest.mark.parametrize("second", HELD)
def test_narrow_moments_are_rounded_after_a_step_in_fp32(first, second):
    """The oracle is torch's Adam in fp32, whose moments are rounded between steps."""
    mine, theirs = make_parameters(), make_parameters()
    dtypes = {"exp_avg": HELD[first], "exp_avg_sq": HELD[second]}
    ours = GroupStepAdam(
        groups_of(mine), **DEFAULTS, **{f"{name}_dtype": dtype for name, dtype in dtypes.items()}
    )
    torchs = make_torchs(theirs)
    for step in range(5):
        train(ours, mine, [step])
        train(torchs, theirs, [step])
        assert_same_parameters(mine, theirs)
        for own, other in zip(
            (p for group in mine for p in group),
            (p for group in theirs for p in group),
            strict=True,
        ):
            for name, dtype in dtypes.items():
                moment = torchs.state[other][name]
                moment.copy_(rounded(moment, dtype))
                assert_bytes_equal(ours.get_unscaled_state(own, name), moment, what=name)


def test_narrow_moments_are_saved_as_values_and_come_back_to_the_bit():
    mine = make_parameters()
    narrow = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.uint8}
    ours = GroupStepAdam(groups_of(mine), **DEFAULTS, **narrow)
    train(ours, mine, range(3))
    saved = copy.deepcopy(ours.state_dict())
    assert {tensor.dtype for state in saved["state"].values() for tensor in state.values()} == {
        torch.float32
    }
    other = GroupStepAdam(groups_of(mine), **DEFAULTS, **narrow)
    other.load_state_dict(saved)
    for own in (p for group in mine for p in group):
        for name in ("exp_avg", "exp_avg_sq"):
            assert_bytes_equal(
                other.get_unscaled_state(own, name), ours.get_unscaled_state(own, name), what=name
            )


# Where the step lives


def test_the_step_lives_in_the_group_and_not_in_the_state():
    """Checkpoints take every tensor of the state for one of the parameter's shape."""
    parameters = make_parameters()
    optimizer = make_ours(parameters)
    train(optimizer, parameters, range(2))
    assert [type(group["step"]) for group in optimizer.param_groups] == [int] * 3
    for own in parameters:
        for parameter in own:
            state = optimizer.state[parameter]
            assert state.keys() == {"exp_avg", "exp_avg_sq"}
            assert all(moment.shape == parameter.shape for moment in state.values())


def test_a_parameter_without_gradient_is_left_alone():
    parameters = make_parameters()
    before = copy.deepcopy(parameters)
    optimizer = make_ours(parameters)
    give_gradients(parameters, 0, skip=(0, 1, 2, 4))
    optimizer.step()
    assert_same_parameters(parameters[:1], before[:1])
    assert_bytes_equal(parameters[1][1], before[1][1])
    assert not torch.equal(parameters[1][0], before[1][0])
    assert parameters[0][0] not in optimizer.state


# Saving and loading


def _through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@both_modes
def test_a_resumed_optimizer_continues_to_the_bit(adam_w_mode):
    """Ten steps, a state dict, ten more: as twenty at once, and as torch's twenty."""
    whole, theirs = make_parameters(), make_parameters()
    train(make_ours(whole, adam_w_mode), whole, range(20))
    train(make_torchs(theirs, adam_w_mode), theirs, range(20))
    first = make_parameters()
    before = make_ours(first, adam_w_mode)
    train(before, first, range(10))
    rest = copy.deepcopy(first)
    after = make_ours(rest, not adam_w_mode)  # what is loaded wins
    after.load_state_dict(_through_a_file(before.state_dict()))
    assert [group["step"] for group in after.param_groups] == [10, 10, 10]
    train(after, rest, range(10, 20))
    assert_same_parameters(rest, whole)
    assert_same_parameters(rest, theirs)
