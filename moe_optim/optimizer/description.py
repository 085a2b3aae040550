"""Summary of a built optimizer: weights by format, and bytes gathered per step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.optimizer.param_layout import pad_bucket_end

from moe_optim.buckets.bucket_group import managed_buckets
from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.errors import StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.operands import copies_in
from moe_optim.optimizer.chained import GroupedChainedOptimizer
from moe_optim.optimizer.checkpointed import CheckpointedOptimizer
from moe_optim.spelling import spell_bytes, spell_count
from moe_optim.weights.names import parameter_names
from moe_optim.weights.storage import WeightStorage
from moe_optim.weights.te.fields import (
    TENSORWISE,
    data_of,
    is_quantized,
    is_tensorwise,
    te_formats_of,
)

Kind = Literal["expert", "dense"]
_BF16_BYTES = torch.bfloat16.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsOfAFormat:
    """Weights of one rank with the same kind, format and reason."""

    kind: Kind
    """``expert``, or ``dense`` for all others."""
    format: str
    """Name of a block-scaled format, or dtype."""
    unmanaged: str | None
    """Reason why no managed bucket holds them; None for managed weights."""
    weights: int
    """Number of matrices, or of bias and norm vectors; one per expert in either expert layout."""
    parameters: int
    """Number of elements."""
    weight_bytes: int
    """Bytes that GEMMs read or a gather writes, padding included."""
    stock_weight_bytes: int
    """Bytes of the same parameters with bf16 in place of quantized weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """Weights of one rank, and the bytes that a step gathers.

    *Stock* is Megatron's distributed optimizer with bf16 weights, gathered in bf16 in the same
    buckets with Megatron's own bucket ends. ``str()`` gives one line.
    """

    optimizer: str
    """Class names of the chained optimizers."""
    step: str | None
    """``fused`` or ``stock``; None for one part of a chain."""
    weights: tuple[WeightsOfAFormat, ...]
    """Rows by format, managed weights first."""
    wire: str | None
    """Gather dtype of managed buckets; None without any."""
    layout: str | None
    """Layout of managed buckets; None without any."""
    buckets: int
    """Number of managed buckets."""
    ranks: tuple[int, ...]
    """Data-parallel sizes of managed buckets, ascending; experts and dense weights can differ."""
    gathered_bytes: int
    """Bytes of managed buckets on every rank after a gather, own slice and padding included."""
    stock_gathered_bytes: int
    """Bytes that stock would gather for the same buckets."""
    other_buckets: int
    """Number of unmanaged buckets."""
    other_gathered_bytes: int
    """Bytes per step of unmanaged buckets, gathered by Megatron."""

    @property
    def line(self) -> str:
        """Managed weights and buckets, in one line."""
        rows = [
            f"{row.weights:,} {row.kind} weights in {row.format} "
            f"({spell_count(row.parameters)} parameters, {spell_bytes(row.weight_bytes)})"
            for row in self.weights
            if row.unmanaged is None
        ]
        others = sum(row.parameters for row in self.weights if row.unmanaged is not None)
        rows += [f"{spell_count(others)} parameters not managed"] if others else []
        if self.buckets:
            buckets = "bucket" if self.buckets == 1 else "buckets"
            rows.append(f"{self.buckets:,} {buckets}, wire {self.wire}, layout {self.layout}")
        return "; ".join(rows)

    def __str__(self) -> str:
        """Return optimizer, step, managed weights and bytes gathered per step, in one line."""
        step = "" if self.step is None else f", step {self.step}"
        line = f"{self.optimizer}{step}; {self.line}"
        if self.buckets:
            line += (
                f"; gathered per step: {spell_bytes(self.gathered_bytes)} over "
                f"{' or '.join(map(str, self.ranks))} rank{'s' * (self.ranks != (1,))} (stock "
                f"{spell_bytes(self.stock_gathered_bytes)})"
            )
        return f"{line}; others: {spell_bytes(self.other_gathered_bytes)}, as stock"


def describe(model_chunks: Sequence[Any], optimizer: Any) -> Description:
    """Return a summary of the optimizer on this rank. No rank communicates, and nothing is changed.

    Ranks with other experts, or of other pipeline stages, have other weights; ranks that share
    their weights return the same description.

    Args:
        model_chunks: DDP-wrapped chunks.
        optimizer: result of Megatron's factory, stock or not; or one of its parts, to describe only
            that part's buckets.

    Raises:
        StateError: a chunk is not wrapped with DDP.
    """
    for chunk in model_chunks:
        if not hasattr(chunk, "bucket_groups"):
            raise StateError(
                "moe_optim.describe: expected chunks that are wrapped with DDP, got "
                f"{type(chunk).__name__}. Give what the optimizer was built for."
            )
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    buffers = [buffer for part in parts for buffer in getattr(part, "buffers", [])]
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    managed = managed_buckets(buckets)
    others = [bucket for bucket in buckets if getattr(bucket, "managed", None) is None]
    bucketed = {param for bucket in buckets for param in bucket.params_list}
    layouts = (
        part.moe_optim_config.layout for part in parts if isinstance(part, CheckpointedOptimizer)
    )
    high_busbw = any(c.ddp_config.pad_buckets_for_high_nccl_busbw for c in model_chunks)
    return Description(
        optimizer=", ".join(sorted({type(part).__name__ for part in parts})),
        step=_step_of(optimizer),
        weights=_rows(model_chunks, bucketed, {p for bucket in managed for p in bucket.params}),
        wire=_only(bucket.wire for bucket in managed),
        layout=_only(layouts) if managed else None,
        buckets=len(managed),
        ranks=tuple(sorted({bucket.dp_size for bucket in managed})),
        gathered_bytes=sum(_gathered_bytes(bucket) for bucket in managed),
        stock_gathered_bytes=sum(_stock_bytes(bucket, high_busbw) for bucket in managed),
        other_buckets=len(others),
        other_gathered_bytes=sum(
            bucket.param_data.nbytes for bucket in others if bucket.param_data is not None
        ),
    )


