"""Exports a live model's weights to inference engines, as pairs of name and tensor."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.buckets.bucket_group import gather_weights
from moe_optim.calibration.linears import require_chunks
from moe_optim.errors import ConfigError
from moe_optim.integration.agreement import agree
from moe_optim.rollout.dense import LocalPart, Wholes, local_parts, require_plain_model
from moe_optim.rollout.expert_buffers import (
    Arriving,
    buffers_of_part,
    gather_buffers,
    join_parts,
)
from moe_optim.rollout.expert_tensors import get_export_layout
from moe_optim.rollout.experts import ExportedLinear, local_experts
from moe_optim.rollout.exported_as import ExportedAs
from moe_optim.rollout.order import Batch, ExportOptions, ExportOrder, KeptOrders
from moe_optim.rollout.rows import Heads
from moe_optim.rollout.units import (
    ExpertUnit,
    HeldPart,
    HeldRecord,
    PartUnit,
    bucket_nbytes,
    cut_bucket,
    fill_bucket,
)

BUCKET_BYTES = 2**29
_NAN = 0xFF
"""Byte that makes NaN of bf16, fp32 and E4M3, and of the scales of all formats."""


@torch.inference_mode(False)
@torch.no_grad()
def export_weights(
    model_chunks: Iterable[torch.nn.Module],
    *,
    layout: Literal["hf_per_expert", "sequential", "hf", "grouped"] = "hf_per_expert",
    convention: Literal["compressed_tensors", "modelopt", "deepseek"] | None = None,
    experts: Literal["all", "own"] = "all",
    device: torch.device | str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    vocab_size: int | None = None,
    input_scales: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Return name and tensor of every weight of a model, without dequantizing experts.

    The pairs suit ``load_weights`` of vLLM's models and SGLang's ``update_weights_from_tensor``.
    Quantized experts are exported as data and scales, numbered globally, with a convention's names,
    shapes and dtypes; they decode to the values used in training. All other weights are bf16:
    quantized dense weights are dequantized, exactly if their scales are powers of two, else rounded
    to bf16. Gate and up are separate, with the same global scale in NVFP4, as required by engines
    that fuse them.

    Stale weights are gathered first. The experts of a linear that other ranks hold arrive in one
    transfer, with those of its layer's other linear where a bucket holds both; tensors are views of
    what arrived, or of the weights where nothing is exchanged.
    Scales of square blocks and interleaved gate and up rows are copies. Read views of weights
    before the next step, and do not write to any.

    Every rank must call it with all of its chunks and exhaust the iterator, which exchanges buckets
    between ranks. If it raises, load all weights again: those that a failed rank should have sent
    were NaN.

    Args:
        model_chunks: model chunks of this rank's pipeline stage.
        layout: ``hf_per_expert``, the on-disk names of Hugging Face's models; or ``sequential``,
            Megatron's, for models without such names. ``hf`` and ``grouped`` are the same with
            experts stacked: data and scales of all experts of a linear, [E, R, C].
        convention: engines' names of data and scales; None for the first of the format in
            ``moe_optim.rollout.conventions.CONVENTIONS``. Experts with per-tensor scaling use
            ``ONE_SCALE`` of that module.
        experts: ``all`` to yield every expert on every rank; ``own`` to yield only local experts,
            without sending any; E is then their number.
        device: device of the tensors; None: unchanged.
        bucket_bytes: size of a message in bytes; larger tensors, and one expert of each rank, are
            sent alone. Up to three more messages may be under way.
        vocab_size: rows of embeddings to yield, without Megatron's padding; None: all.
        input_scales: whether each weight of experts in NVFP4 is followed by the scale of its
            inputs, of their calibrated amax, see :func:`moe_optim.calibrate`. Engines then quantize
            activations to NVFP4.

    Yields:
        Names and tensors; with ``experts="all"`` the same on every rank, in the same order.

    Raises:
        ConfigError: layout or convention is unknown; the layout has no names for the model, or
            transformers computes something else with its weights; experts have no gate, or are
            sharded with separate scales or global scales; or ``input_scales`` with other formats,
            or without calibrated amaxes of inputs.
        LayoutError: gate and up, or expert shards of two ranks, share a scale block; or no rank has
            grouped experts.
        StateError: on all ranks: weights are on the host, their gather would overwrite unused
            gradients, or a step was taken during the iteration.
    """
    exporter = agree(
        lambda: _Exporter.of(
            model_chunks, ExportedAs(get_export_layout(layout), convention, input_scales)
        ),
        None,
    )
    if experts not in ("all", "own"):
        raise ConfigError(
            f"export_weights: experts: expected all or own, got {experts!r}. Give one of them."
        )
    if bucket_bytes < 1:
        raise ConfigError(
            f"export_weights: bucket_bytes: expected a number of bytes, got {bucket_bytes}."
        )
    for chunk in exporter.chunks:
        gather_weights(chunk)
    options = ExportOptions(
        exported=exporter.exported,
        own=experts == "own",
        bucket_bytes=bucket_bytes,
        vocab_size=vocab_size,
        heads=exporter.heads,
    )
    order = _ORDERS.find(options, exporter.held, exporter.require_readable)
    return exporter.stream(order, device)


