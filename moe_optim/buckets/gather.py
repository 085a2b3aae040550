"""The parameter gather of one managed bucket: what travels, and what is done with what arrived.

Both wires take the same steps, each on every rank of the group::

    open      make the masters current on this rank: staged in bf16, or their maxima found
    (reduce)  maxima that several ranks share
    encode    quantize what this rank owns; nothing on wire bf16
    (gather)  buffers in slices, others by a maximum
    finish      put what arrived in place
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from moe_optim.buckets.buffer_plan import BufferPlan, Slot, plan_buffers
from moe_optim.buckets.gather_buffer import GatherBuffer
from moe_optim.errors import LayoutError, StateError
from moe_optim.kernels.member_table import Backend, MemberTable, TableEntry
from moe_optim.weights.storage import BindingBucket, WeightStorage

Wire = Literal["quantized", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedMaster:
    """The fp32 master of what this rank owns of one parameter."""

    param: torch.nn.Parameter
    start: int
    """First element, counted in the parameter."""
    master: Tensor
    """[n] fp32, the optimizer's own tensor."""


class Bucket(BindingBucket, Protocol):
    """What a gather asks of the bucket it is for, which holds the weights."""

    name: str
    params: tuple[torch.nn.Parameter, ...]
    storages: tuple[WeightStorage, ...]
    """Of ``params``, in their order."""
    slots: tuple[Slot, ...]
    """Where these lie in the bucket."""
    staging: Tensor
    """[numel] bf16: the front of the gradient memory."""


class BucketGather(Protocol):
    """What a bucket does with its weights when its group gathers."""

    uses_gradient_memory: bool
    """Whether gradients must not be added or zeroed between :meth:`open` and :meth:`finish`."""
    sliced: tuple[GatherBuffer, ...]
    """Gathered in place, one slice a rank."""
    reduced: tuple[Tensor, ...]
    """Completed by an all-reduce with MAX, after the slices have been filled."""

    def open(self, masters: Sequence[OwnedMaster], *, encoded: bool = False) -> None:
        """Read the masters of this rank; they are the same tensors until :meth:`forget`.

        Args:
            masters: of this rank.
            encoded: a step has encoded them since; what it has not written follows its maxima.
        """

    def plan_step(self, masters: Sequence[OwnedMaster]) -> MemberTable | None:
        """Return what a step encodes masters into, the same until :meth:`forget`; or None."""

    @property
    def planned(self) -> MemberTable | None:
        """What :meth:`plan_step` has returned, if it is still what the gather reads."""

    def prepare_step(self) -> None:
        """Make ready the buffers that a step encodes masters into."""

    @property
    def exchange(self) -> Tensor | None:
        """Maxima to reduce with MAX between :meth:`open` and :meth:`encode`, if there are any."""

    def encode(self) -> None:
        """Write this rank's part of every buffer."""

    def finish(self) -> None:
        """Put what has arrived in place."""

    def forget(self) -> None:
        """Drop what was derived from masters, weights or gradient memory that may move now."""


def fill_slices(gathers: Sequence[BucketGather], group: dist.ProcessGroup) -> None:
    """Make this rank's part of every buffer that of its masters. Every rank of the group calls it.

    Args:
        gathers: all opened.
        group: ranks that share the buckets.
    """
    for gather in gathers:
        if gather.exchange is not None:
            dist.all_reduce(gather.exchange, dist.ReduceOp.MAX, group=group)
    for gather in gathers:
        gather.encode()


class Gathering(Protocol):
    """A bucket whose gather is open, with its slices filled."""

    gather: BucketGather

    @property
    def reduced(self) -> Sequence[Tensor]:
        """Completed by an all-reduce with MAX each."""


def start_gather(
    buckets: Sequence[Gathering], group: dist.ProcessGroup, *, asynchronous: bool
) -> "Works | None":
    """Complete all buffers in place. Every rank of the group must call it.

    Args:
        buckets: what to gather.
        group: ranks that share them.
        asynchronous: return what to wait for, instead of waiting.
    """
    rank, size = group.rank(), group.size()
    with _coalescing_manager(group, async_ops=asynchronous) as slices:
        for bucket in buckets:
            for buffer in bucket.gather.sliced:
                own = buffer.slice_of(rank, size)
                dist.all_gather_into_tensor(buffer.data, own, group=group, async_op=asynchronous)
    works = [slices]
    for values in (values for bucket in buckets for values in bucket.reduced):
        works.append(dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=asynchronous))
    return Works(works) if asynchronous else None


