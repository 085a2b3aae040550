"""The launches of fake quantization, without a GPU: values and gradients are the reference's."""

import gc
import weakref

import pytest
import torch

from moe_optim.calibration.fake_operations import zero_clipped
from moe_optim.calibration.fake_quantization import fake_quantize
from moe_optim.kernels import fake, tuning
from moe_optim.kernels.fake import find_table
from moe_optim.kernels.tuning import FlatTile
from tests.support.bytes import assert_values_equal
from tests.support.inputs import normal_weights, placed, wide_range_weights, with_specials
from tests.support.number_formats.fake_values import GRIDS, by_grid, gradient_tensors, value_tensors
from tests.support.ptx.launches import plan_kernels

SMALL = FlatTile(numel=64, num_warps=1)
"""For experts of several tiles."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    for name in ("FAKE_FORWARD", "FAKE_BACKWARD"):
        monkeypatch.setattr(tuning, name, SMALL)
    plan_kernels(monkeypatch)


def run(weights, amax, gradients, backend, **grid):
    """Return values and gradients of experts, each in a tensor of its own where it lies now."""
    leaves = [one.detach().requires_grad_() for one in weights]
    results = fake_quantize(leaves, amax, **grid, check_values=False, backend=backend)
    grads = torch.autograd.grad(results, leaves, gradients)
    return [one.detach() for one in results], grads


def check(weights, amax, what, seed=1, **grid):
    """Compare both launches with the reference, on weights that are left alone."""
    before = [one.clone() for one in weights]
    gradients = [normal_weights(*one.shape, seed=seed + i) for i, one in enumerate(weights)]
    gradients = [one.to(weights[0].dtype) for one in gradients]
    got, want = (run(weights, amax, gradients, name, **grid) for name in ("auto", "reference"))
    for kind, mine, theirs in zip(("values", "gradients"), got, want, strict=True):
        for index, pair in enumerate(zip(mine, theirs, strict=True)):
            assert_values_equal(*pair, f"{what}, {kind} {index}, {grid}")
    for one, other in zip(weights, before, strict=True):
        assert_values_equal(one, other, f"{what}: weights were written")


def scatter(parts, dtype, offsets):
    """Return copies that begin some elements behind 16 bytes, in one list."""
    return [placed(part, dtype, offset) for part, offset in zip(parts, offsets, strict=True)]


def amax_of(parts, factor=0.5):
    return torch.stack([part.abs().max() for part in parts]).float() * factor


SHAPES = ((1, 1), (3, 5), (8, 8), (1, 65), (16, 24), (7, 31))


def test_every_case_of_the_table(launches):
    for bits, narrow_range, cases in by_grid(torch.float32):
        values, amax, result = value_tensors(cases, torch.float32)
        options = {"narrow_range": narrow_range, "check_values": False}
        assert_values_equal(fake_quantize(values, amax, bits, **options), result, f"{bits}")


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_random_values_round_as_the_reference_does(grid, launches):
    """Wide and special ones, too."""
    parts = [wide_range_weights(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    check(parts, amax_of(parts), "wide", **grid)
    parts = [with_specials(normal_weights(*shape), every=5) for shape in SHAPES]
    check(parts, torch.rand(len(parts)) * 0.03, "special", **grid)


def test_experts_anywhere_in_memory(launches):
    """Experts of several sizes anywhere in memory; and of one size, aligned or not."""
    parts = [normal_weights(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    for offsets in ([0] * 6, [1, 2, 3, 0, 1, 2], [3] * 6):
        check(scatter(parts, torch.float32, offsets), amax_of(parts), f"offsets {offsets}", bits=8)
    alike = [normal_weights(16, 24, seed=i) for i in range(5)]
    for offsets in ([0] * 5, [0, 1, 0, 3, 0]):
        places = scatter(alike, torch.float32, offsets)
        tables = find_table(places)
        assert tables.aligned == (not any(offsets))
        check(places, amax_of(alike), f"alike, offsets {offsets}", bits=8)
        check(places[::-1], amax_of(alike[::-1]), "other order", bits=8)


def test_gradients_of_every_case(launches):
    """Every case of the table, in every dtype, from both kinds of input."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values, amax, gradients, wanted = gradient_tensors(dtype)
        leaf = values.requires_grad_()
        result = fake_quantize(leaf, amax, check_values=False)
        (got,) = torch.autograd.grad(result, leaf, gradients)
        assert_values_equal(got, wanted, f"{dtype}")
        leaves = [one.detach().requires_grad_() for one in values]
        results = fake_quantize(leaves, amax, check_values=False)
        got = torch.autograd.grad(results, leaves, list(gradients))
        assert_values_equal(torch.stack(got), wanted, f"{dtype}, list")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_zeroed_where_they_lie(dtype, launches):
    """Sums beside bf16 values, NaN and Inf among both; unclipped ones keep their bits."""
    for offsets in ([0] * 6, [1, 2, 3, 0, 1, 2]):
        parts = [with_specials(normal_weights(*one), every=5) for one in SHAPES]
        values = scatter(parts, torch.bfloat16, offsets)
        sums = [with_specials(normal_weights(*one, seed=9), every=7) for one in SHAPES]
        for amax in (torch.rand(len(parts)) * 0.03, torch.tensor([0.02])):
            got, want = (scatter(sums, dtype, offsets) for _ in range(2))
            zero_clipped(values, amax, got, "auto")
            zero_clipped(values, amax, want, "reference")
            for at, pair in enumerate(zip(got, want, strict=True)):
                assert_values_equal(*pair, f"offsets {offsets}, expert {at}")
    assert set(launches) == {"zero_clipped_kernel"}


