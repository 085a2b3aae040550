"""Raises an error of one rank on all ranks, so that none hangs in a collective."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_object_coll_device

from moe_optim.errors import ConfigError, LayoutError, NonFiniteError, PatchError, StateError

_failures = 0
"""Agreements of this process that have raised an error on all of their ranks."""

_meets_next = False
"""Whether the next collective of all ranks is an agreement, which a failed rank may join."""


def agree(act: Callable[[], Any], group: Any) -> Any:
    """Return the result of ``act``, or raise an error of any rank on all ranks of ``group``.

    Every rank must call it; None is the group of all. ``act`` may communicate if it fails on all
    ranks or none.
    """
    result, _ = _agree(act, (), group)
    return result


def agree_on_max(act: Callable[[], Any], values: Sequence[int], group: Any) -> list[int]:
    """Return maxima of ``values`` as :func:`reduce_max` does, in the agreement on ``act``.

    Every rank must call it. An error of any rank is raised on all ranks of ``group``.
    """
    return _agree(act, values, group)[1]


def _agree(act: Callable[[], Any], values: Sequence[int], group: Any) -> tuple[Any, list[int]]:
    if torch.distributed.get_world_size(group) == 1:
        return act(), list(values)
    error: BaseException | None = None
    result = None
    try:
        result = act()
    except BaseException as raised:  # any error: other ranks must not wait for this one
        error = raised
    failed, *maxima = reduce_max([error is not None, *values], group)
    if not failed:
        return result, maxima
    global _failures
    _failures += 1
    kinds = (ConfigError, LayoutError, NonFiniteError, PatchError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), StateError)
    errors = gather_objects(error and (kind, str(error) or type(error).__name__), group)
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            kind, message = other
            raise kind(f"rank {rank}: {message}")
    return result, maxima


def announce(meets_next: bool) -> bool:
    """Set whether the next collective of all ranks is an agreement; return what was set before."""
    global _meets_next
    before, _meets_next = _meets_next, meets_next
    return before


def meet(*, meets_next: bool) -> None:
    """Agree that no rank has failed, then :func:`announce`. Every rank must call it."""
    agree(lambda: None, None)
    announce(meets_next)


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise an error of one rank on all ranks if their next collective is an agreement.

    Elsewhere the rank raises alone: the others do something else next, and would misread it.
    """
    before = _failures
    announce(False)

    def fail(error: BaseException) -> None:
        raise error

    try:
        yield
    except (Exception, SystemExit) as error:
        if _meets_next and _failures == before:
            agree(partial(fail, error), None)
        raise
    finally:
        announce(False)


def gather_objects(mine: Any, group: Any) -> list[Any]:
    """Return the picklable object of every rank of ``group``, None for all, in rank order.

    Every rank must call it.
    """
    everywhere: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everywhere, mine, group=group)
    return everywhere


def reduce_max(values: Sequence[int], group: Any) -> list[int]:
    """Return the maxima over all ranks of ``group``, None for all. Every rank must call it."""
    device = _get_object_coll_device(group)
    maxima = torch.tensor(values, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(maxima, torch.distributed.ReduceOp.MAX, group=group)
    return [int(one) for one in maxima.tolist()]


def from_first(act: Callable[[], Any], group: Any) -> Any:
    """Call ``act`` on the first rank of ``group``; return its result, or raise, on all ranks.

    Every rank must call it. The result is pickled for the others.
    """
    is_first = torch.distributed.get_rank(group) == 0
    found = [agree(act if is_first else lambda: None, group)]
    if torch.distributed.get_world_size(group) > 1:
        torch.distributed.broadcast_object_list(found, group=group, group_src=0)
    return found[0]
