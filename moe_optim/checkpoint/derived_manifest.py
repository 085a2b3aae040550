"""Derives manifests for flat states saved without one, as stock Megatron saves them.

Megatron fills a buffer with parameters in reverse registration order, aligns each to 64 elements,
and cuts the buffer into buckets. A checkpoint records bucket sizes and piece boundaries, but not
the registration order of experts: every order that Megatron uses is tried, and those that fit all
sizes are kept. No device, no group.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from moe_optim.checkpoint.files.reader import FLAT_STATES
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.state_manifest import (
    BucketPlaces,
    BufferPlaces,
    ParameterPlace,
    StateManifest,
)
from moe_optim.formats import round_up

_ALIGNMENT = 64  # elements
_QUANTIZED = "torch.uint8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of a model chunk, before layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Logical dtype, such as ``torch.bfloat16``, also of quantized weights."""
    is_quantized: bool = False
    begins_bucket: bool = False
    """Whether it has its own bucket, like embeddings shared by two pipeline stages."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBucket:
    """A bucket as described by a checkpoint."""

    numel: int
    """Elements without trailing padding."""
    padded: int | None = None
    """Elements with trailing padding, a multiple of the data-parallel size. None: unknown."""
    edges: frozenset[int] | None = None
    """Boundaries of stored pieces: parameters and rank shards. None: unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBuffer:
    """A buffer as described by a checkpoint."""

    dtype: str
    """Parameter and gradient dtypes as in its keys: ``(torch.bfloat16, torch.float32)``."""
    buckets: tuple[StoredBucket, ...]

    @property
    def param_dtype(self) -> str:
        """Parameter dtype; ``torch.uint8`` for quantized weights."""
        return self.dtype.strip("()").partition(",")[0]

    @property
    def is_quantized(self) -> bool:
        """Whether weights only approximate their masters."""
        return self.param_dtype == _QUANTIZED

    @property
    def numel(self) -> int:
        """Total elements of all buckets."""
        return sum(bucket.numel for bucket in self.buckets)


Chunks = Sequence[Sequence[Parameter]]
"""Parameters of one optimizer by model chunk, in registration order."""


def derive_manifests(
    chunks: Chunks,
    stored: Sequence[StoredBuffer],
    glu_interleave: int | None,
    *,
    bucket_sizes: Iterable[int | None] = (),
) -> list[StateManifest]:
    """Return every manifest that fits the ``stored`` sizes, without duplicates.

    ``bucket_sizes`` are candidate bucket sizes in elements (None: one bucket), for buffers stored
    as one bucket without padding in between.
    """
    orders = list(_orders(chunks))
    laid_out = [_lay_out(order, stored) for order in orders if not bucket_sizes]
    laid_out += [_lay_out_whole(order, stored, size) for size in bucket_sizes for order in orders]
    found: list[StateManifest] = []
    for buffers in laid_out:
        if buffers is None:
            continue
        manifest = StateManifest(buffers=buffers, glu_interleave=glu_interleave, versions={})
        if all(manifest.addresses() != other.addresses() for other in found):
            found.append(manifest)
    return found


_ExpertTensor = tuple[str, str, int]
"""Linear, kind and expert index of a tensor."""
_ARRANGEMENTS: tuple[tuple[str, Callable[[_ExpertTensor], tuple[object, ...]]], ...] = (
    # SequentialMLP: by expert
    ("local_experts.{2}.{0}.{1}", lambda one: (one[2], one[0], one[1] == "bias")),
    # one parameter per expert, all weights of a linear before its biases
    ("{0}.{1}{2}", lambda one: (one[0], one[1] == "bias", one[2])),
    # Transformer Engine: one parameter per expert, each weight before its bias
    ("{0}.{1}{2}", lambda one: (one[0], one[2], one[1] == "bias")),
    # one parameter for all experts of a linear
    ("{0}.{1}", lambda one: (one[0], one[1] == "bias")),
)
"""Names and in-layer order of expert tensors, for each of Megatron's expert layouts."""


def _orders(chunks: Chunks) -> Iterator[list[list[Parameter]]]:
    for name, place in _ARRANGEMENTS:
        yield [_rearranged(chunk, name, place) for chunk in chunks]


