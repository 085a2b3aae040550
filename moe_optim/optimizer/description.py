"""What was built for a run: which weights lie in which format, and what a step gathers for them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal

import torch
from megatron.core.optimizer.param_layout import pad_bucket_end
from rich.console import Console, Group
from rich.table import Table

from moe_optim.buckets.bucket_group import managed_buckets
from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.errors import StateError
from moe_optim.experts.grouped_linear import GroupedLinear
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
_WIDTH = 200  # columns, more than any line has
_STOCK = (
    "stock: Megatron's distributed optimizer with bf16 weights, gathered in bf16 in the same "
    "buckets, which end where it ends them"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsOfAFormat:
    """Weights of one rank that are alike."""

    kind: Kind
    """``expert``, or ``dense`` for all others."""
    format: str
    """A format of this package, or the dtype."""
    unmanaged: str | None
    """Why buckets of this package do not hold them; None for those that they hold."""
    weights: int
    """Matrices, or vectors of biases and norms: one an expert, whatever the expert layout."""
    parameters: int
    """Elements."""
    weight_bytes: int
    """Of quantized weights everything that products read or a gather writes, padding included."""
    stock_weight_bytes: int
    """The same parameters in bf16; those that are not quantized stay what they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What this package does to a run, seen from one rank: its weights, and all that is gathered.

    *Stock* is Megatron's distributed optimizer with bf16 weights, gathered in bf16 in the same
    buckets, which end where Megatron ends them.
    """

    optimizer: str
    """Classes of the optimizers in it."""
    step: str | None
    """Who steps: ``fused`` or ``stock``. None where one part of several is described: they step
    together."""
    weights: tuple[WeightsOfAFormat, ...]
    """Managed ones first."""
    wire: str | None
    """What the gather of managed buckets carries; None where there are none."""
    layout: str | None
    """Where managed buckets end; None where there are none."""
    buckets: int
    """Managed ones."""
    ranks: tuple[int, ...]
    """How many data-parallel ranks share a managed bucket, ascending: experts and other weights can
    have several numbers. Empty where there are no managed buckets."""
    gathered_bytes: int
    """Of managed buckets a step: what lies on every rank when it has arrived, its own part and
    padding included. With one rank it is there already."""
    stock_gathered_bytes: int
    """What stock would gather for the same buckets."""
    other_buckets: int
    """Those of all other parameters."""
    other_gathered_bytes: int
    """Of these a step, by Megatron's own code."""

    @property
    def managed(self) -> tuple[WeightsOfAFormat, ...]:
        """Weights in buckets of this package."""
        return tuple(row for row in self.weights if row.unmanaged is None)

    @property
    def line(self) -> str:
        """What is managed, in one line."""
        rows = [
            f"{row.weights:,} {row.kind} weights in {row.format} "
            f"({spell_count(row.parameters)} parameters, {spell_bytes(row.weight_bytes)})"
            for row in self.managed
        ]
        others = sum(row.parameters for row in self.weights if row.unmanaged is not None)
        rows += [f"{spell_count(others)} parameters not managed"] if others else []
        if self.buckets:
            rows.append(f"{_count(self.buckets, 'bucket')}, wire {self.wire}, layout {self.layout}")
        return "; ".join(rows)

    def __str__(self) -> str:
        """Return the table, as lines without colours."""
        console = Console(file=StringIO(), width=_WIDTH, color_system=None)
        console.print(self)
        assert isinstance(console.file, StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def __rich__(self) -> Group:
        """Return a table with a row for each kind and format, and what is gathered below it."""
        table = Table(box=None, pad_edge=False)
        for header in ("kind", "format"):
            table.add_column(header)
        for header in ("weights", "parameters", "bytes", "stock"):
            table.add_column(header, justify="right", no_wrap=True)
        table.add_column("managed")
        for row in self.weights:
            table.add_row(
                row.kind,
                row.format,
                f"{row.weights:,}",
                spell_count(row.parameters),
                spell_bytes(row.weight_bytes),
                spell_bytes(row.stock_weight_bytes),
                "yes" if row.unmanaged is None else f"no: {row.unmanaged}",
            )
        step = "" if self.step is None else f", step {self.step}"
        title = f"moe_optim: {self.optimizer}{step}; weights of this rank"
        return Group(title, table, *self._gathers())

    def _gathers(self) -> Iterator[str]:
        if self.buckets:
            yield (
                f"gathered a step: {spell_bytes(self.gathered_bytes)} (stock "
                f"{spell_bytes(self.stock_gathered_bytes)}) in {_count(self.buckets, 'bucket')} "
                f"of {' or '.join(map(str, self.ranks))} rank{'s' * (self.ranks != (1,))}, "
                f"wire {self.wire}, layout {self.layout}"
            )
        others = _count(self.other_buckets, "other bucket" if self.buckets else "bucket")
        yield f"{others}: {spell_bytes(self.other_gathered_bytes)} a step, as stock"
        if self.buckets:
            yield _STOCK


def describe(model_chunks: Sequence[Any], optimizer: Any) -> Description:
    """Return what was built on this rank. No rank communicates, and nothing is changed.

    Ranks with other experts, or of other pipeline stages, have other weights; those that share
    their weights give the same description.

    Args:
        model_chunks: DDP-wrapped chunks.
        optimizer: what Megatron's factory returned for them, or one part of it, whose buckets
            alone are described then. Stock ones, too.

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
    held = {param for bucket in buckets for param in bucket.params_list}
    ours = {param for bucket in managed for param in bucket.params}
    layouts = (part.knobs.layout for part in parts if isinstance(part, CheckpointedOptimizer))
    high_busbw = any(c.ddp_config.pad_buckets_for_high_nccl_busbw for c in model_chunks)
    return Description(
        optimizer=", ".join(sorted({type(part).__name__ for part in parts})),
        step=_step_of(optimizer),
        weights=_rows(model_chunks, held, ours),
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
    held: set[torch.nn.Parameter],
    ours: set[torch.nn.Parameter],
) -> tuple[WeightsOfAFormat, ...]:
    """Return parameters by kind, format and reason.

    Args:
        model_chunks: that own them.
        held: those in buckets of the optimizer.
        ours: those in managed ones.
    """
    multiplied = {
        weight: module.quantized_copy.format.name
        for chunk in model_chunks
        for module in chunk.modules()
        if isinstance(module, GroupedLinear) and module.quantized_copy is not None
        for weight in module.weights()
    }
    names = parameter_names(model_chunks)
    groups: dict[tuple[bool, bool, str, str], list[torch.nn.Parameter]] = {}
    for param, name in names.items():
        reason = "" if param in ours else _reason(param, name, param in held, multiplied)
        key = (param not in ours, not _is_expert(name), _format_of(param), reason)
        groups.setdefault(key, []).append(param)
    seen: set[int] = set()
    rows = []
    for (_, is_dense, format, reason), params in sorted(groups.items()):
        parameters = sum(param.numel() for param in params)
        weight_bytes = sum(_memory_bytes(param, seen) for param in params)
        rows.append(
            WeightsOfAFormat(
                kind="dense" if is_dense else "expert",
                format=format,
                unmanaged=reason or None,
                weights=sum(_count_weights(param, names[param]) for param in params),
                parameters=parameters,
                weight_bytes=weight_bytes,
                stock_weight_bytes=(
                    weight_bytes if _is_plain(params[0]) else _BF16_BYTES * parameters
                ),
            )
        )
    return tuple(rows)


def _reason(
    param: torch.nn.Parameter,
    name: str,
    is_held: bool,
    multiplied: Mapping[torch.nn.Parameter, str],
) -> str:
    """Say why no managed bucket holds a parameter.

    Args:
        param: of the model.
        name: of it.
        is_held: whether another bucket of the optimizer does.
        multiplied: formats of the products of bf16 weights.
    """
    if not param.requires_grad:
        return "frozen"
    if not is_held:
        return "not in this optimizer"
    if _is_vector(param, name):
        return "bias or norm"
    if not _is_plain(param):
        return "Megatron gathers them"
    if param in multiplied:
        return f"bf16 primary weights, multiplied in {multiplied[param]}"
    return f"{_format_of(param)} primary weights"


def _is_expert(name: str) -> bool:
    """Return whether a parameter belongs to routed experts, by the module it lies in."""
    return "experts" in name.split(".")


def _is_vector(param: torch.nn.Parameter, name: str) -> bool:
    """Return whether a parameter is a bias or a norm; grouped biases of experts are [E, R]."""
    return param.dim() < 2 or name.rpartition(".")[2].rstrip("0123456789") == "bias"


def _is_plain(param: torch.nn.Parameter) -> bool:
    """Return whether a parameter is an ordinary tensor, without a quantized storage."""
    return _storage(param) is None and not is_quantized(param)


def _storage(param: torch.nn.Parameter) -> WeightStorage | None:
    """Return the storage of a parameter that has one; unlike ``storage_of`` it makes none."""
    storage: WeightStorage | None = getattr(param, "quantized_storage", None)
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
    """Return how many matrices or vectors a parameter holds: one an expert."""
    matrix_dims = 1 if _is_vector(param, name) else 2
    return param.shape[0] if _is_expert(name) and param.dim() > matrix_dims else 1


def _memory_bytes(param: torch.nn.Parameter, seen: set[int]) -> int:
    """Return the bytes behind a parameter that are not among those seen, and note them.

    Weights of a bucket lie in the same memory, with its padding.
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
    buffers = [buffer.data for buffer in bucket.gather.sliced]
    return sum(tensor.nbytes for tensor in (*buffers, *bucket.gather.reduced))


def _stock_bytes(bucket: ManagedBucket, high_busbw: bool) -> int:
    used = max(slot.end for slot in bucket.slots)
    return _BF16_BYTES * int(pad_bucket_end(used, bucket.dp_size, high_busbw))


def _only(values: Iterable[Any]) -> Any:
    """Return the value that all are, None of nothing; of several their list."""
    found = list(dict.fromkeys(values))
    return found[0] if len(found) == 1 else ", ".join(map(str, found)) or None


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
