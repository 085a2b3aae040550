"""The parameter gather of one managed bucket: what travels, and what is done with what arrived.

Both wires take the same steps, each on every rank of the group::

    open      make the masters current on this rank: staged in bf16, or their maxima found
    (reduce)  maxima that several ranks share
    encode    quantize what this rank owns; nothing on wire bf16
    (gather)  planes in slices, others by a maximum
    land      put what arrived in place
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from moe_optim import ops
from moe_optim.errors import LayoutError, StateError
from moe_optim.kernels.member_table import MemberTable, TableEntry
from moe_optim.layout.planes import GatherPlane
from moe_optim.layout.wire import Slot, WirePlane, plan_wire
from moe_optim.megatron.bucket_storage import Event


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedMaster:
    """The fp32 master of what this rank owns of one parameter."""

    param: torch.nn.Parameter
    start: int
    """First element, counted in the parameter."""
    master: Tensor
    """[n] fp32, the optimizer's own tensor."""


Masters = Callable[[], Sequence[OwnedMaster]]
"""Lists the masters of a bucket; called when a plan is made, not at every step."""


class BucketGather(Protocol):
    """What a bucket group does with a bucket when it gathers."""

    dp_size: int
    """Ranks that own an equal part of the bucket each."""
    uses_gradient_memory: bool
    """Whether gradients must neither be added nor zeroed between :meth:`open` and :meth:`land`."""
    sliced: tuple[GatherPlane, ...]
    """Gathered in place, one slice a rank."""
    reduced: tuple[Tensor, ...]
    """Completed by an all-reduce with MAX, after the slices have been filled."""

    def open(self, masters: Masters) -> None:
        """Read the masters of this rank; they are the same tensors until :meth:`forget`."""

    @property
    def exchange(self) -> Tensor | None:
        """Maxima to reduce with MAX between :meth:`open` and :meth:`encode`, if there are any."""

    def encode(self) -> None:
        """Write this rank's part of every plane."""

    def land(self) -> None:
        """Put what has arrived in place."""

    def forget(self) -> None:
        """Drop what was derived from masters or gradient memory that may move now."""


def fill_slices(gathers: Sequence[BucketGather], group: dist.ProcessGroup) -> None:
    """Make this rank's part of every plane that of its masters. Every rank of the group calls it.

    Args:
        gathers: all opened.
        group: ranks that share the buckets.
    """
    for gather in gathers:
        if gather.exchange is not None:
            dist.all_reduce(gather.exchange, dist.ReduceOp.MAX, group=group)
    for gather in gathers:
        gather.encode()


def start_gather(
    gathers: Sequence[BucketGather],
    group: dist.ProcessGroup,
    *,
    asynchronous: bool,
    maxima: Sequence[Tensor] = (),
) -> "Works | None":
    """Complete all planes in place. Every rank of the group must call it.

    Args:
        gathers: with their slices filled.
        group: ranks that share the buckets.
        asynchronous: return what to wait for, instead of waiting.
        maxima: also completed, by an all-reduce with MAX each.
    """
    rank, size = group.rank(), group.size()
    with _coalescing_manager(group, async_ops=asynchronous) as slices:
        for gather in gathers:
            for plane in gather.sliced:
                own = plane.slice_of(rank, size)
                dist.all_gather_into_tensor(plane.data, own, group=group, async_op=asynchronous)
    works = [slices]
    for values in (*(plane for gather in gathers for plane in gather.reduced), *maxima):
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


class QuantizedGather:
    """Wire ``quantized``: bytes and block scales travel, in memory that the weights live in.

    The planes that travel are bound into memory of the bucket, where owners encode and the gather
    lands: nothing is copied, and gradients are not involved.

    Args:
        bucket: managed, just made.
        slots: its parameters, in the order of ``bucket.params_list``.
        dp_size: ranks that share it.
    """

    def __init__(self, bucket: _ParamAndGradBucket, slots: Sequence[Slot], *, dp_size: int) -> None:
        self._bucket, self._slots = bucket, tuple(slots)
        self.dp_size, self.uses_gradient_memory = dp_size, False
        self._shard_numel = bucket.grad_data.numel() // dp_size
        self._table: MemberTable | None = None
        storages = [param.quantized_storage for param in bucket.params_list]
        formats = {storage.format for storage in storages}
        if len(formats) > 1:
            names = ", ".join(sorted(format.name for format in formats))
            raise LayoutError(
                f"{bucket.storage.name}: expected weights of one format in a bucket, got {names}."
            )
        planes = plan_wire(storages[0].format, self._slots, bucket.grad_data.numel(), dp_size)
        memories = {
            plane.name: torch.zeros(plane.nbytes, dtype=torch.uint8, device=storages[0].device)
            for plane in planes
        }
        for index, storage in enumerate(storages):
            own = {p.name: _view(p, memories[p.name], index) for p in planes}
            storage.bind(own, holder=bucket.storage)
        self.sliced = tuple(
            GatherPlane(
                name=f"{plane.name} of {bucket.storage.name}",
                bytes_per_element=plane.bytes_per_element,
                data=memories[plane.name],
            )
            for plane in planes
            if plane.bytes_per_element is not None
        )
        self.reduced = tuple(
            memories[plane.name].view(plane.dtype) for plane in planes if not plane.is_sliced
        )

    def open(self, masters: Masters) -> None:
        """Find the maxima of this rank's masters."""
        _require_held(self._bucket)
        if _have_moved(self._bucket):
            self._table = None
        if self._table is None:
            self._table = self._build_table(masters())
        ops.partial_amax(self._table)

    @property
    def exchange(self) -> Tensor | None:
        """Maxima of blocks and experts that shards cut."""
        table = self._opened()
        return table.exchange if table.exchange.numel() else None

    def encode(self) -> None:
        """Write bytes and scales of what this rank owns."""
        for plane in self.reduced:
            plane.zero_()
        ops.encode(self._opened())

    def land(self) -> None:
        """Derive columnwise copies and scales from what has arrived, in one launch."""
        ops.finish_gather(self._opened())

    def forget(self) -> None:
        """Drop the table: the masters may lie elsewhere from now on."""
        self._table = None

    def _opened(self) -> MemberTable:
        if self._table is None:
            raise StateError(
                f"{self._bucket.storage.name}: expected masters to gather from, got none. Only "
                "start_param_sync() may gather; masters must not move while it does."
            )
        return self._table

    def _build_table(self, masters: Sequence[OwnedMaster]) -> MemberTable:
        """Name every parameter, on every rank in the same order, with what is owned of it here."""
        owned = {id(one.param): one for one in masters}
        entries = []
        for param, slot in zip(self._bucket.params_list, self._slots, strict=True):
            quantized = param.quantized_storage.quantized
            one = owned.get(id(param))
            nothing = quantized.rowwise_data.new_empty(0, dtype=torch.float32)
            entries.append(
                TableEntry(
                    parameter=slot.name,
                    source=nothing if one is None else one.master,  # no view: it would keep memory
                    target=quantized,
                    start=0 if one is None else one.start,
                    cuts=slot.cuts(self._shard_numel),
                    storage_scales=param.quantized_storage.storage_scales,
                )
            )
        return MemberTable.build(entries)


