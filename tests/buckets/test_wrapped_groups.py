"""Collectives arrive over groups that a stack wraps, as slime and miles do to rebuild them.

Such a stack replaces functions of ``torch.distributed`` by ones that unwrap their group, when it
starts: long after this package is imported.
"""

from typing import Any

import torch
import torch.distributed as dist

from moe_optim.buckets.gather import start_gather
from moe_optim.rollout.expert_buffers import gather_buffers
from tests.support.ranks import run_ranks

RANKS, WIDTH = 2, 1 << 20
REPLACED = ("all_gather_into_tensor", "all_reduce", "_coalescing_manager")


class _Wrapped(dist.ProcessGroup):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group


def _unwrapping(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(x.group if isinstance(x, _Wrapped) else x for x in args)
        named = {name: x.group if isinstance(x, _Wrapped) else x for name, x in kwargs.items()}
        return function(*args, **named)

    return call


def _wrap() -> _Wrapped:
    dist.init_process_group("gloo")
    group = _Wrapped(dist.new_group())
    for name in REPLACED:
        setattr(dist, name, _unwrapping(getattr(dist, name)))
    return group


def _part(rank: int) -> torch.Tensor:
    return torch.arange(WIDTH, dtype=torch.int32).view(8, -1) + 7 * rank


def _gather_slices() -> torch.Tensor:
    group = _wrap()
    rank = group.rank()
    buffer = torch.zeros(RANKS * WIDTH, dtype=torch.int32)
    buffer.chunk(RANKS)[rank].copy_(_part(rank).view(-1))
    works = start_gather([buffer], [], group, asynchronous=True)
    assert works is not None
    works.wait()
    return buffer.clone()


def _gather_experts() -> torch.Tensor:
    group = _wrap()
    (buffer,) = gather_buffers([_part(group.rank())], group).wait()
    return buffer.clone()


def _assert_whole(received: list[torch.Tensor]) -> None:
    whole = torch.cat([_part(rank) for rank in range(RANKS)])
    assert all(torch.equal(one.view(whole.shape), whole) for one in received)


def test_weights_have_arrived_when_an_overlapped_gather_was_waited_for():
    _assert_whole(run_ranks(RANKS, _gather_slices))


def test_exported_experts_have_arrived_when_they_were_waited_for():
    _assert_whole(run_ranks(RANKS, _gather_experts))