_ORDERS = KeptOrders()


@dataclass(kw_only=True)
class _Exporter:
    """This rank's part of an export.

    A rank that cannot read its weights still takes part in all exchanges, for which others wait,
    and sends NaN. Its error is raised on all ranks at the end.
    """

    chunks: list[Any]
    exported: ExportedAs
    experts: dict[tuple[str, str], ExportedLinear]
    parts: dict[HeldPart, LocalPart]
    wholes: Wholes = field(default_factory=Wholes)
    versions: dict[tuple[str, str], int] = field(default_factory=dict)
    """Versions of experts as of the beginning."""
    error: Exception | None = None
    """Why this rank reads and yields nothing more."""

    @classmethod
    def of(cls, model_chunks: Any, exported: ExportedAs) -> "_Exporter":
        chunks = require_chunks(model_chunks, "export_weights")
        for chunk in chunks if exported.is_renamed else ():
            require_plain_model(chunk)
        return cls(
            chunks=chunks,
            exported=exported,
            experts={
                one.held.key: one
                for chunk in chunks
                for one in local_experts(chunk, with_input_amaxes=exported.has_input_scales)
            },
            parts={one.held: one for chunk in chunks for one in local_parts(chunk)},
        )

    @property
    def held(self) -> tuple[HeldRecord, ...]:
        return *(one.held for one in self.experts.values()), *self.parts

    @property
    def heads(self) -> Heads | None:
        """Sizes of attention, None where Megatron's names are kept."""
        if not self.exported.is_renamed:
            return None
        config = self.chunks[0].config
        groups = config.num_query_groups or config.num_attention_heads
        return Heads(groups, config.num_attention_heads // groups, config.kv_channels)

    def require_readable(self) -> None:
        """Raise StateError for unreadable weights, before anything is sent."""
        self.versions.update({key: one.require_readable() for key, one in self.experts.items()})

    def stream(
        self, order: ExportOrder, device: torch.device | str | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights; exchange those that not all ranks hold, experts ahead."""
        for batch, arriving in self._started(order):
            if isinstance(batch, tuple):
                yield from self._experts(batch, arriving.wait(), device)
            else:
                for name, tensor in self._parts(order, batch):
                    yield name, tensor if device is None else tensor.to(device)
        agree(self._conclude, None)

    def _conclude(self) -> None:
        """Raise the error of this rank, or StateError if parts of a tensor are missing."""
        if self.error is not None:
            raise self.error
        self.wholes.check_complete()

    def _is_unchanged(self, key: tuple[str, str] | None = None) -> bool:
        """Return whether this rank may read its weights; keep the error if not.

        A rank without experts of ``key`` looks at others, so that all ranks notice a step at once.
        """
        witness = self.experts.get(key) if key else None
        witness = witness or next(iter(self.experts.values()), None)
        if witness is not None:
            self._try(partial(witness.require_unchanged, self.versions[witness.held.key]))
        return self.error is None

    def _started(self, order: ExportOrder) -> Iterator[tuple[Batch, Arriving]]:
        """Yield batches with the exchange of their experts, started while others are yielded.

        At least one exchange is ahead of the yielded batch, and more while they fit two buckets:
        GPUs then do not wait for the host.
        """
        started: deque[tuple[Batch, Arriving, int]] = deque()
        ahead = 0  # bytes behind the first
        for batch in order.batches:
            experts = batch if isinstance(batch, tuple) else ()
            size = sum(unit.nbytes for unit in experts)
            while ahead and ahead + size > 2 * order.options.bucket_bytes:
                yield started.popleft()[:2]
                ahead -= started[0][2]
            ahead += size if started else 0
            started.append((batch, self._start(experts) if experts else Arriving(), size))
        for batch, arriving, _ in started:
            yield batch, arriving

    def _experts(
        self,
        units: Sequence[ExpertUnit],
        arrived: Iterable[Tensor],
        device: torch.device | str | None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the experts of a batch, as views of its bucket where it has one."""
        arrived = iter(arrived)
        for unit in units:
            if not self._is_unchanged(unit.held.key):
                return
            buffers = list(islice(arrived, len(unit.infos)))
            if unit.held.cuts > 1:
                buffers = join_parts(unit.held, buffers, unit.stop - unit.start)
            stacked = self.exported.tensors(unit.held, buffers)
            if device is not None:
                stacked = [one.to(device) for one in stacked]
            yield from zip(unit.names, self.exported.listed(stacked), strict=True)

    def _start(self, units: Sequence[ExpertUnit]) -> Arriving:
        """Start the exchange of a batch; every rank that holds or receives some must."""
        first, found = units[0], Arriving()
        local = self.experts.get(first.held.key)
        if local is not None:
            found = Arriving([buffer for unit in units for buffer in self._buffers(unit)])
            groups = local.linear.groups
            if first.held.cuts > 1:
                found = gather_buffers(found.wait(), groups.expt_tp)
            if first.is_spread:
                found = gather_buffers(found.wait(), groups.ep)
        if not first.is_sent:
            return found
        infos = [info for unit in units for info in unit.infos]
        buffers, bucket = found.wait(), found.bucket
        if bucket is None:
            bucket = self._bucket(bucket_nbytes(infos))
            if dist.get_rank() == first.sender:
                fill_bucket(bucket, buffers)
        work = dist.broadcast(bucket, src=first.sender, async_op=True)
        return Arriving(buffers or cut_bucket(bucket, infos), bucket, [work])

    def _try[T](self, read: Callable[[], T]) -> T | None:
        """Return what ``read`` returns; None if it fails, and after any error."""
        if self.error is None:
            try:
                return read()
            except Exception as error:  # other ranks must not wait for this one
                self.error = error
        return None

    def _buffers(self, unit: ExpertUnit) -> list[Tensor]:
        """Return buffers of local experts, or after an error NaN in their place."""
        local = self.experts[unit.held.key]
        self._is_unchanged(unit.held.key)
        found = self._try(partial(local.buffers, unit.start, unit.stop))
        if found is not None:
            return found
        infos = buffers_of_part(local.held, unit.stop - unit.start)
        return cut_bucket(self._bucket(bucket_nbytes(infos)).fill_(_NAN), infos)

    def _parts(self, order: ExportOrder, units: Sequence[PartUnit]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that a batch completes."""
        self._is_unchanged()
        for unit, values in zip(units, self._values(units), strict=True):
            if values is None or self.error is not None:
                return
            whole = self.wholes.add(unit.held, values)
            if whole is not None:
                yield from order.named(unit.held.name, whole)

    def _values(self, units: Sequence[PartUnit]) -> Iterable[Tensor | None]:
        """Return the values of a batch, as views of its bucket on ranks that do not hold them."""
        if not units[0].is_sent:
            return (self._try(self.parts[one.held].read) for one in units)
        rank, sender = dist.get_rank(), units[0].sender
        own = [self._try(self.parts[one.held].read) if rank in one.ranks else None for one in units]
        bucket = self._bucket(sum(unit.nbytes for unit in units))
        if rank == sender and self.error is None:
            fill_bucket(bucket, [one for one in own if one is not None])
        elif rank == sender:
            bucket.fill_(_NAN)
        dist.broadcast(bucket, src=sender)
        come = cut_bucket(bucket, [unit.held.part for unit in units])
        return [theirs if mine is None else mine for mine, theirs in zip(own, come, strict=True)]

    def _bucket(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.chunks[0].parameters()).device
        return device
