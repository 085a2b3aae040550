"""Partition rules of the three grouped GEMMs of one linear, with a weight [E, R, C].

In formulas::

    forward    y[T, R] = x[T, C] W[E, R, C]^T       sums over C
    dgrad      dx[T, C] = dy[T, R] W[E, R, C]       sums over R
    wgrad      dW[E, R, C] = dy[T, R]^T x[T, C]     sums over T, per expert

T are tokens after dispatch: those of the rank's own experts, sorted by expert. A mesh axis that
cuts experts cuts groups of all three GEMMs and needs no communication. FSDP axes cut the weight
between steps only: forward and dgrad all-gather it, and wgrad reduce-scatters its gradient.
A *tensor axis* is any other axis that cuts rows or columns. Where it cuts the contracted dimension,
the output is a sum over its ranks.

Transformer Engine proposes such rules for JAX (``GroupedGemmPrimitive`` in
https://github.com/NVIDIA/TransformerEngine/pull/3058): quantized data and scales of the weight are
gathered over the FSDP axis, groups keep the expert axis, and weight gradients are summed over
data-parallel and FSDP axes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

from moe_optim.errors import ConfigError
from moe_optim.formats import BlockScaledFormat, Direction
from moe_optim.formats.partition import (
    DIMENSIONS,
    Dimension,
    Maxima,
    MeshAxis,
    Partition,
    find_format,
    infer_partition,
)

Wire = Literal["quantized", "bf16"]
"""Content of the all-gather of weights: quantized before it, or bf16 values, quantized after it."""
Dtype = Literal["bf16", "fp32"]
"""Dtype of an output that ranks reduce."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """One of the two matrices that a GEMM multiplies."""

    name: Literal["weight", "tokens", "output_grad"]
    """``weight`` W, ``tokens`` x or ``output_grad`` dy."""
    format: BlockScaledFormat | None
    """Format that the GEMM reads; None for bf16."""
    direction: Direction | None
    """Direction whose blocks lie along the contracted dimension; None for bf16. Row-only formats
    have ``rowwise`` alone, which all GEMMs read."""
    gathered_over: tuple[str, ...]
    """Mesh axes to all-gather over before the GEMM, the outermost first."""
    gathered_buffers: tuple[str, ...]
    """Buffers that travel. Those of ``QuantizedWeight`` travel after quantization, and the GEMM's
    ``direction`` is one of them or follows exactly; ``data`` are bf16 values, quantized after the
    gather if at all."""
    nbytes: int
    """Bytes that one rank contributes to the all-gather. Where blocks span ranks, those of the rank
    that holds the most scales."""
    maxima: tuple[Maxima, ...]
    """Maxima of this direction to exchange before encoding. For x and dy they are those of one
    block row, ``format.block_row_height`` tokens, but ``global_amax`` covers all tokens of an
    expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """One collective over the output of a GEMM."""

    kind: Literal["all_reduce", "reduce_scatter", "slice"]
    """Sum over ranks; sum of which each rank keeps its slice; or that slice alone, where ranks have
    the same tokens and hence the same output."""
    axis: str
    """Mesh axis."""
    dimension: Dimension | Literal["tokens"] | None
    """Dimension of the output that slices are cut from; None for an all-reduce."""
    dtype: Dtype
    """Dtype of the output."""
    nbytes: int
    """Bytes of one rank's output before the collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """One grouped GEMM: operands as read, and collectives over the output, in order."""

    left: Operand
    """x in the forward GEMM, dy in dgrad and wgrad."""
    right: Operand
    """W in the forward GEMM and dgrad, x in wgrad."""
    output: tuple[Reduction, ...]
    """Collectives, in order; empty if each rank's output is complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmPartition:
    """Result of :func:`infer_gemm_partition`: a value, independent of ranks and process groups."""

    held: Partition
    """Weight between steps: with ``wire="quantized"`` as given, otherwise in bf16."""
    gathered: Partition
    """Weight that a GEMM reads, without FSDP axes. Each part is a slice of the weight quantized
    whole."""
    group_axes: tuple[str, ...]
    """Mesh axes that cut groups: experts and their tokens, in all GEMMs without communication."""
    forward: Gemm
    """y = x W^T."""
    dgrad: Gemm
    """dx = dy W."""
    wgrad: Gemm
    """dW = dy^T x."""


