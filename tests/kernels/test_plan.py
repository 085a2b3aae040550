"""Plans make their calls in order; parts cover ranges once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_optim.kernels.cutting import cut_ranges, int64
from moe_optim.kernels.plan import Plan


def test_a_launch_makes_all_calls_in_order_and_records_nothing_for_autograd():
    weight, seen = torch.ones(2, requires_grad=True), []
    calls = [lambda n=n: seen.append((n, (weight * 2).requires_grad)) for n in range(3)]
    Plan(device=torch.device("cpu"), calls=tuple(calls)).launch()
    assert seen == [(0, False), (1, False), (2, False)]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=6),
    one_length=st.none() | st.integers(1, 9),
)
def test_parts_cover_every_range_once_and_in_order(sizes, one_length):
    numels, lengths = [n for n, _ in sizes], [one_length or length for _, length in sizes]
    ranges, numbers, bounds = cut_ranges(int64(numels), one_length or int64(lengths))
    covered = [
        (which, element)
        for which, number in zip(ranges.tolist(), numbers.tolist(), strict=True)
        for element in range(
            number * lengths[which], min(numels[which], (number + 1) * lengths[which])
        )
    ]
    assert covered == [(which, element) for which, n in enumerate(numels) for element in range(n)]
    assert bounds.diff().tolist() == ranges.bincount(minlength=len(numels)).tolist()
