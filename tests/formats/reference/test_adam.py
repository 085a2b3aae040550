"""One step of Adam is Transformer Engine's formula: every product and sum rounds as it does there.

The oracles are exact fractions for the moments, and fp64 for the masters.
"""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.formats.reference.adam import Hyper, step_into
from tests.support.bytes import assert_bytes_equal, assert_values_equal
from tests.support.inputs import wide_range_weights
from tests.support.steps.adam_cases import HYPER, SMALLEST, as_tensors, cases

DECAYS = pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "L2"])
TYPICAL = Hyper(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3)


def fp32(value: Fraction) -> Fraction:
    """Round once, to nearest even; what stays below the smallest normal number is zero."""
    if not value:
        return value
    exponent = math.frexp(value)[1] - 1
    spacing = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(value / spacing) * spacing
    return rounded if abs(rounded) >= SMALLEST else Fraction(0)


def exact(value: float) -> Fraction:
    return fp32(Fraction(value))


def moments_of(master, gradient, exp_avg, exp_avg_sq, row, clip, decoupled):
    """Return both moments after a step, of finite floats that overflow nowhere."""
    beta1, rest1, beta2, rest2, _, _, _, decay, _ = map(Fraction, row)
    g = fp32(exact(gradient) * Fraction(clip))
    if not decoupled:
        g = fp32(decay * exact(master) + g)
    m = fp32(beta1 * exact(exp_avg) + fp32(rest1 * g))
    v = fp32(beta2 * exact(exp_avg_sq) + fp32(fp32(rest2 * g) * g))
    return float(m), float(v)


def stepped(states, gradient, row, *, clip=1.0, decoupled=True, moments=torch.float32):
    """Return master and moments after a step, of states [3, n]."""
    master, exp_avg, exp_avg_sq = states[0].clone(), *states[1:].to(moments, copy=True)
    before = gradient.clone()
    hyper, factor = torch.tensor(row), torch.tensor(clip)
    step_into(master, gradient, exp_avg, exp_avg_sq, hyper=hyper, clip=factor, decoupled=decoupled)
    assert_bytes_equal(gradient, before, what="gradient")
    return master, exp_avg, exp_avg_sq


def random_states(numel=2000, seed=0):
    """Return states [3, n] and gradients [n] of magnitudes that spread far."""
    values = wide_range_weights(4, numel, seed=seed, exponents=(-24, 4))
    return torch.stack([values[0], values[1], values[2].square()]), values[3]


# Moments

NUMBERS = st.floats(-(2.0**50), 2.0**50, width=32)


@DECAYS
@settings(max_examples=25)
@given(
    elements=st.lists(
        st.tuples(NUMBERS, NUMBERS, NUMBERS, st.floats(0, 2.0**100, width=32)),
        min_size=1,
        max_size=40,
    ),
    betas=st.tuples(*[st.floats(0.0625, 0.9990234375, width=32)] * 2),
    clip=st.floats(2.0**-20, 1, width=32),
)
def test_moments_round_where_the_formula_does(elements, betas, clip, decoupled):
    row = Hyper(lr=1e-3, betas=betas, eps=1e-8, weight_decay=0.1, step=3).row()
    master, gradient, exp_avg, exp_avg_sq = torch.tensor(elements).T
    states = torch.stack([master, exp_avg, exp_avg_sq])
    _, m, v = stepped(states, gradient, row, clip=clip, decoupled=decoupled)
    wanted = [moments_of(*element, row, clip, decoupled) for element in elements]
    assert list(zip(m.tolist(), v.tolist(), strict=True)) == wanted


