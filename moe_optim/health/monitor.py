"""Sampling of expert health, its reduction over ranks, and its reports."""

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.utils import log_single_rank
from torch import Tensor

from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.buckets.states import Weights
from moe_optim.formats.health_figures import ExpertLoad, LayerHealth
from moe_optim.health.rows import ExpertRows, expert_names
from moe_optim.health.tokens import TokenCounts
from moe_optim.health.writers import current_iteration, write
from moe_optim.kernels.member_table import TableEntry
from moe_optim.places import this_device

if TYPE_CHECKING:
    from moe_optim.kernels.health import HealthTable

logger = logging.getLogger(__name__)
MOST_WARNINGS = 8  # maximum number of warnings per sample


class _Sample(NamedTuple):
    iteration: int
    event: torch.cuda.Event | None


class HealthMonitor:
    """Samples quantized experts at the start of a step, while masters and weights match.

    The weights are those that the iteration's forward passes have read. Every rank sums over its
    shards; a SUM and a MAX all-reduce over all ranks give every rank the results of all experts.
    They are copied to the host asynchronously, and reported when a later step begins or a
    checkpoint is saved. ``chain`` is a ``GroupedChainedOptimizer``; an ``interval`` of 0 iterations
    disables samples and token counts.
    """

    def __init__(self, chain: Any, interval: int, backend: Any = "auto") -> None:
        self._chain, self._interval, self._backend = chain, interval, backend
        self._rows: ExpertRows | None = None
        self._table: HealthTable | None = None
        self._buckets: tuple[ManagedBucket, ...] = ()
        self._steps = 0
        self._sample: _Sample | None = None
        self._on_host: tuple[Tensor, ...] | None = None
        self._tokens = TokenCounts(chain.model_chunks if interval else ())
        self.latest: tuple[LayerHealth, ...] = ()
        """Results of the last reported sample, on every rank; empty before."""
        self.latest_loads: tuple[ExpertLoad, ...] = ()
        """The tokens of experts between the last two samples, on every rank."""

    @torch.no_grad()
    def before_step(self) -> None:
        """Report a completed sample, and take one if it is due. Every rank must call it."""
        if not self._interval:
            return
        self._report(wait=False)
        self._steps += 1
        iteration = current_iteration() or self._steps
        if iteration % self._interval == 0:
            self._report(wait=True)
            self._measure(iteration)

    def before_save(self) -> None:
        """Wait for the last sample and report it, since a run may end with this save."""
        self._report(wait=True)

    def _report(self, *, wait: bool) -> None:
        """Write the last sample and log its warnings, once; without ``wait`` only if complete."""
        sample = self._sample
        if sample is None or self._on_host is None or self._rows is None:
            return
        if sample.event is not None:
            if not wait and not sample.event.query():
                return
            sample.event.synchronize()
        self._sample = None
        sums, amaxes, tokens = self._on_host
        self.latest = by_layer(self._rows, sums, amaxes)
        self.latest_loads = self._tokens.loads_of(tokens)
        write((*self.latest, *self.latest_loads), sample.iteration)
        lines = [line for health in self.latest for line in health.warnings()]
        more = len(lines) - MOST_WARNINGS
        for line in lines[:MOST_WARNINGS] + ([f"and {more} more"] if more > 0 else []):
            message = f"moe_optim: health at iteration {sample.iteration}: {line}"
            log_single_rank(logger, logging.WARNING, message)

    def _measure(self, iteration: int) -> None:
        for part in self._chain.stepping:
            part.finish_gathers()
        if self._table is None or self._table.has_moved or self._buckets != self._fresh_buckets():
            self._table = self._plan()
        sums, amaxes = self._table.sums, self._table.amaxes
        if len(sums):
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
        self._sample = _Sample(iteration, event)
        self._report(wait=False)

    def _fresh_buckets(self) -> tuple[ManagedBucket, ...]:
        """Return the buckets whose weights match their masters.

        Optimizer instances hold copies of each other, so only the first counts.
        """
        return tuple(
            bucket
            for part in self._chain.stepping
            for bucket in part.managed_buckets
            if bucket.state.weights is Weights.FRESH and not part.distributed_optimizer_instance_id
        )

    def _plan(self) -> "HealthTable":
        """Assign a row to every expert of all ranks. Every rank must make the first call."""
        from moe_optim.kernels.health import HealthEntry, HealthTable

        mine = expert_names(self._chain.model_chunks)
        if self._rows is None:
            self._rows = ExpertRows.of_all_ranks(name for names in mine.values() for name in names)
            if not self._rows.names:
                what = "no weight is quantized: tokens alone are counted"
                log_single_rank(logger, logging.WARNING, f"moe_optim: health_interval: {what}")
        self._buckets = self._fresh_buckets()
        entries = []
        for bucket in self._buckets:
            slots = dict(zip(bucket.params, bucket.slots, strict=True))
            storages = dict(zip(bucket.params, bucket.storages, strict=True))

            for one in bucket.owner.masters_of(bucket):
                entry = TableEntry(
                    parameter=slots[one.param].name,
                    source=one.master,
                    target=storages[one.param].quantized,
                    start=one.start,
                    cuts=slots[one.param].cuts(bucket.shard_numel),
                )
                entries.append(HealthEntry(entry=entry, rows=self._rows.of(mine[one.param])))
        count = len(self._rows.names)
        return HealthTable.build(entries, count, device=this_device(), backend=self._backend)


def by_layer(rows: ExpertRows, sums: Tensor, amaxes: Tensor) -> tuple[LayerHealth, ...]:
    """Return the results of each linear from reduced sums and amaxes on the CPU.

    ``sums`` is [rows, NUM_SUMS] fp64, ``amaxes`` [rows] fp32; both are copied. Experts without a
    measurement are omitted.
    """
    return tuple(
        LayerHealth(
            layer=layer,
            format=format,
            experts=tuple(rows.names[row].expert for row in of_layer),
            amax=amaxes[of_layer].double(),
            sums=sums[of_layer].clone(),
        )
        for (layer, format), of_layer in rows.by_layer(sums.any(1)).items()
    )
