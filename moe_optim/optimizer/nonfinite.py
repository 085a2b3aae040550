"""Reports non-finite gradients, masters and moments by parameter, expert and owner rank."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.errors import NonFiniteError
from moe_optim.experts.module import first_experts
from moe_optim.integration.agreement import gather_objects
from moe_optim.optimizer.address_book import gradient_of, owned_masters, state_names
from moe_optim.weights.managed import is_managed
from moe_optim.weights.names import global_parameter_names

MOST_NAMED = 8
"""Maximum number of culprits per rank; with a NaN loss every gradient is one."""
_Describe = Callable[..., str]


def name_culprits(chain: Any) -> str:
    """Return the non-finite or too large gradients of all ranks. Every rank must call it."""
    rank, found = dist.get_rank(), list(_find_culprits(chain))
    lines = [f"rank {rank}: {line}" for line in found[:MOST_NAMED]]
    if len(found) > MOST_NAMED:
        lines.append(f"rank {rank}: and {len(found) - MOST_NAMED} more")
    gathered: list[list[str]] = gather_objects(lines, None)
    named = "; ".join(line for of_rank in gathered for line in of_rank)
    return named or "No square of a gradient is Inf in fp32, but the sum of all is"


def _find_culprits(chain: Any) -> Iterator[str]:
    describe = _describer(chain.model_chunks)
    too_large = "finite gradient", "whose square is Inf in fp32"
    for part in chain.stepping:
        for param, _ in owned_masters(part):
            start = part._get_model_param_range_map(param)["param"].start
            gradient = gradient_of(part, param).float()
            bad = ~gradient.isfinite()
            overflow = ~(bad | gradient.square().isfinite())
            for of, what in ((bad, ("non-finite gradient",)), (overflow, too_large)):
                if bool(of.any()):
                    yield describe(param, of.nonzero().view(-1) + start, *what)


def check_states(
    optimizers: Iterable[Any], remedy: str, *, managed_masters_only: bool = False
) -> None:
    """Raise NonFiniteError if a master or moment is Inf or NaN on any data-parallel rank of any.

    Every rank must call it; ranks outside of the group of the culprit do not raise. ``remedy`` ends
    the message; ``managed_masters_only`` leaves out moments, and masters of unmanaged weights.
    """
    lines = [line for part in optimizers for line in _find_states(part, managed_masters_only)]
    if lines:
        what = "masters" if managed_masters_only else "masters and moments"
        raise NonFiniteError(f"{what}: expected finite values, got {'; '.join(lines)}. {remedy}")


def check_masters(optimizers: Iterable[Any]) -> None:
    """Raise NonFiniteError for masters of managed weights, see :func:`check_states`."""
    check_states(
        [part for part in optimizers if part.managed_buckets],
        "No weight has been gathered from them. Load another checkpoint.",
        managed_masters_only=True,
    )


def _find_states(optimizer: Any, managed_masters_only: bool) -> list[str]:
    """Return a line per bad state of any data-parallel rank; every rank of the group must call."""
    found: list[str] = []
    describe: _Describe | None = None  # names of all parameters are looked up for a bad one alone
    moments = () if managed_masters_only else state_names(optimizer.optimizer)
    kinds = ("master", *moments)
    for param, master in owned_masters(optimizer):
        if master is None or (managed_masters_only and not is_managed(param)):
            continue
        start = optimizer._get_model_param_range_map(param)["param"].start
        states = {"master": master, **optimizer.optimizer.state.get(master, {})}
        for kind in (kind for kind in kinds if kind in states):
            if bool(states[kind].sum(dtype=torch.float32).isfinite()):
                continue  # one pass without memory; a sum beyond fp32 is looked at more closely
            bad = (~states[kind].float().isfinite()).nonzero().view(-1) + start
            if len(bad):
                describe = describe or _describer(optimizer.model_chunks)
                found.append(describe(param, bad, f"non-finite {kind}"))
    everywhere = gather_objects(found[:MOST_NAMED], optimizer.data_parallel_group)
    return [
        f"data-parallel rank {rank}: {line}"
        for rank, of_rank in enumerate(everywhere)
        for line in of_rank
    ]


def _describer(model_chunks: Sequence[torch.nn.Module]) -> _Describe:
    """Return a function of a parameter, the indices [n] of its bad elements, and what they are.

    Its result names the parameter, the experts, and the count with ``kind`` and ``more``.
    """
    names, first_of = global_parameter_names(model_chunks), first_experts(model_chunks)

    def describe(param: torch.nn.Parameter, bad: Tensor, kind: str, more: str = "") -> str:
        count = f"{len(bad)} {kind}{'s' if len(bad) > 1 else ''} {more}".rstrip()
        if param not in first_of:
            return f"{names[param]}: {count}"
        per_expert = math.prod(param.shape[-2:])
        experts = sorted({int(first_of[param] + index) for index in (bad // per_expert).tolist()})
        return f"{names[param]}, expert {', '.join(map(str, experts))}: {count}"

    return describe