class Works:
    """Collectives in flight, waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = tuple(works)

    def wait(self) -> None:
        """Wait as each of them does: the host on a CPU, the current stream on a GPU."""
        for work in self._works:
            work.wait()


def make_gather(
    wire: Wire, bucket: Bucket, *, numel: int, dp_size: int, backend: Backend
) -> BucketGather:
    """Return what gathers a bucket, and bind its weights to it.

    Args:
        wire: what travels.
        bucket: just made.
        numel: elements of the bucket, padding included.
        dp_size: ranks that own an equal part of it each.
        backend: who quantizes.

    Raises:
        LayoutError: weights of several formats, or shards without whole bytes.
    """
    if wire == "quantized":
        return QuantizedGather(bucket, numel=numel, dp_size=dp_size, backend=backend)
    return Bf16Gather(bucket, backend=backend)


class QuantizedGather:
    """Wire ``quantized``: bytes and block scales travel, in memory that the weights live in.

    The buffers that travel are bound into memory of the bucket, where owners encode and the gather
    finishes: nothing is copied, and gradients are not involved. Arguments are those of
    :func:`make_gather`.
    """

    def __init__(self, bucket: Bucket, *, numel: int, dp_size: int, backend: Backend) -> None:
        self._bucket, self._backend = bucket, backend
        self.uses_gradient_memory = False
        self._shard_numel = numel // dp_size
        self._table: MemberTable | None = None
        self._is_encoded = False
        storages = bucket.storages
        formats = {storage.format for storage in storages}
        if len(formats) > 1:
            names = ", ".join(sorted(format.name for format in formats))
            raise LayoutError(
                f"{bucket.name}: expected weights of one format in a bucket, got {names}."
            )
        buffers = plan_buffers(storages[0].format, bucket.slots, numel, dp_size)
        memories = {
            buffer.name: torch.zeros(buffer.nbytes, dtype=torch.uint8, device=storages[0].device)
            for buffer in buffers
        }
        for index, storage in enumerate(storages):
            own = {p.name: _view(p, memories[p.name], index) for p in buffers}
            storage.bind(own, bucket=bucket)
        self.sliced = tuple(
            GatherBuffer(
                name=f"{buffer.name} of {bucket.name}",
                bytes_per_element=buffer.bytes_per_element,
                data=memories[buffer.name],
            )
            for buffer in buffers
            if buffer.bytes_per_element is not None
        )
        self.reduced = tuple(
            memories[buffer.name].view(buffer.dtype) for buffer in buffers if not buffer.is_sliced
        )

    def open(self, masters: Sequence[OwnedMaster], *, encoded: bool = False) -> None:
        """Find the maxima of this rank's masters, unless a step has."""
        self._is_encoded = encoded and self._table is not None
        if not self._is_encoded:
            self.plan_step(masters).find_maxima.launch()

    def plan_step(self, masters: Sequence[OwnedMaster]) -> MemberTable:
        """Return the table of masters and buffers that gathers use, too."""
        if self._table is None:
            self._table = self._build_table(masters)
        return self._table

    @property
    def planned(self) -> MemberTable | None:
        """The table, unless it has to be built anew."""
        return self._table

    def prepare_step(self) -> None:
        """Zero the buffers that a maximum over ranks completes."""
        for buffer in self.reduced:
            buffer.zero_()

    @property
    def exchange(self) -> Tensor | None:
        """Maxima of blocks and experts that shards cut."""
        table = self._opened()
        return table.exchange if table.exchange.numel() else None

    def encode(self) -> None:
        """Write bytes and scales of what this rank owns, or what a step has left of it."""
        if self._is_encoded:
            self._opened().encode_shared.launch()
            return
        self.prepare_step()
        self._opened().encode.launch()

    def finish(self) -> None:
        """Derive columnwise copies and scales from what has arrived, in one launch."""
        self._opened().finish.launch()

    def forget(self) -> None:
        """Drop the table: the masters may lie elsewhere from now on."""
        self._table = None

    def _opened(self) -> MemberTable:
        if self._table is None:
            raise StateError(
                f"{self._bucket.name}: expected masters to gather from, got none. Only "
                "start_param_sync() may gather; masters must not move while it does."
            )
        return self._table

    def _build_table(self, masters: Sequence[OwnedMaster]) -> MemberTable:
        """Name every parameter, on every rank in the same order, with what is owned of it here."""
        owned = {id(one.param): one for one in masters}
        entries = []
        bucket = self._bucket
        for param, storage, slot in zip(bucket.params, bucket.storages, bucket.slots, strict=True):
            quantized = storage.quantized
            one = owned.get(id(param))
            nothing = quantized.rowwise_data.new_empty(0, dtype=torch.float32)
            entries.append(
                TableEntry(
                    parameter=slot.name,
                    source=nothing if one is None else one.master,  # no view: it would keep memory
                    target=quantized,
                    start=0 if one is None else one.start,
                    cuts=slot.cuts(self._shard_numel),
                    storage_scales=storage.storage_scales,
                )
            )
        return MemberTable.build(entries, backend=self._backend)