def _rearranged(
    chunk: Sequence[Parameter], name: str, place: Callable[[_ExpertTensor], tuple[object, ...]]
) -> list[Parameter]:
    """Rearrange the experts of each layer, at the position of the layer's first expert."""
    arranged: list[Parameter | str] = []
    layers: dict[str, dict[_ExpertTensor, Parameter]] = {}
    for parameter in chunk:
        pieces = ParameterPlace(name=parameter.name, shape=parameter.shape, start=0).pieces()
        name_of_all, expert = pieces[0][0].parameter, pieces[0][0].expert
        if expert is None:
            arranged.append(parameter)
            continue
        prefix, experts, tail = name_of_all.rpartition("experts.")
        if prefix + experts not in layers:
            layers[prefix + experts] = {}
            arranged.append(prefix + experts)
        linear, kind = tail.split(".")
        holds_all = parameter.name == name_of_all
        one = replace(parameter, shape=parameter.shape[1:]) if holds_all else parameter
        for address, _ in pieces:
            layers[prefix + experts][linear, kind, address.expert or 0] = one
    order: list[Parameter] = []
    for of_layer in arranged:
        if isinstance(of_layer, Parameter):
            order.append(of_layer)
            continue
        tensors = layers[of_layer]
        count = 1 + max(expert for _, _, expert in tensors)
        for tensor in sorted(tensors, key=place):
            one = replace(tensors[tensor], name=of_layer + name.format(*tensor))
            if "{2}" in name:
                order.append(one)
            elif tensor[2] == 0:
                order.append(replace(one, shape=(count, *one.shape)))
    return order


def _by_buffer(order: Chunks, *, is_quantized: bool) -> list[tuple[str, list[Parameter]]]:
    """Return storage dtype and parameters of each buffer; quantized weights have their own."""
    groups: list[tuple[str, list[Parameter]]] = []
    for chunk in order:
        by_dtype: dict[str, list[Parameter]] = {}
        for parameter in chunk:
            apart = is_quantized and parameter.is_quantized
            by_dtype.setdefault(_QUANTIZED if apart else parameter.dtype, []).append(parameter)
        groups += [(dtype, group[::-1]) for dtype, group in by_dtype.items()]
    return groups


def _lay_out(order: Chunks, stored: Sequence[StoredBuffer]) -> tuple[BufferPlaces, ...] | None:
    """Return the places of all parameters, None if they do not fit the stored buffers."""
    groups = _by_buffer(order, is_quantized=any(buffer.is_quantized for buffer in stored))
    if [dtype for dtype, _ in groups] != [buffer.param_dtype for buffer in stored]:
        return None
    laid_out = []
    for buffer, (_, group) in zip(stored, groups, strict=True):
        buckets = _fill(group, buffer.buckets)
        if buckets is None:
            return None
        laid_out.append(BufferPlaces(dtype=buffer.dtype, buckets=buckets))
    return tuple(laid_out)


def _lay_out_whole(
    order: Chunks, stored: Sequence[StoredBuffer], bucket_size: int | None
) -> tuple[BufferPlaces, ...] | None:
    groups = _by_buffer(order, is_quantized=any(buffer.is_quantized for buffer in stored))
    if len(groups) != len(stored):
        return None
    cut = [
        replace(one, buckets=tuple(StoredBucket(numel=n) for n in _sizes(group, bucket_size)))
        for one, (_, group) in zip(stored, groups, strict=True)
    ]
    buffers = _lay_out(order, cut)
    if buffers is None or [one.numel for one in cut] != [one.numel for one in stored]:
        return None
    return tuple(buffer.joined() for buffer in buffers)


def _fill(
    group: Sequence[Parameter], buckets: Sequence[StoredBucket]
) -> tuple[BucketPlaces, ...] | None:
    """Lay parameters into buckets that they must fill exactly; None if they do not."""
    filled: list[BucketPlaces] = []
    places: list[ParameterPlace] = []
    end = 0
    for parameter in group:
        if len(filled) == len(buckets):
            return None
        bucket = buckets[len(filled)]
        start = _aligned(end)
        end = start + parameter.numel
        if end > bucket.numel or not {start, end} <= (bucket.edges or {start, end}):
            return None
        places.append(ParameterPlace(name=parameter.name, shape=parameter.shape, start=start))
        if bucket.numel in (end, _aligned(end)):  # aligned if the next one begins a bucket
            if not _is_cut_by_ranks(bucket, places):
                return None
            filled.append(BucketPlaces(numel=bucket.numel, parameters=tuple(places)))
            places, end = [], 0
    return tuple(filled) if len(filled) == len(buckets) and not places else None