def _step_of(optimizer: Any) -> str | None:
    if isinstance(optimizer, CheckpointedOptimizer):
        return None
    is_fused = isinstance(optimizer, GroupedChainedOptimizer) and optimizer.is_fused
    return "fused" if is_fused else "stock"


def _rows(
    model_chunks: Sequence[torch.nn.Module],
    bucketed: set[torch.nn.Parameter],
    managed: set[torch.nn.Parameter],
) -> tuple[WeightsOfAFormat, ...]:
    compute = {
        weight: module.quantized_copy.format.name
        for chunk in model_chunks
        for module in chunk.modules()
        if isinstance(module, GroupedLinear) and module.quantized_copy is not None
        for weight in module.weights()
    } | {
        weight: copies.format.name
        for chunk in model_chunks
        for copies in copies_in(chunk)
        for weight in copies.weights()
    }
    names = parameter_names(model_chunks)
    groups: dict[tuple[bool, bool, str, str], list[torch.nn.Parameter]] = {}
    for param, name in names.items():
        reason = "" if param in managed else _reason(param, name, param in bucketed, compute)
        key = (param not in managed, not _is_expert(name), _format_of(param), reason)
        groups.setdefault(key, []).append(param)
    seen: set[int] = set()
    rows = []
    for (_, is_dense, format, reason), params in sorted(groups.items()):
        parameters = sum(param.numel() for param in params)
        nbytes = sum(_memory_bytes(param, seen) for param in params)
        row = WeightsOfAFormat(
            kind="dense" if is_dense else "expert",
            format=format,
            unmanaged=reason or None,
            weights=sum(_count_weights(param, names[param]) for param in params),
            parameters=parameters,
            weight_bytes=nbytes,
            stock_weight_bytes=nbytes if _is_plain(params[0]) else _BF16_BYTES * parameters,
        )
        rows.append(row)
    return tuple(rows)


def _reason(
    param: torch.nn.Parameter,
    name: str,
    is_bucketed: bool,
    compute: Mapping[torch.nn.Parameter, str],
) -> str:
    if not param.requires_grad:
        return "frozen"
    if not is_bucketed:
        return "not in this optimizer"
    if _is_vector(param, name):
        return "bias or norm"
    if not _is_plain(param):
        return "Megatron gathers them"
    if param in compute:
        return f"bf16 primary weights, multiplied in {compute[param]}"
    return f"{_format_of(param)} primary weights"


def _is_expert(name: str) -> bool:
    return "experts" in name.split(".")


def _is_vector(param: torch.nn.Parameter, name: str) -> bool:
    # grouped biases of experts are [E, R]
    return param.dim() < 2 or name.rpartition(".")[2].rstrip("0123456789") == "bias"


def _is_plain(param: torch.nn.Parameter) -> bool:
    return _storage(param) is None and not is_quantized(param)


def _storage(param: torch.nn.Parameter) -> WeightStorage | None:
    storage: WeightStorage | None = getattr(param, "quantized_storage", None)  # creates none
    return storage


def _format_of(param: torch.nn.Parameter) -> str:
    storage = _storage(param)
    if storage is not None:
        return storage.format.name
    if formats := te_formats_of(param):
        return " or ".join(format.name for format in formats)
    if is_tensorwise(param):
        return TENSORWISE
    name = str(param.dtype).removeprefix("torch.")
    return {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}.get(name, name)


def _count_weights(param: torch.nn.Parameter, name: str) -> int:
    matrix_dims = 1 if _is_vector(param, name) else 2
    return param.shape[0] if _is_expert(name) and param.dim() > matrix_dims else 1


def _memory_bytes(param: torch.nn.Parameter, seen: set[int]) -> int:
    """Return the bytes behind a parameter, except memory in ``seen``, and add it to ``seen``.

    Weights of a bucket share memory, with its padding.
    """
    storage = _storage(param)
    if is_tensorwise(param):
        return sum(data.nbytes for data in data_of(param))
    if storage is None:
        return param.numel() * param.element_size()
    count = 0
    for memory in storage.memories():
        if memory.data_ptr() not in seen:
            seen.add(memory.data_ptr())
            count += memory.nbytes()
    return count


def _gathered_bytes(bucket: ManagedBucket) -> int:
    return sum(tensor.nbytes for tensor in (*bucket.gather.sliced, *bucket.gather.reduced))


def _stock_bytes(bucket: ManagedBucket, high_busbw: bool) -> int:
    used = max(slot.end for slot in bucket.slots)
    return _BF16_BYTES * int(pad_bucket_end(used, bucket.dp_size, high_busbw))


def _only(values: Iterable[Any]) -> Any:
    found = list(dict.fromkeys(values))
    return found[0] if len(found) == 1 else ", ".join(map(str, found)) or None
