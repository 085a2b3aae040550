"""Plans an export from the records of all ranks: order, names, and who sends what.

A plan holds no tensors, and is kept for the records that it was made from.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.integration.agreement import agree, agree_on_max, gather_objects
from moe_optim.rollout.dense import find_pairs
from moe_optim.rollout.expert_buffers import buffers_of_part
from moe_optim.rollout.exported_as import ExportedAs
from moe_optim.rollout.families import NamePair
from moe_optim.rollout.rows import Heads
from moe_optim.rollout.units import (
    ExpertUnit,
    HeldExperts,
    HeldPart,
    HeldRecord,
    PartUnit,
    batches,
    bucket_nbytes,
    put_together,
)

Batch = tuple[ExpertUnit, ...] | list[PartUnit]
"""Units that are exchanged together."""
_KEPT = 8
"""Number of plans that a process keeps."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export, the same on every rank."""

    exported: ExportedAs
    own: bool
    bucket_bytes: int
    vocab_size: int | None
    heads: Heads | None
    """Sizes of attention, for layouts of Hugging Face's names."""


@dataclass(frozen=True, kw_only=True)
class ExportOrder:
    """Batches in export order, the same on every rank except for ``own`` experts."""

    batches: Sequence[Batch]
    options: ExportOptions
    pairs: Mapping[str, NamePair] | None
    """Names of non-expert tensors by Megatron's; None to keep these."""

    def named(self, name: str, whole: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Return a whole non-expert tensor under its exported names, views where possible."""
        heads = self.options.heads
        if self.pairs is None or heads is None:
            return [(name, whole)]
        pair = self.pairs[name]
        if pair.hf[0] in ("model.embed_tokens.weight", "lm_head.weight"):
            whole = whole[: self.options.vocab_size]
        parts = heads.split(pair.form, whole)
        return zip(pair.hf, parts * (len(pair.hf) // len(parts)), strict=True)


class KeptOrders:
    """Plans by the records of this rank, each with the number under which all ranks made it."""

    def __init__(self) -> None:
        self._orders: OrderedDict[Any, tuple[int, ExportOrder | None]] = OrderedDict()
        self._last = 0

    def find(
        self, options: ExportOptions, held: Sequence[HeldRecord], check: Callable[[], None]
    ) -> ExportOrder:
        """Return the kept order, or exchange records and plan one. Every rank must call it.

        An error that ``check`` raises on any rank is raised on all.
        """
        key = options, held
        number, kept = self._orders.get(key, (0, None))
        most, least = agree_on_max(check, [number, -number], None)
        if kept is not None and most == -least:  # no rank has other weights than before
            self._orders.move_to_end(key)
            return kept
        everywhere = gather_objects((self._last, held), None)
        self._last = 1 + max(last for last, _ in everywhere)
        records = {rank: of_rank for rank, (_, of_rank) in enumerate(everywhere)}
        order: ExportOrder = agree(lambda: make_order(options, records, dist.get_rank()), None)
        self._orders[key] = self._last, order
        while len(self._orders) > _KEPT:
            self._orders.popitem(last=False)
        return order


def make_order(
    options: ExportOptions, records: Mapping[int, Sequence[HeldRecord]], rank: int
) -> ExportOrder:
    """Return the plan of a rank, given the records of all ranks; no rank communicates."""
    ranks_of = put_together(records)
    if not any(isinstance(held, HeldExperts) for held in ranks_of):
        raise LayoutError(
            "export_weights: expected MoE layers with grouped experts, got none on any rank. "
            "Build the model with --num-experts and --moe-grouped-gemm."
        )
    found: list[Batch] = []
    for are_experts, group in groupby(ranks_of, lambda held: isinstance(held, HeldExperts)):
        if are_experts:
            linears = groupby(group, lambda held: held.key)  # type: ignore[union-attr]
            units = chain.from_iterable(
                _expert_units(
                    options, {held: ranks_of[held] for held in of_one}, rank, len(records)
                )
                for _, of_one in linears
            )
            found += map(tuple, batches(units, options.bucket_bytes))
        else:
            parts = [
                PartUnit(
                    held=held, ranks=ranks_of[held], is_sent=len(ranks_of[held]) < len(records)
                )
                for held in group
                if isinstance(held, HeldPart)
            ]
            found += batches(parts, options.bucket_bytes)
    pairs = None
    if options.heads is not None:
        pairs = find_pairs({held.name for held in ranks_of if isinstance(held, HeldPart)})
    return ExportOrder(batches=found, options=options, pairs=pairs)


def _expert_units(
    options: ExportOptions, ranks_of: Mapping[HeldRecord, frozenset[int]], rank: int, world: int
) -> Iterator[ExpertUnit]:
    """Yield the units of one linear, whose experts are spread over the given records."""
    spread = [held for held in ranks_of if isinstance(held, HeldExperts)]
    first = spread[0]
    options.exported.check(first)
    if len(amaxes := {held.input_amax for held in spread}) > 1:
        raise LayoutError(
            f"export_weights: {first.linear}: expected one amax of inputs on all ranks, got "
            f"{sorted(map(str, amaxes))}. Set the largest of them everywhere, or calibrate anew."
        )
    ranks = frozenset().union(*ranks_of.values())
    if options.own:
        spread = [held for held in spread if rank in ranks_of[held]]
        if not spread:
            return
    is_sent = len(ranks) < world and not options.own
    parts = len(spread) * first.cuts
    limit = first.count
    if not options.exported.is_stacked and (parts > 1 or is_sent):
        nbytes = parts * bucket_nbytes(buffers_of_part(first, first.count))
        limit = max(1, first.count * options.bucket_bytes // nbytes)
    for start in range(0, first.count, limit):
        stop = min(start + limit, first.count)
        experts = (one.first + index for one in spread for index in range(start, stop))
        yield ExpertUnit(
            held=first,
            start=start,
            stop=stop,
            names=options.exported.names(first, experts),
            ranks=ranks,
            is_spread=len(spread) > 1,
            infos=tuple(buffers_of_part(first, parts * (stop - start))),
            is_sent=is_sent,
        )
