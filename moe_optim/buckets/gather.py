"""The parameter gather of one bucket.

Both gather dtypes take the same steps, each on every rank of the group::

    open      read the masters of this rank: stage them in bf16, or compute their amaxes
    (reduce)  reduce amaxes of blocks and experts that several ranks share
    encode    quantize this rank's shard; nothing for bf16
    (gather)  all-gather sliced buffers, all-reduce the others with MAX
    finish    put the received data in place
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal, override

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.buckets.layout import BufferPlan, plan_buffers
from moe_optim.errors import LayoutError, StateError
from moe_optim.kernels.amax import plan_amaxes
from moe_optim.kernels.member_table import Backend, MemberTable, TableEntry
from moe_optim.kernels.plan import Plan
from moe_optim.weights.storage import WeightStorage

Wire = Literal["quantized", "bf16"]
_DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedMaster:
    """The fp32 master of this rank's shard of one parameter."""

    param: torch.nn.Parameter
    start: int
    """First element within the parameter."""
    master: Tensor
    """Master of the optimizer, [n] fp32, not a copy."""


class Gather:
    """What the gathers of both dtypes share; see their ``open``, ``encode`` and ``finish``.

    Attributes:
        uses_gradient_memory: whether gradients must not be written between :meth:`open` and
            :meth:`finish`.
        sliced: buffers to all-gather in place, [bytes] uint8 each, one slice per rank.
        reduced: buffers to all-reduce with MAX, after the slices are filled.
    """

    uses_gradient_memory: bool
    sliced: tuple[Tensor, ...]
    reduced: tuple[Tensor, ...]
    exchange: Tensor | None = None
    """Amaxes of blocks and experts that cross shard boundaries, to all-reduce with MAX between
    :meth:`open` and :meth:`encode`; None without any."""

    def __init__(self, bucket: Any, backend: Backend) -> None:  # a ManagedBucket
        # weak: without a cycle, memory of a bucket that is replaced is freed at once
        self._bucket, self._staging, self._backend = weakref.proxy(bucket), bucket.staging, backend
        self._table: MemberTable | None = None

    def buffers_of(self, index: int) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Return the memory of the weight at ``index``, by field of ``QuantizedWeight``."""
        return {}

    def plan_step(self, masters: Sequence[OwnedMaster]) -> MemberTable | None:  # noqa: ARG002
        """Return the table that encodes masters in a step, or None; valid until :meth:`forget`."""
        return None

    def prepare_step(self) -> None:
        """Initialize the buffers that a step encodes masters into."""

    def encode(self) -> None:
        """Fill this rank's slice of every buffer."""

    def forget(self) -> None:
        """Drop plans, since masters, weights or gradient memory may have moved."""
        self._table = self.exchange = None