class Bf16Gather:
    """Wire ``bf16``: masters travel through the bucket's own gradient memory.

    Args:
        bucket: managed, just made.
        slots: its parameters, in the order of ``bucket.params_list``.
        dp_size: ranks that share it.
    """

    def __init__(self, bucket: _ParamAndGradBucket, slots: Sequence[Slot], *, dp_size: int) -> None:
        self._bucket, self._slots = bucket, tuple(slots)
        self.dp_size, self.uses_gradient_memory = dp_size, True
        self._table: MemberTable | None = None
        self._places: tuple[list[Tensor], list[Tensor]] | None = None
        self.sliced: tuple[GatherPlane, ...] = (
            GatherPlane.viewing(bucket.storage.name, bucket.storage.staging),
        )
        self.reduced: tuple[Tensor, ...] = ()
        self.exchange: Tensor | None = None
        for param in bucket.params_list:
            param.quantized_storage.bind({}, holder=bucket.storage)

    def open(self, masters: Masters) -> None:
        """Copy the masters, rounded to bf16, to their place in the gradient memory."""
        _require_held(self._bucket)
        storage = self._bucket.storage
        storage.open_for_staging()
        if self._places is None:
            self._places = self._plan(masters())
        if self._places[0]:
            torch._foreach_copy_(*self._places)
        storage.record(Event.FLY)

    def encode(self) -> None:
        """Do nothing: every rank quantizes what it has received."""

    def land(self) -> None:
        """Requantize the whole bucket in one launch, and leave zeros behind."""
        if _have_moved(self._bucket) or (self._table is not None and self._table.has_moved):
            self._table = None  # gradient memory may have been freed, by whomever
        if self._table is None:
            self._table = self._build_table()
        ops.requantize(self._table)
        ops.finish_gather(self._table)
        self._bucket.storage.record(Event.LAND)

    def forget(self) -> None:
        """Drop everything planned: masters or gradient memory may lie elsewhere from now on."""
        self._table = self._places = None
        storage = self._bucket.storage
        self.sliced = (GatherPlane.viewing(storage.name, storage.staging),)

    def _plan(self, masters: Sequence[OwnedMaster]) -> tuple[list[Tensor], list[Tensor]]:
        starts = {
            id(param): slot.start
            for param, slot in zip(self._bucket.params_list, self._slots, strict=True)
        }
        places = []
        for one in masters:
            start = starts[id(one.param)] + one.start
            places.append(self._bucket.storage.staging[start : start + one.master.numel()])
        return places, [one.master for one in masters]

    def _build_table(self) -> MemberTable:
        staging = self._bucket.storage.staging
        entries = []
        for param, slot in zip(self._bucket.params_list, self._slots, strict=True):
            storage = param.quantized_storage
            source = staging[slot.start : slot.end].view(storage.shape)
            entries.append(
                TableEntry(
                    parameter=slot.name,
                    source=source,
                    target=storage.quantized,
                    storage_scales=storage.storage_scales,
                )
            )
        return MemberTable.build(entries, consumed=staging)


def _require_held(bucket: _ParamAndGradBucket) -> None:
    """Raise StateError if another bucket has bound the weights since, or they are offloaded."""
    for param in bucket.params_list:
        param.quantized_storage.require_present()
        if param.quantized_storage.holder is not bucket.storage:
            raise StateError(
                f"{bucket.storage.name}: expected {param.quantized_storage.name} in this bucket, "
                "got it in one of a DistributedDataParallel that was made later for the same "
                "model. Step an optimizer that was built for that one, and drop this one."
            )


def _have_moved(bucket: _ParamAndGradBucket) -> bool:
    """Return whether planes of some weight lie elsewhere than they did; each of them looks."""
    return any([param.quantized_storage.has_moved() for param in bucket.params_list])


def _view(plane: WirePlane, memory: Tensor, index: int) -> Tensor:
    """Return the plane of one parameter in the memory of its bucket."""
    entries = memory.view(plane.dtype)
    shape = plane.shapes[index]
    numel = torch.Size(shape).numel()
    return entries.narrow(0, plane.starts[index], numel).view(shape)
