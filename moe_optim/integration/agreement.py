"""Raises an error of one rank on all ranks, so that none hangs in a collective."""

from collections.abc import Callable
from typing import Any

import torch

from moe_optim.errors import ConfigError, LayoutError, NonFiniteError, PatchError, StateError


def agree(act: Callable[[], Any], group: Any) -> Any:
    """Call ``act`` and raise an error of any rank on all ranks of ``group``.

    Every rank must call it.

    Args:
        act: function of this rank; may communicate if it fails on all ranks or none.
        group: process group; None for all ranks.

    Returns:
        Result of ``act`` on this rank.
    """
    results: list[Any] = []
    gather_results(lambda: results.append(act()), group)
    return results[0]


def gather_results(act: Callable[[], Any], group: Any) -> list[Any]:
    """Return the results of ``act`` on all ranks, as :func:`agree` calls it; they are pickled."""
    ranks = torch.distributed.get_world_size(group)
    if ranks == 1:
        return [act()]
    error: Exception | None = None
    result = None
    try:
        result = act()
    except Exception as raised:  # any error: other ranks must not wait for this one
        error = raised
    outcomes: list[Any] = [None] * ranks
    kinds = (ConfigError, LayoutError, NonFiniteError, PatchError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), StateError)
    outcome = error and (kind, str(error)), result
    torch.distributed.all_gather_object(outcomes, outcome, group=group)
    if error is not None:
        raise error
    for rank, (other, _) in enumerate(outcomes):
        if other is not None:
            kind, message = other
            raise kind(f"rank {rank}: {message}")
    return [result for _, result in outcomes]