class QuantizedGather(Gather):
    """Gather of quantized data and scales, in the memory of the weights.

    Owners encode directly into the gathered buffers that the weights are views of: nothing is
    copied, and gradient memory is not used.
    """

    uses_gradient_memory = False
    _is_encoded = False

    def __init__(self, bucket: Any, backend: Backend) -> None:
        super().__init__(bucket, backend)
        formats = {storage.format for storage in bucket.storages}
        if len(formats) > 1:
            names = ", ".join(sorted(format.name for format in formats))
            raise LayoutError(
                f"{bucket.name}: expected weights of one format in a bucket, got {names}."
            )
        (format,) = formats
        device, numel = bucket.storages[0].device, self._staging.numel()
        self._cuts = [slot.cuts(bucket.shard_numel) for slot in bucket.slots]
        self._buffers: list[tuple[BufferPlan, Tensor]] = [
            (plan, torch.zeros(plan.numel, dtype=_DTYPES[plan.itemsize], device=device))
            for plan in plan_buffers(format, bucket.slots, numel, bucket.dp_size)
        ]
        # bytes: a coalesced gather of mixed dtypes may return garbage
        self.sliced = tuple(
            buffer.view(torch.uint8) for plan, buffer in self._buffers if plan.is_sliced
        )
        self.reduced = tuple(buffer for plan, buffer in self._buffers if not plan.is_sliced)

    @override
    def buffers_of(self, index: int) -> Mapping[str, Tensor]:
        views = {}
        for plan, buffer in self._buffers:
            shape = torch.Size(plan.shapes[index])
            views[plan.name] = buffer.narrow(0, plan.starts[index], shape.numel()).view(shape)
        return views

    def open(self, masters: Sequence[OwnedMaster], *, encoded: bool = False) -> None:
        """Compute the amaxes of this rank's masters, unless a step has: ``encoded``.

        Masters stay the same tensors until :meth:`forget`.
        """
        self._is_encoded = encoded and self._table is not None
        table = self.plan_step(masters)
        self.exchange = table.exchange if table.exchange.numel() else None
        if not self._is_encoded:
            table.find_maxima.launch()

    def plan_step(self, masters: Sequence[OwnedMaster]) -> MemberTable:
        """Return the table of masters and buffers, which steps and gathers share."""
        if self._table is None:
            entries = _entries(self._bucket.params, masters, self._cuts)
            self._table = MemberTable.build(entries, backend=self._backend)
        return self._table

    def prepare_step(self) -> None:
        """Zero the buffers that a MAX all-reduce completes."""
        for buffer in self.reduced:
            buffer.zero_()

    def encode(self) -> None:
        """Write this rank's data and scales, or the shared blocks that a step has not encoded."""
        if self._is_encoded:
            self._opened().encode_shared.launch()
            return
        self.prepare_step()
        self._opened().encode.launch()

    def finish(self) -> None:
        """Derive columnwise data and scales from the gathered ones, in one launch."""
        self._opened().finish.launch()

    def _opened(self) -> MemberTable:
        if self._table is None:
            raise StateError(
                f"{self._bucket.name}: expected masters to gather from, got none. Only "
                "start_param_sync() may gather; masters must not move while it does."
            )
        return self._table


class Bf16Gather(Gather):
    """Gather of bf16 masters through the bucket's gradient memory."""

    uses_gradient_memory = True
    _copies: tuple[list[Tensor], list[Tensor]] | None = None

    def __init__(self, bucket: Any, backend: Backend) -> None:
        super().__init__(bucket, backend)
        self.sliced, self.reduced = (self._staging.view(torch.uint8),), ()

    def open(self, masters: Sequence[OwnedMaster], *, encoded: bool = False) -> None:  # noqa: ARG002
        """Copy the masters, rounded to bf16, to their slots in gradient memory."""
        if self._copies is None:
            self._copies = self._plan(masters)
        if self._copies[0]:
            torch._foreach_copy_(*self._copies)

    def finish(self) -> None:
        """Requantize the whole bucket in one launch, and zero the gradient memory."""
        if self._table is None or self._table.has_moved:  # gradient memory was freed
            self._table = self._build_table()
        self._table.launch()
        self._table.finish.launch()

    @override
    def forget(self) -> None:
        super().forget()
        self._copies = None

    def _plan(self, masters: Sequence[OwnedMaster]) -> tuple[list[Tensor], list[Tensor]]:
        slot_of = dict(zip(map(id, self._bucket.params), self._bucket.slots, strict=True))
        staged = []
        for one in masters:
            start = slot_of[id(one.param)].start + one.start
            staged.append(self._staging[start : start + one.master.numel()])
        return staged, [one.master for one in masters]

    def _build_table(self) -> MemberTable:
        entries = [
            TableEntry(
                parameter=slot.name,
                source=self._staging[slot.start : slot.end].view(slot.shape),
                target=storage.quantized,
                storage_scales=storage.storage_scales,
            )
            for storage, slot in zip(self._bucket.storages, self._bucket.slots, strict=True)
        ]
        return MemberTable.build(entries, consumed=self._staging, backend=self._backend)


AnyGather = QuantizedGather | Bf16Gather


