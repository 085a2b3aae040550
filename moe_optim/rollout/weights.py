"""Weights of a live model for inference engines, as pairs of name and tensor."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.buckets.bucket_group import gather_weights
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.integration.agreement import agree
from moe_optim.rollout.buckets import bucket_nbytes, cut_bucket, fill_bucket, infos_of
from moe_optim.rollout.dense import LocalPart, Wholes, local_parts
from moe_optim.rollout.dense_names import DenseNames, Heads, find_family
from moe_optim.rollout.expert_tensors import get_export_layout
from moe_optim.rollout.experts import ExpertReader, ExportedAs, LocalExperts, form_of, local_experts
from moe_optim.rollout.units import Held, HeldExperts, HeldPart, Unit, batches, put_together

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
    """Return name and tensor of every weight of a model, quantized experts as they are.

    What ``load_weights`` of vLLM's models and ``update_weights_from_tensor`` of SGLang take.
    Quantized experts are data and scales under their global number, in the names, shapes and
    dtypes of a convention, and what these mean are the values that training multiplies; everything
    else is in the dtype of training, bf16, quantized dense weights dequantized: exactly, but for
    those with one scale, whose values bf16 rounds.
    Gate and up are apart, with the same global scale in NVFP4, as engines that fuse them want.

    Weights that are behind their masters are gathered first. A tensor is a view of the weight
    wherever that is one: rows of an expert on a rank that holds it, unless gate and up rows
    alternate. Tensors are to be read before the next step, and not to be written.

    Every rank must call it, with all of its chunks, and take all that it yields: ranks send
    buckets to each other on the way.

    Args:
        model_chunks: those of this rank's pipeline stage.
        layout: ``hf_per_expert``, the names of Hugging Face's models on disk; or ``sequential``,
            Megatron's, for models that have no names there.
        convention: how engines call data and scales of the format; None takes the first of
            ``moe_optim.rollout.conventions.CONVENTIONS`` that has it; experts with one scale a
            weight have ``ONE_SCALE`` of that module.
        experts: ``all`` yields every expert on every rank; ``own`` on each rank those it holds,
            and nothing of them is sent.
        device: where tensors are wanted; None leaves them where they lie.
        bucket_bytes: of what is sent at once; a tensor that is larger goes alone.
        vocab_size: rows of embeddings to yield, where Megatron has padded them; None: all.

    Yields:
        Names and tensors, the same on every rank in the same order with ``experts="all"``.

    Raises:
        ConfigError: no such layout or convention; a model without names in the layout; experts
            that have no gate, or that expert tensor parallelism cuts into parts with scales, or
            global scales, of their own.
        LayoutError: gate and up, or parts of an expert on two ranks, share a block of scales; or
            no rank has grouped experts.
        StateError: weights are on the host, or their gather would overwrite gradients that no step
            has used; at any tensor, where a step has come between.
    """
    exporter = agree(
        lambda: _Exporter.of(model_chunks, ExportedAs(get_export_layout(layout), convention)), None
    )
    _require_choice(experts, bucket_bytes)
    for chunk in exporter.chunks:
        gather_weights(chunk)
    agree(exporter.require_readable, None)
    everywhere: list[list[Held]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, exporter.held)
    own = experts == "own"
    plan = agree(lambda: exporter.plan(everywhere, own, vocab_size), None)
    return exporter.stream(plan, device, bucket_bytes)


def _require_choice(experts: str, bucket_bytes: int) -> None:
    if experts not in ("all", "own"):
        raise ConfigError(
            f"export_weights: experts: expected all or own, got {experts!r}. Give one of them."
        )
    if bucket_bytes < 1:
        raise ConfigError(
            f"export_weights: bucket_bytes: expected a number of bytes, got {bucket_bytes}."
        )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is yielded in which order; the same on every rank."""

    units: Sequence[Unit]
    dense: DenseNames | None
    """None where names stay Megatron's."""