class Bf16Gather:
    """Wire ``bf16``: masters travel through the bucket's own gradient memory.

    Arguments are those of :func:`make_gather`.
    """

    def __init__(self, bucket: Bucket, *, backend: Backend) -> None:
        self._bucket, self._backend = bucket, backend
        self.uses_gradient_memory = True
        self.planned: MemberTable | None = None
        self._table: MemberTable | None = None
        self._places: tuple[list[Tensor], list[Tensor]] | None = None
        self.sliced: tuple[GatherBuffer, ...] = (GatherBuffer.viewing(bucket.name, bucket.staging),)
        self.reduced: tuple[Tensor, ...] = ()
        self.exchange: Tensor | None = None
        for storage in bucket.storages:
            storage.bind({}, bucket=bucket)

    def plan_step(self, masters: Sequence[OwnedMaster]) -> None:
        """Return None: gradients lie where masters are staged, so that a step encodes nothing."""

    def prepare_step(self) -> None:
        """Do nothing."""

    def open(self, masters: Sequence[OwnedMaster], *, encoded: bool = False) -> None:
        """Copy the masters, rounded to bf16, to their place in the gradient memory."""
        if self._places is None:
            self._places = self._plan(masters)
        if self._places[0]:
            torch._foreach_copy_(*self._places)

    def encode(self) -> None:
        """Do nothing: every rank quantizes what it has received."""

    def finish(self) -> None:
        """Requantize the whole bucket in one launch, and leave zeros behind."""
        if self._table is not None and self._table.has_moved:
            self._table = None  # gradient memory may have been freed, by whomever
        if self._table is None:
            self._table = self._build_table()
        self._table.launch()
        self._table.finish.launch()

    def forget(self) -> None:
        """Drop everything planned: masters, weights or gradient memory may lie elsewhere now."""
        self._table = self._places = None
        self.sliced = (GatherBuffer.viewing(self._bucket.name, self._bucket.staging),)

    def _plan(self, masters: Sequence[OwnedMaster]) -> tuple[list[Tensor], list[Tensor]]:
        starts = {
            id(param): slot.start
            for param, slot in zip(self._bucket.params, self._bucket.slots, strict=True)
        }
        places = []
        for one in masters:
            start = starts[id(one.param)] + one.start
            places.append(self._bucket.staging[start : start + one.master.numel()])
        return places, [one.master for one in masters]

    def _build_table(self) -> MemberTable:
        staging = self._bucket.staging
        entries = []
        for storage, slot in zip(self._bucket.storages, self._bucket.slots, strict=True):
            source = staging[slot.start : slot.end].view(storage.shape)
            entries.append(
                TableEntry(
                    parameter=slot.name,
                    source=source,
                    target=storage.quantized,
                    storage_scales=storage.storage_scales,
                )
            )
        return MemberTable.build(entries, consumed=staging, backend=self._backend)


def _view(buffer: BufferPlan, memory: Tensor, index: int) -> Tensor:
    """Return the buffer of one parameter in the memory of its bucket."""
    entries = memory.view(buffer.dtype)
    shape = buffer.shapes[index]
    numel = torch.Size(shape).numel()
    return entries.narrow(0, buffer.starts[index], numel).view(shape)
