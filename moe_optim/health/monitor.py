"""When the health of experts is measured, what ranks share of it, and when it is told."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import log_single_rank
from torch import Tensor

from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.buckets.states import Weights
from moe_optim.formats.health_figures import ExpertLoad, LayerHealth
from moe_optim.health.rows import ExpertName, expert_names, names_of_all_ranks
from moe_optim.health.tokens import TokenCounts
from moe_optim.health.writers import current_iteration, write
from moe_optim.kernels.health import HealthEntry, HealthTable
from moe_optim.kernels.member_table import TableEntry

logger = logging.getLogger(__name__)
MOST_WARNINGS = 8
"""Experts that one look warns of by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """A measurement on its way to the host."""

    iteration: int
    event: torch.cuda.Event | None


class HealthMonitor:
    """Looks at quantized experts when a step begins: masters and weights are of one time then.

    The weights are those that the iteration's forward passes have read. Every rank adds up what it
    owns; a SUM and a MAX all-reduce over all ranks complete it, so that the rank that writes knows
    the experts of all. Results are copied to the host behind the step, and told when a later step
    begins, or a checkpoint is saved.

    Args:
        chain: a ``GroupedChainedOptimizer``.
        interval: iterations from one look to the next; 0 looks at nothing.
        backend: who measures.
    """

    def __init__(self, chain: Any, interval: int, backend: Any = "auto") -> None:
        self._chain, self._interval, self._backend = chain, interval, backend
        self._names: list[ExpertName] = []
        self._table: HealthTable | None = None
        self._buckets: tuple[ManagedBucket, ...] = ()
        self._steps = 0
        self._look: _Look | None = None
        self._on_host: tuple[Tensor, ...] | None = None
        self._tokens = TokenCounts(chain.model_chunks if interval else ())
        self.latest: tuple[LayerHealth, ...] = ()
        """What was told last, on every rank; empty before."""
        self.latest_loads: tuple[ExpertLoad, ...] = ()
        """The tokens that experts had between the last two looks, on every rank."""

    @torch.no_grad()
    def before_step(self) -> None:
        """Tell what has arrived, and look if it is time to. Every rank must call it."""
        if not self._interval:
            return
        self.tell(wait=False)
        self._steps += 1
        iteration = current_iteration() or self._steps
        if iteration % self._interval == 0:
            self.tell()
            self._measure(iteration)

    def tell(self, *, wait: bool = True) -> None:
        """Write and warn of what was measured last, if that is not done yet.

        Args:
            wait: for the copy to the host; without, what has not arrived is told later.
        """
        look = self._look
        if look is None or self._on_host is None:
            return
        if look.event is not None:
            if not wait and not look.event.query():
                return
            look.event.synchronize()
        self._look = None
        sums, amaxes, tokens = self._on_host
        self.latest = by_layer(self._names, sums, amaxes)
        self.latest_loads = self._tokens.loads_of(tokens)
        write((*self.latest, *self.latest_loads), look.iteration)
        self._warn(look.iteration)

    def _warn(self, iteration: int) -> None:
        lines = [line for health in self.latest for line in health.warnings()]
        more = len(lines) - MOST_WARNINGS
        for line in lines[:MOST_WARNINGS] + ([f"and {more} more"] if more > 0 else []):
            message = f"moe_optim: health at iteration {iteration}: {line}"
            log_single_rank(logger, logging.WARNING, message)

    def _measure(self, iteration: int) -> None:
        for part in self._chain.stepping:
            part.finish_gathers()
        if self._table is None or self._has_moved():
            self._table = self._plan()
        sums, amaxes = self._table.sums, self._table.amaxes
        if self._names:
            self._table.launch()
            dist.all_reduce(sums)
            dist.all_reduce(amaxes, dist.ReduceOp.MAX)
        results = sums, amaxes, self._tokens.reduce()
        on_gpu = sums.device.type == "cuda"
        if self._on_host is None:
            self._on_host = tuple(
                torch.empty_like(one, device="cpu", pin_memory=on_gpu) for one in results
            )
        for host, found in zip(self._on_host, results, strict=True):
            host.copy_(found, non_blocking=True)
        event = None
        if on_gpu:
            event = torch.cuda.Event()
            event.record()
        self._look = _Look(iteration=iteration, event=event)
        self.tell(wait=False)

    def _has_moved(self) -> bool:
        """Return whether masters, buffers or what is fresh is not what was planned with."""
        assert self._table is not None
        return self._table.has_moved or self._buckets != self._fresh_buckets()

    def _fresh_buckets(self) -> tuple[ManagedBucket, ...]:
        """Return the buckets whose weights are those of their masters, which forward passes read.

        Of several optimizer instances, which hold copies, the first has them alone.
        """
        return tuple(
            bucket
            for part in self._chain.stepping
            for bucket in part.managed_buckets
            if bucket.state.weights is Weights.FRESH and not part.distributed_optimizer_instance_id
        )

    def _plan(self) -> HealthTable:
        """Give every expert of all ranks a row. Every rank must call it, the first time."""
        mine = expert_names(self._chain.model_chunks)
        if not self._names:
            self._names = names_of_all_ranks([name for names in mine.values() for name in names])
            if not self._names:
                message = (
                    "moe_optim: health_interval: no weight is quantized: tokens alone are counted"
                )
                log_single_rank(logger, logging.WARNING, message)
        row_of = {name: row for row, name in enumerate(self._names)}
        self._buckets = self._fresh_buckets()
        entries = []
        for bucket in self._buckets:
            slots = dict(zip(bucket.params, bucket.slots, strict=True))
            assert bucket.owner is not None  # it is one of the chain's
            storages = dict(zip(bucket.params, bucket.storages, strict=True))
            for one in bucket.owner.masters_of(bucket):
                entry = TableEntry(
                    parameter=slots[one.param].name,
                    source=one.master,
                    target=storages[one.param].quantized,
                    start=one.start,
                    cuts=slots[one.param].cuts(bucket.grads.numel() // bucket.dp_size),
                )
                rows = torch.tensor(
                    [row_of[name] for name in mine[one.param]], dtype=torch.int64, device="cpu"
                )
                entries.append(HealthEntry(entry=entry, rows=rows))
        device = torch.empty(
            0, dtype=torch.uint8, device=torch.cuda.current_device()
        ).device  # or the CPU runtime's
        return HealthTable.build(entries, len(self._names), device=device, backend=self._backend)


def by_layer(names: Sequence[ExpertName], sums: Tensor, amaxes: Tensor) -> tuple[LayerHealth, ...]:
    """Return the figures of each linear, of complete sums and amaxes on the CPU.

    Experts of which nothing was measured, as their weights were behind their masters, are left out.

    Args:
        names: of the rows, those of one linear one after the other.
        sums: [rows, NUM_SUMS] fp64; copied.
        amaxes: [rows] fp32; copied.
    """
    rows: dict[tuple[str, str], list[int]] = {}
    measured = sums.any(1).tolist()
    for row, name in enumerate(names):
        if measured[row]:
            rows.setdefault((name.layer, name.element), []).append(row)
    return tuple(
        LayerHealth(
            layer=layer,
            element=element,
            experts=tuple(names[row].expert for row in of_layer),
            amax=amaxes[of_layer].double(),
            sums=sums[of_layer].clone(),
        )
        for (layer, element), of_layer in rows.items()
    )