def test_amaxes_for_all_or_for_each(launches):
    """One for all experts, or one each; in every dtype, at any address."""
    parts = [normal_weights(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        amaxes = torch.cat([torch.zeros(1), amax_of(parts)]).to(dtype)
        check(parts, amaxes[1:], f"{dtype}", bits=8)
        check(parts, amaxes[1:2], f"{dtype}, shared", bits=8, axis=None)
    (one,) = scatter([normal_weights(8, 8)], torch.float32, [0])
    check([one], torch.tensor([0.01]), "one expert", bits=8)
    stacked = normal_weights(5, 16, 24)
    for axis, amax in ((0, torch.rand(5) * 0.05), (None, torch.tensor(0.02))):
        got, want = (
            fake_quantize(stacked, amax, axis=axis, backend=name) for name in ("auto", "reference")
        )
        assert_values_equal(got, want, f"[E, R, C], axis {axis}")


def test_tables_are_found_again(launches):
    """A table is found again by addresses, and values at the same addresses may change."""
    parts = [normal_weights(16, 24, seed=i) for i in range(3)]
    assert find_table(parts) is find_table(parts)
    assert find_table(parts) is not find_table(parts[::-1])
    assert find_table(parts) is not find_table(parts, parts)
    check(parts, amax_of(parts), "first", bits=8)
    for part in parts:
        part.mul_(3)
    check(parts, amax_of(parts), "written", bits=8)


def test_what_a_graph_replays_outlives_a_thousand_other_tables(monkeypatch):
    """A captured launch holds the address of its table, which nobody looks up again."""
    values = torch.zeros(2, 16, 16)
    find_table([values])  # a table is not built in a capture
    monkeypatch.setattr(fake, "is_capturing", lambda device: True)
    captured = weakref.ref(find_table([values]).spans)
    monkeypatch.undo()
    others = [torch.zeros(1, 16, 16) for _ in range(fake._KEPT)]
    forgotten = weakref.ref(find_table(others[:1]).spans)
    for other in (*others[1:], values[:1]):
        find_table([other])
    gc.collect()
    assert captured() is not None
    assert forgotten() is None