def test_a_sum_of_a_product_rounds_once():
    """1 + 2^-23 + 2^-24 - 2^-54 lies below the tie that fp64 makes of it."""
    row = [1 - 2.0**-15, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 0.0, -0.5]
    states = torch.tensor([[0.0], [2.0**-24 * (1 + 2.0**-15)], [0.0]])
    _, m, _ = stepped(states, torch.tensor([1 + 2.0**-23]), row)
    assert m.item() == 1 + 2.0**-23


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_moments_in_bf16_round_once_to_nearest_even(gradients):
    """The master is that of moments in fp32."""
    states, gradient = random_states()
    states[1:] = states[1:].bfloat16().float()
    row = TYPICAL.row()
    want = stepped(states, gradient.to(gradients), row)
    got = stepped(states, gradient.to(gradients), row, moments=torch.bfloat16)
    assert_bytes_equal(got[0], want[0], what="master")
    for moment, whole in zip(got[1:], want[1:], strict=True):
        bits = whole.view(torch.int32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        assert_bytes_equal(moment.view(torch.int16), nearest.to(torch.int16), what="moment")


# Masters


@DECAYS
@pytest.mark.parametrize("step", [1, 1000])
def test_masters_follow_from_the_moments_to_the_last_place_but_one(decoupled, step):
    """What fp64 makes of them is three units of the largest of what is added up away, for the
    quotients round five times; and one unit where the master is sixteen times the update."""
    states, gradient = random_states()
    states[0, ::2] *= 2.0**12
    row = Hyper(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=step).row()
    master, *moments = stepped(states, gradient, row, decoupled=decoupled)
    p, m, v = states[0].double(), *(one.double() for one in moments)
    *_, correction1, correction2, eps, decay, minus_lr = row
    update = m / correction1 / ((v / correction2).sqrt() + eps)
    if decoupled:
        update = update + decay * p
    want = p + minus_lr * update
    largest = torch.stack([want, p, minus_lr * update]).abs().amax(0)
    unit = torch.exp2(torch.frexp(largest).exponent - 24.0)
    units = torch.where(p.abs() >= 16 * (minus_lr * update).abs(), 1, 3)
    assert {1, 3} == set(units.tolist())
    assert ((master.double() - want).abs() <= units * unit).all()


# Special values


@DECAYS
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_table_of_special_values(decoupled, moments):
    """The largest number is infinite in bf16, as a moment before and after."""
    table = cases(decoupled=decoupled)
    if moments is torch.bfloat16:
        table = {name: case for name, case in table.items() if "largest" not in name}
    states, gradients, wanted = as_tensors(table)
    got = stepped(states, gradients, HYPER.row(), decoupled=decoupled, moments=moments)
    for index, name in enumerate(table):
        for one, want, what in zip(got, wanted, ("master", "exp_avg", "exp_avg_sq"), strict=True):
            assert_values_equal(one[index], want[index].to(one.dtype), what=f"{name}: {what}")


# Hyper-parameters


@pytest.mark.parametrize("step", [1, 2, 1000])
def test_corrections_are_of_the_rounded_betas_in_fp64(step):
    betas = (0.9, 0.999)
    row = Hyper(lr=1e-3, betas=betas, eps=1e-8, weight_decay=0.1, step=step).row()
    for column, beta in zip((4, 5), betas, strict=True):
        power = torch.tensor(beta).double().item() ** step
        assert row[column] == torch.tensor(1 - power, dtype=torch.float64).float().item()
    first, second = (1 - exact(beta) ** step for beta in betas)
    assert row[4:6] == [float(fp32(first)), float(fp32(second))]


def test_without_bias_correction_nothing_is_divided():
    hyper = Hyper(
        lr=0.5, betas=(0.5, 0.5), eps=1.0, weight_decay=0.0, step=7, bias_correction=False
    )
    assert hyper.row()[4:6] == [1.0, 1.0]
    states, gradient = torch.zeros(3, 1), torch.tensor([4.0])
    states[2] = 2.0  # the second moment becomes 1 + 8
    master, m, v = stepped(states, gradient, hyper.row())
    assert (master.item(), m.item(), v.item()) == (-(2 / (3 + 1)) / 2, 2, 9)