class AmaxRecord:
    """Amaxes of all experts of a bucket, reduced as one vector with its gather.

    Attributes:
        values: amaxes, [experts] fp32, to all-reduce with MAX over all ranks between :meth:`fill`
            and :meth:`finish`.
    """

    def __init__(self, params: Sequence[Any]) -> None:
        self._params = tuple(params)
        self._recorded: list[Tensor] = [one.quantized_storage.recorded_amax for one in params]
        self.values = torch.zeros_like(torch.cat(self._recorded))
        self._parts = self.values.split(list(map(len, self._recorded)))
        self._search: Plan | None = None

    @classmethod
    def of(cls, params: Sequence[Any]) -> "AmaxRecord | None":
        """Return a record of the weights that record amaxes; None without any."""
        recording = [one for one in params if one.quantized_storage.recorded_amax is not None]
        return cls(recording) if recording else None

    def fill(self, masters: Sequence[OwnedMaster]) -> None:
        """Compute this rank's amaxes from its masters, the same tensors until :meth:`forget`."""
        if self._search is None:
            entries = _entries(self._params, masters, repeat(()))
            backend = self._params[0].quantized_storage.backend
            self._search = plan_amaxes(entries, self.values, backend=backend)
        self._search.launch()

    def finish(self) -> None:
        """Copy the reduced amaxes to the weights."""
        torch._foreach_copy_(self._recorded, self._parts)

    def forget(self) -> None:
        """Drop plans that hold addresses of masters."""
        self._search = None


# Collectives of a bucket group


def fill_slices(gathers: Sequence[AnyGather], group: dist.ProcessGroup) -> None:
    """Encode this rank's slice of every buffer of opened gathers. Every rank must call it."""
    for gather in gathers:
        if gather.exchange is not None:
            dist.all_reduce(gather.exchange, dist.ReduceOp.MAX, group=group)
    for gather in gathers:
        gather.encode()


def issued_together(group: dist.ProcessGroup, *, asynchronous: bool) -> Any:
    """Return a context that issues its collectives as one, and yields their handle.

    torch's function is looked up at every call: stacks replace it by one that unwraps their groups.
    """
    return dist._coalescing_manager(group, async_ops=asynchronous)  # type: ignore[attr-defined]


def start_gather(
    sliced: Iterable[Tensor],
    reduced: Iterable[Tensor],
    group: dist.ProcessGroup,
    *,
    asynchronous: bool,
) -> "Works | None":
    """All-gather ``sliced`` and MAX-reduce ``reduced`` in place. Every rank must call it.

    Returns a handle if ``asynchronous``, else waits and returns None.
    """
    with issued_together(group, asynchronous=asynchronous) as slices:
        for buffer in sliced:
            own = buffer.chunk(group.size())[group.rank()]
            dist.all_gather_into_tensor(buffer, own, group=group, async_op=asynchronous)
    works = [slices]
    for buffer in reduced:
        works.append(dist.all_reduce(buffer, dist.ReduceOp.MAX, group=group, async_op=asynchronous))
    return Works(works) if asynchronous else None


class Works:
    """Collectives in flight with a common ``wait``."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = tuple(works)

    def wait(self) -> None:
        """Block the host on a CPU, or the current stream on a GPU."""
        for work in self._works:
            work.wait()


def _entries(
    params: Sequence[Any], masters: Sequence[OwnedMaster], cuts: Iterable[tuple[int, ...]]
) -> list[TableEntry]:
    """Return one entry per parameter, in the same order on every rank, with this rank's shard."""
    owned = {id(one.param): one for one in masters}
    entries = []
    for param, cut_at in zip(params, cuts, strict=False):
        storage: WeightStorage = param.quantized_storage
        one = owned.get(id(param))
        nothing = storage.laid_out.rowwise_data.new_empty(0, dtype=torch.float32)
        entries.append(
            TableEntry(
                parameter=storage.name,
                source=nothing if one is None else one.master,  # no view: it would keep the memory
                target=storage.quantized,
                start=0 if one is None else one.start,
                cuts=cut_at,
                storage_scales=storage.storage_scales,
            )
        )
    return entries
