"""One step of Muon is that of emerging-optimizers to the bit on a CPU.

The oracles are torch's own operations with Python numbers, and the whole optimizer.
"""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_optim.formats.reference.muon import MuonHyper, apply_into, momentum_into
from moe_optim.formats.reference.newton_schulz import COEFFICIENTS, Orthogonalization, orthogonalize
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import normal_weights, wide_range_weights

ONE = torch.tensor(1.0)
SKIP = torch.tensor(-1.0)
TYPICAL = MuonHyper(lr=2e-2, momentum=0.95, weight_decay=0.1, scale=24.0, extra_scale_factor=0.2)

RATES = st.floats(2.0**-20, 1 - 2.0**-20)
"""No weight is 1, where the sign of a zero depends on its place in torch's vectors."""
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32)
NESTEROV = pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])


def row_of(**settings):
    named = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "scale": 1.0} | settings
    return torch.tensor(MuonHyper(**named).row())


# Momentum


@NESTEROV
@settings(max_examples=30)
@given(pairs=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=70), momentum=RATES)
@example(pairs=[(1.0, -3.0)], momentum=0.5)
@example(pairs=[(2.0**-149, 2.0**-130), (2.0**-126, -(2.0**-149))], momentum=0.3)
def test_momentum_is_lerp_of_torch(pairs, momentum, nesterov):
    """Lengths reach past full vectors of the CPU, so that remainders are covered."""
    gradient, before = torch.tensor(pairs).T.contiguous()
    want = before.clone().lerp_(gradient, 1 - momentum)
    want_direction = gradient.lerp(want, momentum) if nesterov else want
    got, row = before.clone(), row_of(momentum=momentum)
    direction = momentum_into(gradient, got, hyper=row, clip=ONE, nesterov=nesterov)
    assert_bytes_equal(got, want, what="momentum")
    assert_bytes_equal(direction, want_direction, what="direction")


@NESTEROV
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_clip_factor_rounds_the_gradient_first(dtype, nesterov):
    gradient, before = wide_range_weights(2, 100, exponents=(-20, 20))
    gradient, row = gradient.to(dtype), row_of()
    unchanged, clip = gradient.clone(), torch.tensor(0.37)
    got, want = before.clone(), before.clone()
    direction = momentum_into(gradient, got, hyper=row, clip=clip, nesterov=nesterov)
    clipped = gradient.float() * clip
    want_direction = momentum_into(clipped, want, hyper=row, clip=ONE, nesterov=nesterov)
    assert_bytes_equal(got, want, what="momentum")
    assert_bytes_equal(direction, want_direction, what="direction")
    assert_bytes_equal(gradient, unchanged, what="gradient")


@NESTEROV
def test_a_skipped_step_keeps_momentum_and_master(nesterov):
    """Whatever the gradient holds, the direction stays finite."""
    before, master = normal_weights(2, 50)
    momentum, after = before.clone(), master.clone()
    gradient = torch.full((50,), torch.nan)
    row = torch.tensor(TYPICAL.row())
    direction = momentum_into(gradient, momentum, hyper=row, clip=SKIP, nesterov=nesterov)
    apply_into(after, direction, hyper=row, clip=SKIP)
    assert_bytes_equal(momentum, before, what="momentum")
    assert_bytes_equal(direction, before, what="direction")
    assert_bytes_equal(after, master, what="master")


# Masters


@settings(max_examples=40)
@given(
    pairs=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=70),
    lr=st.floats(1e-12, 1),
    weight_decay=st.one_of(st.just(0.0), st.floats(1e-6, 1)),
    scale=st.floats(2.0**-10, 2.0**10),
    extra=st.floats(2.0**-10, 2.0**10),
)
def test_the_update_is_addition_of_torch(pairs, lr, weight_decay, scale, extra):
    master, direction = torch.tensor(pairs).T.contiguous()
    want = master.clone()
    if weight_decay:
        want.add_(want, alpha=-weight_decay * lr)
    want.add_(direction * scale * extra, alpha=-lr)
    hyper = MuonHyper(
        lr=lr, momentum=0.9, weight_decay=weight_decay, scale=scale, extra_scale_factor=extra
    )
    apply_into(master, direction, hyper=torch.tensor(hyper.row()), clip=ONE)
    assert_bytes_equal(master, want, what="master")