def infer_gemm_partition(
    weight: Partition,
    *,
    tokens: int,
    token_axes: Mapping[str, int],
    fsdp: Sequence[str] = (),
    wire: Wire = "quantized",
    token_format: BlockScaledFormat | str | None = None,
    grad_format: BlockScaledFormat | str | None = None,
    wgrad_dtype: Dtype = "fp32",
) -> GemmPartition:
    """Return what the ranks of a mesh gather, exchange and reduce in the GEMMs of one linear.

    With parts W_f of the weight along FSDP axes and tokens x_f of the ranks: y_f = x_f cat(W)^T,
    dx_f = dy_f cat(W), dW_f = part f of sum(dy_g^T x_g). As a part quantized by ``quantize_part``
    is a slice of the weight quantized whole, quantizing commutes with cat.

    Each rank quantizes its tokens of an expert on their own, from the first one on, padded to whole
    blocks. So axes that cut tokens exchange no maxima.

    Args:
        weight: partition of the weight over expert, tensor and FSDP axes, see ``infer_partition``.
            In every dimension FSDP axes lie inside of the others.
        tokens: T of one rank, after dispatch and gathers; enters bytes only.
        token_axes: map from each mesh axis that cuts tokens to its number of ranks: data-parallel
            axes, and usually FSDP axes. A tensor axis among them is sequence parallelism: bf16
            tokens are gathered over it, and reduce-scatters replace all-reduces.
        fsdp: mesh axes of ``weight`` to gather over.
        wire: content of that all-gather, ``quantized`` or ``bf16``.
        token_format: format of x or its name; None for bf16.
        grad_format: format of dy or its name; None for bf16.
        wgrad_dtype: dtype in which weight gradients are reduced, ``fp32`` or ``bf16``. y and dx are
            reduced in bf16.

    Raises:
        ConfigError: unknown FSDP axis, format, wire or dtype; an FSDP axis outside of another axis
            of its dimension; an expert axis that cuts tokens, or unequal numbers of ranks.
        LayoutError: x or dy that their format does not hold, or a byte that would span ranks.
    """
    _check_choices(wire, wgrad_dtype)
    _check_axes(weight, token_axes, fsdp)
    kept = tuple(axis for axis in weight.axes if axis.name not in fsdp)
    rules = _Rules(
        held=weight if wire == "quantized" else _cut("bf16", weight.axes, weight.shape),
        gathered=_cut(weight.format or "bf16", kept, weight.shape),
        fsdp=tuple(axis for axis in weight.axes if axis.name in fsdp and axis.parts > 1),
        kept=tuple(axis for axis in kept if axis.parts > 1),
        tokens=tokens,
        token_axes={axis: parts for axis, parts in token_axes.items() if parts > 1},
    )
    x, dy = find_format(token_format or "bf16"), find_format(grad_format or "bf16")
    return GemmPartition(
        held=rules.held,
        gathered=rules.gathered,
        group_axes=tuple(axis.name for axis in rules.kept if axis.dimension == "experts"),
        forward=Gemm(
            left=rules.token_operand("tokens", x, "rowwise"),
            right=rules.weight_operand("rowwise"),
            output=rules.token_output("rows", contracted="columns"),
        ),
        dgrad=Gemm(
            left=rules.token_operand("output_grad", dy, "rowwise"),
            right=rules.weight_operand("columnwise"),
            output=rules.token_output("columns", contracted="rows"),
        ),
        wgrad=Gemm(
            left=rules.token_operand("output_grad", dy, "columnwise"),
            right=rules.token_operand("tokens", x, "columnwise"),
            output=rules.weight_output(wgrad_dtype),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rules:
    held: Partition
    gathered: Partition
    fsdp: tuple[MeshAxis, ...]  # as all axes here, those of several ranks
    kept: tuple[MeshAxis, ...]
    tokens: int
    token_axes: Mapping[str, int]

    def weight_operand(self, direction: Direction) -> Operand:
        format = self.gathered.format
        encoded = self.gathered if self.held.format is None else self.held
        read = _buffers(format, direction)
        travel = read if self.held.format else ("data",)
        if not self.fsdp:
            travel = ()
        elif all(axis.dimension != "experts" for axis in self.fsdp):  # all have the same amaxes
            travel = tuple(name for name in travel if name != "global_amax")
        return Operand(
            name="weight",
            format=format,
            direction=_direction(format, direction),
            gathered_over=tuple(axis.name for axis in self.fsdp),
            gathered_buffers=travel,
            nbytes=sum(_part_nbytes(self.held, name) for name in travel),
            maxima=tuple(one for one in encoded.maxima if one.name in read),
        )

    def token_operand(
        self,
        name: Literal["tokens", "output_grad"],
        format: BlockScaledFormat | None,
        direction: Direction,
    ) -> Operand:
        features: Dimension = "columns" if name == "tokens" else "rows"
        cut = [axis for axis in self.kept if axis.dimension != features]
        gathers = [axis for axis in cut if axis.name in self.token_axes]
        read = _buffers(format, direction)
        maxima: tuple[Maxima, ...] = ()
        if format is not None:
            size = self.gathered.shape[DIMENSIONS.index(features)]
            cuts = {axis.name: axis.parts for axis in self.kept if axis.dimension == features}
            shape = (1, format.block_row_height, size)
            maxima = infer_partition(format, {"columns": cuts}, shape=shape, name=name).maxima
        ranks = prod(axis.parts for axis in gathers)
        return Operand(
            name=name,
            format=format,
            direction=_direction(format, direction),
            gathered_over=tuple(axis.name for axis in gathers),
            gathered_buffers=("data",) if gathers else (),
            nbytes=-(-self.tokens // ranks) * self._size(features) * 2 if gathers else 0,
            maxima=tuple(one for one in maxima if one.name in read),
        )

    def token_output(self, features: Dimension, contracted: Dimension) -> tuple[Reduction, ...]:
        found: list[Reduction] = []
        tokens = self.tokens
        for axis in (axis for axis in self.kept if axis.dimension == contracted):
            scatters = axis.name in self.token_axes
            found.append(
                Reduction(
                    kind="reduce_scatter" if scatters else "all_reduce",
                    axis=axis.name,
                    dimension="tokens" if scatters else None,
                    dtype="bf16",
                    nbytes=tokens * self._size(features) * 2,
                )
            )
            tokens = -(-tokens // axis.parts) if scatters else tokens
        return tuple(found)

    def weight_output(self, dtype: Dtype) -> tuple[Reduction, ...]:
        """Scatter first, so that only slices are reduced over data-parallel axes."""
        found: list[Reduction] = []
        nbytes = prod(self.gathered.part_shape) * (4 if dtype == "fp32" else 2)
        for axis in self.fsdp:
            found.append(
                Reduction(
                    kind="reduce_scatter" if axis.name in self.token_axes else "slice",
                    axis=axis.name,
                    dimension=axis.dimension,
                    dtype=dtype,
                    nbytes=nbytes,
                )
            )
            nbytes //= axis.parts
        of_weight = {axis.name for axis in (*self.fsdp, *self.kept)}
        found += [
            Reduction(kind="all_reduce", axis=axis, dimension=None, dtype=dtype, nbytes=nbytes)
            for axis in self.token_axes
            if axis not in of_weight
        ]
        return tuple(found)

    def _size(self, dimension: Dimension) -> int:
        return self.gathered.part_shape[DIMENSIONS.index(dimension)]


def _check_choices(wire: str, wgrad_dtype: str) -> None:
    for what, value, known in (("wire", wire, Wire), ("wgrad_dtype", wgrad_dtype, Dtype)):
        if value not in get_args(known):
            expected = " or ".join(get_args(known))
            raise ConfigError(f"{what}: expected {expected}, got '{value}'. Write one of them.")


def _check_axes(weight: Partition, token_axes: Mapping[str, int], fsdp: Sequence[str]) -> None:
    by_name = {axis.name: axis for axis in weight.axes}
    unknown = [name for name in fsdp if name not in by_name]
    if unknown:
        raise ConfigError(
            f"fsdp: expected mesh axes of the weight, got {', '.join(unknown)} besides "
            f"{', '.join(by_name) or 'none'}. Name axes that cut the weight."
        )
    outer: MeshAxis | None = None
    for axis in (axis for axis in weight.axes if axis.parts > 1):
        if axis.name in fsdp:
            outer = axis
        elif outer is not None and outer.dimension == axis.dimension:
            raise ConfigError(
                f"fsdp: expected {outer.name} inside of {axis.name}, got it outside: gathered "
                f"{axis.dimension} would not be contiguous. Write {axis.name} before {outer.name}."
            )
    for name, parts in token_axes.items():
        known = by_name.get(name)
        if parts < 1 or (known is not None and known.parts != parts):
            expected = known.parts if known is not None else "one or more"
            raise ConfigError(
                f"token_axes: expected {expected} ranks along {name}, got {parts}. Give the size "
                "of the mesh axis."
            )
        if known is not None and known.dimension == "experts" and name not in fsdp and parts > 1:
            raise ConfigError(
                f"token_axes: expected axes that cut tokens after dispatch, got {name}, which cuts "
                "experts: each rank has the tokens of its own ones. Leave it out."
            )


def _cut(
    format: BlockScaledFormat | str, cuts: Sequence[MeshAxis], shape: Sequence[int]
) -> Partition:
    axes: dict[Dimension, dict[str, int]] = {}
    for cut in cuts:
        axes.setdefault(cut.dimension, {})[cut.name] = cut.parts
    return infer_partition(format, axes, shape=shape)


def _direction(format: BlockScaledFormat | None, direction: Direction) -> Direction | None:
    if format is None:
        return None
    return "rowwise" if format.is_row_only else direction


def _buffers(format: BlockScaledFormat | None, direction: Direction) -> tuple[str, ...]:
    """Return the buffers that ``direction`` consists of, or is derived from."""
    if format is None:
        return ("data",)
    way = direction if direction in format.gathered_directions else "rowwise"
    amax = ("global_amax",) if format.has_global_amax else ()
    return f"{way}_data", f"{way}_scale", *amax


def _part_nbytes(partition: Partition, name: str) -> int:
    """Return the bytes of one rank's slice of a buffer, of the rank that holds the most entries."""
    buffer, format = partition.buffer(name), partition.format
    if format is None:
        itemsize = 2
    elif name == "global_amax":
        itemsize = 4
    else:
        itemsize = 1 if name.endswith("_data") else format.scale_itemsize
    for dimension, unit in zip(buffer.dimensions, buffer.units, strict=True):
        index = DIMENSIONS.index(dimension)
        whole, part = partition.shape[index], partition.part_shape[index]
        starts = range(0, whole, max(part, 1))
        itemsize *= max((-(-(start + part) // unit) - start // unit for start in starts), default=0)
    return itemsize