def _is_cut_by_ranks(bucket: StoredBucket, places: Sequence[ParameterPlace]) -> bool:
    """Return whether all edges within parameters can be boundaries of equal shards."""
    edges = bucket.edges or frozenset()
    inside = edges - {edge for place in places for edge in (place.start, place.start + place.numel)}
    inside -= {bucket.numel}
    if not inside or bucket.padded is None:
        return True
    shards = [  # the first cut has the length of a shard
        edge
        for edge in edges
        if edge and bucket.padded % edge == 0 and bucket.numel // edge <= len(edges)
    ]
    return any(inside <= set(range(size, bucket.numel, size)) <= edges for size in shards)


def _sizes(group: Sequence[Parameter], bucket_size: int | None) -> list[int]:
    """Return Megatron's bucket sizes in elements, without trailing padding."""
    sizes: list[int] = []
    end = 0
    for parameter in group:
        if parameter.begins_bucket and end:
            sizes.append(_aligned(end))
            end = 0
        end = _aligned(end) + parameter.numel
        if parameter.begins_bucket or (bucket_size is not None and end >= bucket_size):
            sizes.append(end)
            end = 0
    return [*sizes, end] if end else sizes


def _aligned(element: int) -> int:
    return round_up(element, _ALIGNMENT)


# Buffers of flat states in ``.metadata``

_MASTER = r"(\d+)\.dtype_(\(.*\))\.bucket_idx_(\d+)\.param"


def read_buffers(stored: TorchDistReader, group: str) -> list[StoredBuffer]:
    """Return the buffers of a data-parallel group, empty if the checkpoint has none."""
    padded = _padded_sizes(stored, group)
    found: dict[int, tuple[str, dict[int, StoredBucket]]] = {}
    for key, match in _masters(stored, group):
        buffer, bucket = int(match[1]), int(match[3])
        _, buckets = found.setdefault(buffer, (match[2], {}))
        buckets[bucket] = StoredBucket(
            numel=stored.tensors[key].shape[0],
            padded=padded.get((buffer, bucket)),
            edges=frozenset(
                edge
                for blob in stored.blobs[key]
                for edge in (blob.corner[0], blob.corner[0] + blob.shape[0])
            ),
        )
    return [
        StoredBuffer(dtype=dtype, buckets=tuple(bucket for _, bucket in sorted(buckets.items())))
        for _, (dtype, buckets) in sorted(found.items())
    ]


def _masters(stored: TorchDistReader, group: str) -> list[tuple[str, re.Match[str]]]:
    pattern = re.compile(re.escape(group + FLAT_STATES) + _MASTER)
    flat = (key for key, info in stored.tensors.items() if len(info.shape) == 1)
    found = ((key, pattern.fullmatch(key)) for key in flat)
    return [(key, match) for key, match in found if match is not None]


def _padded_sizes(stored: TorchDistReader, group: str) -> dict[tuple[int, int], int]:
    """Return the padded elements of each (buffer, bucket), if saved."""
    names = [key for key in stored.objects if key.startswith(f"{group}.per_bucket_numel/")]
    try:
        return {
            (buffer, bucket): int(numel)
            for name in names
            for buffer, by_dtype in enumerate(stored.read_object(name))
            for numels in by_dtype.values()
            for bucket, numel in enumerate(numels)
        }
    except (AttributeError, TypeError, ValueError):
        return {}  # not Megatron's format


def lower_bits_of_masters(stored: TorchDistReader, group: str) -> str | None:
    """Return a key of a group that stores only the lower bits of masters, None for whole masters.

    ``--use-precision-aware-optimizer`` stores these beside the weights.
    """
    keys = (key for key, _ in _masters(stored, group))
    return next((key for key in keys if not stored.tensors[key].dtype.is_floating_point), None)
