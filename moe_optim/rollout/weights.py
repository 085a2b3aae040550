"""Exports a live model's weights to inference engines, as pairs of name and tensor."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.buckets.bucket_group import gather_weights
from moe_optim.calibration.linears import require_chunks
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.integration.agreement import agree
from moe_optim.rollout.dense import LocalPart, Wholes, local_parts
from moe_optim.rollout.dense_names import DenseNames, find_pairs
from moe_optim.rollout.expert_tensors import get_export_layout
from moe_optim.rollout.experts import ExpertReader, ExportedAs, ExportedLinear, local_experts
from moe_optim.rollout.rows import Heads
from moe_optim.rollout.units import (
    HeldExperts,
    HeldPart,
    HeldRecord,
    SendUnit,
    batches,
    bucket_nbytes,
    cut_bucket,
    fill_bucket,
    infos_of,
    put_together,
)

BUCKET_BYTES = 2**29


@torch.inference_mode(False)
@torch.no_grad()
def export_weights(
    model_chunks: Iterable[torch.nn.Module],
    *,
    layout: Literal["hf_per_expert", "sequential"] = "hf_per_expert",
    convention: Literal["compressed_tensors", "modelopt", "deepseek"] | None = None,
    experts: Literal["all", "own"] = "all",
    device: torch.device | str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    vocab_size: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Return name and tensor of every weight of a model, without dequantizing experts.

    The pairs suit ``load_weights`` of vLLM's models and SGLang's ``update_weights_from_tensor``.
    Quantized experts are exported as data and scales, numbered globally, with a convention's names,
    shapes and dtypes; they decode to the values used in training. All other weights are bf16:
    quantized dense weights are dequantized, exactly if their scales are powers of two, else rounded
    to bf16. Gate and up are separate, with the same global scale in NVFP4, as required by engines
    that fuse them.

    Stale weights are gathered first. On ranks that hold an expert, its tensors are views of the
    weight unless gate and up rows are interleaved: read them before the next step, and do not write
    to them.

    Every rank must call it with all of its chunks and exhaust the iterator, which exchanges buckets
    between ranks.

    Args:
        model_chunks: model chunks of this rank's pipeline stage.
        layout: ``hf_per_expert``, the on-disk names of Hugging Face's models; or ``sequential``,
            Megatron's, for models without such names.
        convention: engines' names of data and scales; None for the first of the format in
            ``moe_optim.rollout.conventions.CONVENTIONS``. Experts with per-tensor scaling use
            ``ONE_SCALE`` of that module.
        experts: ``all`` to yield every expert on every rank; ``own`` to yield only local experts,
            without sending any.
        device: device of the tensors; None: unchanged.
        bucket_bytes: size of a message in bytes; larger tensors are sent alone.
        vocab_size: rows of embeddings to yield, without Megatron's padding; None: all.

    Yields:
        Names and tensors; with ``experts="all"`` the same on every rank, in the same order.

    Raises:
        ConfigError: layout or convention is unknown; the layout has no names for the model; or
            experts have no gate, or are sharded with separate scales or global scales.
        LayoutError: gate and up, or expert shards of two ranks, share a scale block; or no rank has
            grouped experts.
        StateError: weights are on the host, their gather would overwrite unused gradients, or a
            step was taken during the iteration.
    """
    exporter = agree(
        lambda: _Exporter.of(model_chunks, ExportedAs(get_export_layout(layout), convention)), None
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
    agree(exporter.require_readable, None)
    everywhere: list[list[HeldRecord]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, exporter.held)
    own = experts == "own"
    plan = agree(lambda: exporter.plan(everywhere, own, vocab_size), None)
    return exporter.stream(plan, device, bucket_bytes)


@dataclass(frozen=True, kw_only=True)
class _ExportOrder:
    """Units in export order, the same on every rank."""

    units: Sequence[SendUnit]
    dense: DenseNames | None
    """None to keep Megatron's names."""


@dataclass(frozen=True, kw_only=True)
class _Exporter:
    """This rank's part of an export."""

    chunks: list[Any]
    exported: ExportedAs
    experts: dict[HeldRecord, ExportedLinear]
    parts: dict[HeldRecord, LocalPart]
    reader: ExpertReader
    wholes: Wholes = field(default_factory=Wholes)

    @classmethod
    def of(cls, model_chunks: Any, exported: ExportedAs) -> "_Exporter":
        chunks = require_chunks(model_chunks, "export_weights")
        experts = [one for chunk in chunks for one in local_experts(chunk)]
        return cls(
            chunks=chunks,
            exported=exported,
            reader=ExpertReader(exported=exported),
            experts={one.held: one for one in experts},
            parts={one.held: one for chunk in chunks for one in local_parts(chunk)},
        )

    @property
    def held(self) -> list[HeldRecord]:
        return [*self.experts, *self.parts]

    def require_readable(self) -> None:
        """Raise StateError for unreadable weights, before anything is sent."""
        for local in self.experts.values():
            local.require_readable()

    def plan(
        self, everywhere: Sequence[Sequence[HeldRecord]], own: bool, vocab_size: int | None
    ) -> _ExportOrder:
        """Return the export order, given the records of all ranks; no rank communicates."""
        ranks_of = put_together(dict(enumerate(everywhere)))
        if not any(isinstance(held, HeldExperts) for held in ranks_of):
            raise LayoutError(
                "export_weights: expected MoE layers with grouped experts, got none on any rank. "
                "Build the model with --num-experts and --moe-grouped-gemm."
            )
        units = [unit for held, ranks in ranks_of.items() for unit in self._units(held, ranks, own)]
        dense = None
        if self.exported.layout.name != "sequential":
            pairs = find_pairs({h.name for h in ranks_of if isinstance(h, HeldPart)})
            config = self.chunks[0].config
            groups = config.num_query_groups or config.num_attention_heads
            heads = Heads(groups, config.num_attention_heads // groups, config.kv_channels)
            dense = DenseNames(pairs=pairs, heads=heads, vocabulary=vocab_size)
        return _ExportOrder(units=units, dense=dense)

    def _units(self, held: HeldRecord, ranks: frozenset[int], own: bool) -> Iterator[SendUnit]:
        is_sent = len(ranks) < dist.get_world_size()
        if isinstance(held, HeldPart):
            yield SendUnit(
                held=held, expert=None, tensors=(held.part,), ranks=ranks, is_sent=is_sent
            )
            return
        infos = tuple(info for _, info in self.exported.infos(held))
        for expert in range(held.first, held.first + held.count):
            yield SendUnit(
                held=held,
                expert=expert,
                tensors=infos,
                ranks=ranks,
                is_sent=is_sent and not own,
            )

    def stream(
        self, plan: _ExportOrder, device: torch.device | str | None, bucket_bytes: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights; send those that not all ranks hold."""
        rank = dist.get_rank()
        for units in batches(plan.units, bucket_bytes):
            if units[0].is_sent:
                values = iter(self._send(units))
            else:
                units = [unit for unit in units if rank in unit.ranks]
                values = self._read_all(units)
            for unit, tensors in zip(units, values, strict=True):
                for name, tensor in self._named(plan, unit, tensors):
                    yield name, tensor if device is None else tensor.to(device)
        self.wholes.check_complete()

    def _read_all(self, units: Sequence[SendUnit]) -> Iterator[list[Tensor]]:
        """Return the tensors of this rank's units in a batch."""
        is_cut = bool(units) and units[0].is_cut
        return iter(self._gather(units)) if is_cut else map(self._read, units)

    def _gather(self, units: Sequence[SendUnit]) -> list[list[Tensor]]:
        """Return the tensors of sharded units, joined across ranks."""
        own = [self._read(unit) for unit in units]
        group = self.experts[units[0].held].linear.groups.expt_tp
        infos = [info for tensors in own for info in infos_of(tensors)]
        gathered = self._bucket(group.size() * bucket_nbytes(infos)).view(group.size(), -1)
        fill_bucket(gathered[group.rank()], [tensor for tensors in own for tensor in tensors])
        dist.all_gather_into_tensor(gathered.view(-1), gathered[group.rank()], group=group)
        arrived = [iter(cut_bucket(part, infos)) for part in gathered]
        joined = []
        for unit, mine in zip(units, own, strict=True):
            assert isinstance(unit.held, HeldExperts)
            parts = [[next(one) for _ in mine] for one in arrived]
            joined.append(self.exported.join(unit.held, parts))
        return joined

    def _read(self, unit: SendUnit) -> list[Tensor]:
        if isinstance(unit.held, HeldPart):
            return [self.parts[unit.held].read()]
        assert unit.expert is not None
        return self.reader.read(self.experts[unit.held], unit.expert)

    def _send(self, units: Sequence[SendUnit]) -> list[list[Tensor]]:
        """Return the tensors of units, as views of the bucket on ranks that do not hold them."""
        rank, sender = dist.get_rank(), units[0].sender
        own = list(self._read_all([unit for unit in units if rank in unit.ranks]))
        bucket = self._bucket(sum(unit.nbytes for unit in units))
        if rank == sender:
            fill_bucket(bucket, [tensor for tensors in own for tensor in tensors])
        dist.broadcast(bucket, src=sender)
        arrived = iter(cut_bucket(bucket, [info for unit in units for info in unit.tensors]))
        come = [[next(arrived) for _ in unit.tensors] for unit in units]
        kept = iter(own)
        return [
            next(kept) if rank in unit.ranks else theirs
            for unit, theirs in zip(units, come, strict=True)
        ]

    def _bucket(self, nbytes: int) -> Tensor:
        device = next(self.chunks[0].parameters()).device
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _named(
        self, plan: _ExportOrder, unit: SendUnit, values: Sequence[Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        if isinstance(unit.held, HeldExperts):
            assert unit.expert is not None
            names = self.exported.names(unit.held, unit.expert)
            yield from zip(names, values, strict=True)
            return
        whole = self.wholes.add(unit.held, values[0])
        if whole is None:
            return
        if plan.dense is None:
            yield unit.held.name, whole
        else:
            yield from plan.dense.convert(unit.held.name, whole).items()
