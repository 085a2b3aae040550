"""Partition rules: how cutting a weight [E, R, C] over a mesh cuts its buffers and maxima.

A mesh axis whose parts are whole numbers of blocks cuts buffers between entries, and ranks exchange
nothing. Otherwise blocks span ranks, which exchange the maxima of these blocks over the axis and
replicate their scales. A global amax is the maximum of a block as large as the expert.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

from moe_optim.errors import ConfigError, LayoutError
from moe_optim.formats import BlockScaledFormat, check_stack, get_format

Dimension = Literal["experts", "rows", "columns"]
"""Dimension of a weight [E, R, C] that a mesh axis can cut."""
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
"""All dimensions, in the order of the axes of a weight."""
Bounds = Mapping[Dimension, range]
"""Experts, rows and columns of the whole weight in a part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshAxis:
    """Axis of a mesh of ranks, and the dimension that it cuts."""

    name: str
    """Name in the mesh."""
    dimension: Dimension
    """Dimension of the weight."""
    parts: int
    """Ranks along the axis, one part each."""
    size: int
    """Size of one part along the dimension, after this axis and all before it."""

    def cuts_blocks(self, size: int) -> bool:
        """Return whether some block of ``size``, counted from element 0, spans several parts."""
        return self.parts > 1 and self.size % max(size, 1) != 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPartition:
    """Partition of one buffer."""

    name: str
    """Field of ``QuantizedWeight``; ``data`` for bf16."""
    shape: tuple[int, ...]
    """Shape of the buffer of the whole weight."""
    dimensions: tuple[Dimension, ...]
    """Dimension of the weight along each dimension of the buffer."""
    units: tuple[int, ...]
    """Weight elements per buffer entry, for each dimension of the buffer."""
    cut_by: tuple[tuple[str, ...], ...]
    """Mesh axes that cut each dimension of the buffer between entries, the outermost first."""
    overlaps: tuple[str, ...]
    """Mesh axes along which several ranks hold the same entries, with identical values."""

    def slices(self, bounds: Bounds) -> tuple[slice, ...]:
        """Return the slices of the whole buffer that a rank holds, for its :attr:`Bounds`.

        They contain all entries that ``bounds`` touch.
        """
        return tuple(
            slice(bounds[dimension].start // unit, -(-bounds[dimension].stop // unit))
            for dimension, unit in zip(self.dimensions, self.units, strict=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Maxima:
    """Maxima of one kind of block, and the mesh axes to reduce them over."""

    name: str
    """Buffer that is computed from the maxima."""
    block: tuple[int, int]
    """Rows and columns of one block."""
    axes: tuple[str, ...]
    """Mesh axes to reduce over with MAX, one after the other; empty if no block spans ranks."""
    extent: tuple[int, int]
    """Rows and columns of the ranks along these axes together: whole blocks."""

    @property
    def shape(self) -> tuple[int, int]:
        """Block rows and block columns of the extent: the shape to reduce, per expert."""
        (rows, cols), (height, width) = self.extent, self.block
        return -(-rows // max(height, 1)), -(-cols // max(width, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Result of :func:`infer_partition`: a value, independent of ranks and process groups."""

    format: BlockScaledFormat | None
    """None for bf16."""
    shape: tuple[int, int, int]
    """[E, R, C] of the whole weight."""
    axes: tuple[MeshAxis, ...]
    """Mesh axes by dimension, the outermost first."""
    buffers: tuple[BufferPartition, ...]
    """Every buffer, by the fields of ``QuantizedWeight``; shared data is listed for both
    directions."""
    maxima: tuple[Maxima, ...]
    """Maxima that ranks exchange before encoding; empty if each can encode alone."""
    expert_amax: Maxima
    """Amax of whole experts, for calibration in any format. Never reduced over experts."""

    @property
    def part_shape(self) -> tuple[int, int, int]:
        """Shape [E, R, C] of every rank's part."""
        experts, rows, cols = (
            size // _count(self.axes, dimension)
            for dimension, size in zip(DIMENSIONS, self.shape, strict=True)
        )
        return experts, rows, cols

    @property
    def has_whole_blocks(self) -> bool:
        """Whether no block spans ranks, so that each part can be encoded as a weight.

        A global amax still covers the whole expert.
        """
        return all(maxima.name == "global_amax" for maxima in self.maxima)

    def bounds(self, coordinate: Mapping[str, int]) -> Bounds:
        """Return the experts, rows and columns of one rank's part, counted in the weight.

        Args:
            coordinate: map from each mesh axis to the rank's index along it.

        Raises:
            LayoutError: missing or unknown axes, or an index out of range.
        """
        wanted = {axis.name: axis.parts for axis in self.axes}
        fits = coordinate.keys() == wanted.keys() and all(
            0 <= place < wanted[name] for name, place in coordinate.items()
        )
        if not fits:
            raise LayoutError(
                f"coordinate: expected a place for each of {_spell(wanted)}, below its number of "
                f"parts, got {_spell(coordinate)}. Leave out axes that do not cut the weight."
            )
        index = dict.fromkeys(DIMENSIONS, 0)
        for axis in self.axes:
            index[axis.dimension] = index[axis.dimension] * axis.parts + coordinate[axis.name]
        return {
            dimension: range(index[dimension] * size, (index[dimension] + 1) * size)
            for dimension, size in zip(DIMENSIONS, self.part_shape, strict=True)
        }

    def buffer(self, name: str) -> BufferPartition:
        """Return the buffer called ``name``."""
        return next(buffer for buffer in self.buffers if buffer.name == name)


def infer_partition(
    format: BlockScaledFormat | str,
    axes: Mapping[Dimension, Mapping[str, int]],
    *,
    shape: Sequence[int],
    name: str = "weight",
) -> Partition:
    """Return how data, scales and amaxes are cut, and which maxima need which mesh axis.

    Each part is, to the byte, a slice of the buffers of the whole weight.

    Args:
        format: format or its name; also ``bf16``.
        axes: map from dimension to the mesh axes that cut it, each with its number of ranks, the
            outermost first. ``{"experts": {"ep": 8}, "rows": {"tp": 2, "fsdp": 4}}`` gives each
            tensor-parallel rank half of the rows, and each of its FSDP ranks a quarter of that.
        shape: [E, R, C] of the whole weight. Gate and up, which tensor parallelism cuts separately,
            are two weights.
        name: name of the weight, for errors.

    Raises:
        ConfigError: unknown format or dimension, or a mesh axis that appears twice or has no rank.
        LayoutError: unsupported shape, parts of unequal size, or a byte that would span ranks.
    """
    known = find_format(format)
    check = known.check_shape if known else check_stack
    experts, rows, cols = check(shape, name)
    sizes: dict[Dimension, int] = dict(zip(DIMENSIONS, (experts, rows, cols), strict=True))
    cuts = _cut(axes, sizes, name)
    buffers = [_buffer(*layout, sizes, cuts) for layout in _layouts(known)]
    for buffer in buffers:
        _check_bytes(buffer, known, cuts, name)
    expert_amax = _maxima("global_amax", (rows, cols), sizes, cuts)
    found: list[Maxima] = []
    if known is not None:
        blocks = {f"{way}_scale": known.block(way) for way in known.gathered_directions}
        found += [_maxima(scale, block, sizes, cuts) for scale, block in blocks.items()]
        if known.has_global_amax:
            found.append(expert_amax)
    return Partition(
        format=known,
        shape=(experts, rows, cols),
        axes=cuts,
        buffers=tuple(buffers),
        maxima=tuple(maxima for maxima in found if maxima.axes),
        expert_amax=expert_amax,
    )


def find_format(format: BlockScaledFormat | str) -> BlockScaledFormat | None:
    """Return ``format``, given by itself or by its name; None for ``bf16``.

    Raises:
        ConfigError: unknown name.
    """
    if isinstance(format, str):
        return None if format == "bf16" else get_format(format)
    return format


def _cut(
    axes: Mapping[Dimension, Mapping[str, int]], sizes: Mapping[Dimension, int], name: str
) -> tuple[MeshAxis, ...]:
    """Return the axes in the order in which they cut, each with the size of its parts."""
    unknown = [str(dimension) for dimension in axes if dimension not in DIMENSIONS]
    if unknown:
        raise ConfigError(
            f"{name}: axes: expected {', '.join(DIMENSIONS)}, got {', '.join(unknown)}. Name what "
            "each mesh axis cuts."
        )
    cuts: list[MeshAxis] = []
    for dimension in DIMENSIONS:
        size = sizes[dimension]
        for axis, parts in axes.get(dimension, {}).items():
            if any(cut.name == axis for cut in cuts) or parts < 1:
                raise ConfigError(
                    f"{name}: axes: expected each mesh axis once, with one rank or more, got "
                    f"{axis}: {parts} for {dimension}. Flatten axes that cut two dimensions into "
                    "two, and leave out what does not cut the weight."
                )
            if size % parts:
                raise LayoutError(
                    f"{name}: expected equal parts, got {size} {dimension} for the {parts} ranks "
                    f"of {axis}. Cut by a divisor of {size}, or cut another dimension."
                )
            size //= parts
            cuts.append(MeshAxis(name=axis, dimension=dimension, parts=parts, size=size))
    return tuple(cuts)


def _layouts(
    format: BlockScaledFormat | None,
) -> Iterator[tuple[str, tuple[Dimension, ...], tuple[int, ...]]]:
    """Yield name, dimensions and elements per entry of each buffer of a weight."""
    if format is None:
        yield "data", DIMENSIONS, (1, 1, 1)
        return
    transposed: tuple[Dimension, ...] = ("experts", "columns", "rows")
    for direction in format.directions:
        dimensions = transposed if format.transposes(direction) else DIMENSIONS
        yield f"{direction}_data", dimensions, (1, 1, format.elements_per_byte)
    for direction in format.directions:
        height, width = format.block(direction)
        if format.is_2d and direction == "columnwise":  # the transpose of the rowwise scales
            yield f"{direction}_scale", transposed, (1, width, height)
        else:
            yield f"{direction}_scale", DIMENSIONS, (1, height, width)
    if format.has_global_amax:
        yield "global_amax", ("experts",), (1,)


def _buffer(
    name: str,
    dimensions: tuple[Dimension, ...],
    units: tuple[int, ...],
    sizes: Mapping[Dimension, int],
    cuts: Sequence[MeshAxis],
) -> BufferPartition:
    runs = {**sizes, **dict(zip(dimensions, units, strict=True))}
    overlaps = [cut for cut in cuts if cut.cuts_blocks(runs[cut.dimension])]
    clean = [cut for cut in cuts if cut not in overlaps]
    return BufferPartition(
        name=name,
        shape=tuple(-(-sizes[dimension] // runs[dimension]) for dimension in dimensions),
        dimensions=dimensions,
        units=units,
        cut_by=tuple(_names(clean, dimension) for dimension in dimensions),
        overlaps=tuple(cut.name for cut in overlaps),
    )


def _check_bytes(
    buffer: BufferPartition,
    format: BlockScaledFormat | None,
    cuts: Sequence[MeshAxis],
    name: str,
) -> None:
    """Raise if a data byte would span ranks, which no exchange can fix."""
    if format is None or not buffer.name.endswith("_data") or not buffer.overlaps:
        return
    axis = next(cut for cut in cuts if cut.name == buffer.overlaps[0])
    packed = format.elements_per_byte
    raise LayoutError(
        f"{name}: {format.name} packs {packed} {axis.dimension} into one byte of {buffer.name}, "
        f"expected parts of a multiple of {packed}, got {axis.size} {axis.dimension} for each of "
        f"the {axis.parts} ranks of {axis.name}. Cut into fewer parts, or cut another dimension."
    )


def _maxima(
    name: str,
    block: tuple[int, int],
    sizes: Mapping[Dimension, int],
    cuts: Sequence[MeshAxis],
) -> Maxima:
    length: dict[Dimension, int] = {"experts": 1, "rows": block[0], "columns": block[1]}
    shared = [cut for cut in cuts if cut.cuts_blocks(length[cut.dimension])]
    whole = [cut for cut in cuts if cut not in shared]  # precede shared ones in each dimension
    return Maxima(
        name=name,
        block=block,
        axes=tuple(cut.name for cut in shared),
        extent=(
            sizes["rows"] // _count(whole, "rows"),
            sizes["columns"] // _count(whole, "columns"),
        ),
    )


def _names(cuts: Sequence[MeshAxis], dimension: Dimension) -> tuple[str, ...]:
    return tuple(cut.name for cut in cuts if cut.dimension == dimension)


def _count(cuts: Sequence[MeshAxis], dimension: Dimension) -> int:
    return prod(cut.parts for cut in cuts if cut.dimension == dimension)


def _spell(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in values.items()) or "nothing"
