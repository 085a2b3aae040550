"""Weights with per-tensor scaling: ranks cast what they own, with the amax of the whole weight."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moe_optim.errors import LayoutError
from moe_optim.weights.te import tensorwise
from moe_optim.weights.te.tensorwise import TensorwiseCast, Transposes, can_cast
from tests.formats.reference import scalar_oracle as oracle
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import SENTINEL, wide_range_weights, with_specials
from tests.support.ranks import run_ranks
from tests.support.te.te_stand_ins import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    MXFP8Tensor,
)

SHAPES = ((6, 10), (4, 4), (3, 7))
CUTS = ((0, 25, 60, 60), (0, 0, 16, 16), (0, 7, 7, 21))
"""Of each weight, where the shards of three ranks begin and end."""


def masters():
    """Return whole masters: their ranks have amaxes of other sizes, and one has special values."""
    found = [wide_range_weights(*shape, seed=seed) for seed, shape in enumerate(SHAPES)]
    return [*found[:-1], with_specials(found[-1], every=5, specials=(0.0, -0.0, float("nan")))]


def make_weight(shape, quantizer=None):
    weight = Float8Tensor(torch.ones(shape), quantizer or Float8CurrentScalingQuantizer())
    weight._data.fill_(SENTINEL)
    return weight


def wanted(master):
    """Return codes and inverse scale of a whole weight, by scalars."""
    values = [oracle.bf16(value) for value in master.flatten().tolist()]
    scale = oracle.fp32(448.0 / oracle.amax(values))
    codes = [oracle.e4m3(oracle.fp32(value * scale)) for value in values]
    inverse = torch.tensor([oracle.fp32(1.0 / scale)])
    return torch.tensor(codes, dtype=torch.uint8).view(master.shape), inverse


def _cast():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weights = [make_weight(shape) for shape in SHAPES]
    initial = torch.zeros(1)
    weights[0].clear_high_precision_init_val = lambda: initial.fill_(1)
    owned, starts = [], []
    for master, cuts in zip(masters(), CUTS, strict=True):
        start, end = cuts[rank : rank + 2]
        owned.append(master.flatten()[start:end].clone() if end > start else None)
        starts.append(start if end > start else None)
    cast = TensorwiseCast(weights, owned, starts)
    cast.run(dist.group.WORLD)
    first = [(weight._data.clone(), weight._scale_inv.clone()) for weight in weights]
    for master in owned:
        if master is not None:
            master.mul_(2.0)
    cast.run(dist.group.WORLD)
    second = [(weight._data.clone(), weight._scale_inv.clone()) for weight in weights]
    return first, second, initial.item(), cast.fields.have_moved


def test_ranks_cast_what_they_own_with_the_scale_of_the_whole():
    """Nothing beside it is written; every rank has the scale of every weight; initial values are
    dropped; and a second cast reads masters anew."""
    ranks = run_ranks(3, _cast)
    for index, (master, cuts) in enumerate(zip(masters(), CUTS, strict=True)):
        codes, inverse = wanted(master)
        for rank, (first, second, dropped, have_moved) in enumerate(ranks):
            assert dropped and not have_moved
            data, scale_inv = first[index]
            own = slice(*cuts[rank : rank + 2])
            want = torch.full_like(codes, SENTINEL).flatten()
            want[own] = codes.flatten()[own]
            assert_bytes_equal(data.flatten(), want, what=f"codes {index} of rank {rank}")
            assert_bytes_equal(scale_inv, inverse, what=f"scale {index} of rank {rank}")
            assert_bytes_equal(second[index][0], data, what=f"codes {index}, doubled")
            assert_bytes_equal(second[index][1], 2 * inverse, what=f"scale {index}, doubled")


@pytest.mark.parametrize("name", ["_data", "_scale_inv"])
def test_what_lies_elsewhere_is_noticed(name):
    weight = make_weight((4, 4))
    cast = TensorwiseCast([weight], [torch.ones(16)], [0])
    assert not cast.fields.have_moved
    setattr(weight, name, getattr(weight, name).clone())
    assert cast.fields.have_moved


def test_a_master_that_ends_beyond_its_weight_is_refused():
    with pytest.raises(LayoutError, match=r"weights\[0\]: data: expected \[10\]"):
        TensorwiseCast([make_weight((4, 4))], [torch.ones(10)], [8])


def recipe_with(**fields):
    quantizer = Float8CurrentScalingQuantizer()
    vars(quantizer).update(fields)
    return quantizer


OTHERS = {
    "a floor for amaxes": recipe_with(amax_epsilon=1e-6),
    "scales that are powers of two": recipe_with(force_pow_2_scales=True),
    "E5M2": recipe_with(dtype=SimpleNamespace(name="kFloat8E5M2")),
    "delayed scaling": Float8Quantizer(),
}


def test_other_recipes_dtypes_and_kinds_are_left_to_megatron():
    plain, fp32, emptied = (make_weight((4, 4)) for _ in range(3))
    fp32.dtype = torch.float32
    emptied._data = None
    others = [make_weight((4, 4), quantizer) for quantizer in OTHERS.values()]
    assert can_cast([plain])
    for one in (*others, fp32, emptied, SimpleNamespace(_quantizer=None), MXFP8Tensor):
        assert not can_cast([plain, one])
    assert not can_cast([])


UNKNOWN_TRANSPOSES = {
    "none": {"_transpose": None},
    "of other bytes": {"_transpose_invalid": True},
    "of another shape": {"_transpose": torch.empty(6, 10, dtype=torch.uint8)},
    "in columns": {"_transpose": torch.empty(6, 10, dtype=torch.uint8).t()},
}


@pytest.mark.parametrize("changes", UNKNOWN_TRANSPOSES.values(), ids=UNKNOWN_TRANSPOSES)
def test_transposes_that_transformer_engine_has_to_make_are_left_to_it(changes, monkeypatch):
    """Of any of the weights: a kernel renews all of them, or none."""
    weights = [make_weight((6, 10)) for _ in range(2)]
    for weight in weights:
        weight._transpose, weight._transpose_invalid = weight._data.t().contiguous(), False
    assert Transposes.of(weights) is None  # without kernels
    monkeypatch.setattr(tensorwise, "runs_triton", lambda _: True)
    assert Transposes.of(weights) is not None
    vars(weights[1]).update(changes)
    assert Transposes.of(weights) is None