@dataclass(frozen=True, kw_only=True)
class _Exporter:
    """This rank's part of an export."""

    chunks: list[Any]
    exported: ExportedAs
    experts: dict[Held, LocalExperts]
    parts: dict[Held, LocalPart]
    reader: ExpertReader
    wholes: Wholes = field(default_factory=Wholes)

    @classmethod
    def of(cls, model_chunks: Any, exported: ExportedAs) -> "_Exporter":
        chunks = [] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
        if not chunks:
            raise ConfigError(
                "export_weights: model_chunks: expected a list of this rank's model chunks, got "
                f"{type(model_chunks).__name__}. Give what get_model() returned, or [model]."
            )
        experts = [one for chunk in chunks for one in local_experts(chunk)]
        return cls(
            chunks=chunks,
            exported=exported,
            reader=ExpertReader(exported=exported),
            experts={one.held: one for one in experts},
            parts={one.held: one for chunk in chunks for one in local_parts(chunk)},
        )

    @property
    def held(self) -> list[Held]:
        """What this rank has."""
        return [*self.experts, *self.parts]

    def require_readable(self) -> None:
        """Raise for weights that cannot be read now, before anything is sent."""
        for local in self.experts.values():
            local.require_readable()

    def plan(
        self, everywhere: Sequence[Sequence[Held]], own: bool, vocab_size: int | None
    ) -> _Plan:
        """Return the plan of what all ranks have; no rank communicates."""
        holders = put_together(dict(enumerate(everywhere)))
        if not any(isinstance(held, HeldExperts) for held in holders):
            raise LayoutError(
                "export_weights: expected MoE layers with grouped experts, got none on any rank. "
                "Build the model with --num-experts and --moe-grouped-gemm."
            )
        units = [unit for held, ranks in holders.items() for unit in self._units(held, ranks, own)]
        dense = None
        if self.exported.layout.name != "sequential":
            family, pairs = find_family({h.name for h in holders if isinstance(h, HeldPart)})
            config = self.chunks[0].config
            groups = config.num_query_groups or config.num_attention_heads
            heads = Heads(groups, config.kv_channels)
            dense = DenseNames(family=family, pairs=pairs, heads=heads, vocabulary=vocab_size)
        return _Plan(units=units, dense=dense)

    def _units(self, held: Held, ranks: frozenset[int], own: bool) -> Iterator[Unit]:
        is_sent = len(ranks) < dist.get_world_size()
        if isinstance(held, HeldPart):
            yield Unit(held=held, expert=None, tensors=(held.part,), holders=ranks, is_sent=is_sent)
            return
        infos = tuple(info for part in form_of(self.exported, held) for _, info in part)
        for expert in range(held.first, held.first + held.count):
            yield Unit(
                held=held,
                expert=expert,
                tensors=infos,
                holders=ranks,
                is_sent=is_sent and not own,
            )

    def stream(
        self, plan: _Plan, device: torch.device | str | None, bucket_bytes: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield everything, sending on the way what not all ranks have."""
        rank = dist.get_rank()
        for units in batches(plan.units, bucket_bytes):
            if units[0].is_sent:
                values = iter(self._send(units))
            else:
                units = [unit for unit in units if rank in unit.holders]
                values = self._read_all(units)
            for unit, tensors in zip(units, values, strict=True):
                for name, tensor in self._named(plan, unit, tensors):
                    yield name, tensor if device is None else tensor.to(device)
        self.wholes.check_complete()

    def _read_all(self, units: Sequence[Unit]) -> Iterator[list[Tensor]]:
        """Return the tensors of units of one batch that this rank holds."""
        is_cut = bool(units) and units[0].is_cut
        return iter(self._gather(units)) if is_cut else map(self._read, units)

    def _gather(self, units: Sequence[Unit]) -> list[list[Tensor]]:
        """Return the tensors of units whose parts this rank and others hold, put together."""
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

    def _read(self, unit: Unit) -> list[Tensor]:
        """Return the tensors of a unit that this rank has."""
        if isinstance(unit.held, HeldPart):
            return [self.parts[unit.held].read()]
        assert unit.expert is not None
        return self.reader.read(self.experts[unit.held], unit.expert)

    def _send(self, units: Sequence[Unit]) -> list[list[Tensor]]:
        """Return the tensors of units, on ranks that do not have them views of what has come."""
        rank, owner = dist.get_rank(), units[0].owner
        own = list(self._read_all([unit for unit in units if rank in unit.holders]))
        bucket = self._bucket(sum(unit.nbytes for unit in units))
        if rank == owner:
            fill_bucket(bucket, [tensor for tensors in own for tensor in tensors])
        dist.broadcast(bucket, src=owner)
        arrived = iter(cut_bucket(bucket, [info for unit in units for info in unit.tensors]))
        come = [[next(arrived) for _ in unit.tensors] for unit in units]
        kept = iter(own)
        return [
            next(kept) if rank in unit.holders else theirs
            for unit, theirs in zip(units, come, strict=True)
        ]

    def _bucket(self, nbytes: int) -> Tensor:
        device = next(self.chunks[0].parameters()).device
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _named(
        self, plan: _Plan, unit: Unit, values: Sequence[Tensor]
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