# The whole step


@settings(max_examples=25)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3),
    how=st.builds(
        Orthogonalization,
        coefficient_type=st.sampled_from(sorted(COEFFICIENTS)),
        num_steps=st.integers(1, 7),
        scale_mode=st.sampled_from(["spectral", "unit_rms_norm", "shape_scaling"]),
        extra_scale_factor=st.sampled_from([1.0, 0.2]),
        precision=st.sampled_from(["medium", "high", "highest"]),
    ),
    nesterov=st.booleans(),
    momentum=st.sampled_from([0.0, 0.2, 0.4999, 0.5, 0.9, 0.95]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.3]),
    lr=st.sampled_from([3e-4, 0.02, 0.7]),
)
def test_five_steps_equal_emerging_optimizers(shapes, how, nesterov, momentum, weight_decay, lr):
    """Rates change after three steps, as a schedule changes them."""
    masters = [normal_weights(*shape, seed=index) for index, shape in enumerate(shapes)]
    params = [torch.nn.Parameter(master.clone()) for master in masters]
    momenta = [torch.zeros_like(master) for master in masters]
    optimizer = Muon(
        params,
        lr,
        momentum,
        weight_decay,
        nesterov=nesterov,
        fp32_matmul_prec=how.precision,
        coefficient_type=how.coefficient_type,
        num_ns_steps=how.num_steps,
        scale_mode=how.scale_mode,
        extra_scale_factor=how.extra_scale_factor,
    )
    for step in range(5):
        rate = lr if step < 3 else lr * 0.3
        optimizer.param_groups[0]["lr"] = rate
        for index, param in enumerate(params):
            param.grad = normal_weights(*param.shape, seed=100 * step + index)
            hyper = MuonHyper(
                lr=rate,
                momentum=momentum,
                weight_decay=weight_decay,
                scale=how.scale(*param.shape),
                extra_scale_factor=how.extra_scale_factor,
            )
            _step(masters[index], momenta[index], param.grad, how, hyper, nesterov)
        optimizer.step()
        for param, master, own in zip(params, masters, momenta, strict=True):
            assert_bytes_equal(master, param.data, what=f"step {step}: master")
            stock = optimizer.state[param]["momentum_buffer"]
            assert_bytes_equal(own, stock, what=f"step {step}: momentum")


def _step(master, momentum, gradient, how, hyper, nesterov):
    row, flat = torch.tensor(hyper.row()), momentum.view(-1)
    direction = momentum_into(gradient.view(-1), flat, hyper=row, clip=ONE, nesterov=nesterov)
    result = orthogonalize(direction.view_as(master), how)
    apply_into(master.view(-1), result.reshape(-1), hyper=row, clip=ONE)


# Hyper-parameters


def test_hyper_parameters_round_once_from_fp64():
    """One minus the momentum and the product of rate and decay round after fp64 computes them."""
    hyper = MuonHyper(lr=0.3, momentum=0.95, weight_decay=0.1, scale=2**0.5, extra_scale_factor=0.2)
    wanted = [0.95, 1 - 0.95, -0.1 * 0.3, -0.3, 2**0.5, 0.2]
    assert hyper.row() == torch.tensor(wanted, dtype=torch.float64).float().tolist()
    assert hyper.row()[1] != (torch.tensor(1.0) - torch.tensor(0.95)).item()


def test_without_decay_nothing_is_multiplied():
    """An infinite master stays infinite, and zero keeps its sign."""
    master = torch.tensor([torch.inf, -0.0])
    apply_into(master, torch.zeros(2), hyper=row_of(lr=-1.0), clip=ONE)
    assert master.tolist() == [torch.inf, 0.0]
