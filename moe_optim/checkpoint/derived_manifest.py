"""Manifests for flat states that were saved without one, as stock Megatron saves them.

Megatron fills a buffer with parameters in the reverse of the order in which modules register them,
each from the next multiple of 64 elements on, and cuts the buffer into buckets. The sizes of the
buckets are saved, and where each stored piece begins and ends. Which order the experts were
registered in is not: every one that Megatron has is tried, and what fits all numbers is kept. Pure:
no device, no group.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from moe_optim.checkpoint.state_manifest import (
    BucketPlaces,
    BufferPlaces,
    ParameterPlace,
    StateManifest,
)
from moe_optim.formats import round_up

_ALIGNMENT = 64  # elements
_QUANTIZED = "torch.uint8"
_LINEARS = ("linear_fc1", "linear_fc2")
_KINDS = ("weight", "bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of a model chunk, before it has a place."""

    name: str
    """As manifests have it."""
    shape: tuple[int, ...]
    dtype: str
    """``torch.bfloat16``, also of what is stored quantized."""
    is_quantized: bool = False
    begins_bucket: bool = False
    """Whether it has a bucket of its own, as embeddings that two pipeline stages share."""

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBucket:
    """What a checkpoint tells of a bucket."""

    numel: int
    """Without the padding at its end."""
    padded: int | None = None
    """Elements with that padding, a multiple of the ranks that shared them. None: not known."""
    edges: frozenset[int] | None = None
    """Where stored pieces begin and end: at parameters, and where another rank's shard begins.
    None: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBuffer:
    """What a checkpoint tells of a buffer."""

    dtype: str
    """As in its keys: ``(torch.bfloat16, torch.float32)``, of parameters and gradients."""
    buckets: tuple[StoredBucket, ...]

    @property
    def param_dtype(self) -> str:
        """``torch.uint8`` where its weights are quantized."""
        return self.dtype.strip("()").partition(",")[0]

    @property
    def is_quantized(self) -> bool:
        """Whether weights are no more than close to their masters."""
        return self.param_dtype == _QUANTIZED

    @property
    def numel(self) -> int:
        """Elements of all buckets."""
        return sum(bucket.numel for bucket in self.buckets)


Chunks = Sequence[Sequence[Parameter]]
"""Parameters of one optimizer by model chunk, in the order in which modules register them."""


def derive_manifests(
    chunks: Chunks, stored: Sequence[StoredBuffer], glu_interleave: int | None
) -> list[StateManifest]:
    """Return every manifest that flat states can have had, those with the same places once.

    ``chunks`` are of the model that loads them, all else is of the checkpoint.
    """
    laid_out = (_lay_out(order, stored) for order in _orders(chunks))
    return _distinct(laid_out, glu_interleave)


def derive_coalesced_manifests(
    chunks: Chunks,
    stored: Sequence[StoredBuffer],
    bucket_sizes: Iterable[int | None],
    glu_interleave: int | None,
) -> list[StateManifest]:
    """Do the same for buffers whose buckets were stored as one, without the padding between them.

    ``bucket_sizes`` are elements at which Megatron may have closed buckets; None: at the end alone.
    """
    laid_out = (
        _lay_out_coalesced(order, stored, size)
        for size in bucket_sizes
        for order in _orders(chunks)
    )
    return _distinct(laid_out, glu_interleave)


def _distinct(
    laid_out: Iterable[tuple[BufferPlaces, ...] | None], glu_interleave: int | None
) -> list[StateManifest]:
    found: list[StateManifest] = []
    for buffers in laid_out:
        if buffers is None:
            continue
        manifest = StateManifest(buffers=buffers, glu_interleave=glu_interleave, versions={})
        if all(manifest.addresses() != other.addresses() for other in found):
            found.append(manifest)
    return found


def _orders(chunks: Chunks) -> Iterator[list[list[Parameter]]]:
    """Yield the parameters as a model would have them in each of Megatron's expert layouts."""
    for arrange in (_expert_by_expert, _indexed, _indexed_beside_biases, _grouped):
        yield [_rearranged(chunk, arrange) for chunk in chunks]


@dataclass(frozen=True, slots=True)
class _Experts:
    """The experts of one layer: linear and kind -> one expert's tensors, by number."""

    prefix: str
    """Such as ``decoder.layers.0.mlp.experts.``."""
    tensors: dict[tuple[str, str], dict[int, Parameter]]

    def named(self, linear: str, kind: str, name: str, expert: int) -> Parameter:
        return replace(self.tensors[linear, kind][expert], name=f"{self.prefix}{name}")

    def tails(self) -> list[tuple[str, str]]:
        """Return linears and kinds, in the order of a forward pass."""
        tails = [(linear, kind) for linear in _LINEARS for kind in _KINDS]
        return [tail for tail in tails if tail in self.tensors]

    @property
    def count(self) -> int:
        return len(next(iter(self.tensors.values())))


def _expert_by_expert(experts: _Experts) -> Iterator[Parameter]:
    """Yield the parameters of ``SequentialMLP``."""
    for expert in range(experts.count):
        for linear, kind in experts.tails():
            yield experts.named(linear, kind, f"local_experts.{expert}.{linear}.{kind}", expert)


def _indexed(experts: _Experts) -> Iterator[Parameter]:
    """Yield one parameter an expert, all weights of a linear before its biases."""
    for linear, kind in experts.tails():
        for expert in range(experts.count):
            yield experts.named(linear, kind, f"{linear}.{kind}{expert}", expert)


def _indexed_beside_biases(experts: _Experts) -> Iterator[Parameter]:
    """Yield one parameter an expert, each weight before its bias, as Transformer Engine has it."""
    for linear in _LINEARS:
        for expert in range(experts.count):
            for kind in (kind for of_linear, kind in experts.tails() if of_linear == linear):
                yield experts.named(linear, kind, f"{linear}.{kind}{expert}", expert)


def _grouped(experts: _Experts) -> Iterator[Parameter]:
    """Yield one parameter for all experts of a linear."""
    for linear, kind in experts.tails():
        one = experts.named(linear, kind, f"{linear}.{kind}", 0)
        yield replace(one, shape=(experts.count, *one.shape))


def _rearranged(
    chunk: Sequence[Parameter], arrange: Callable[[_Experts], Iterator[Parameter]]
) -> list[Parameter]:
    """Return ``chunk`` with the experts of each layer, where the first of them is, arranged."""
    arranged: list[Parameter | _Experts] = []
    layers: dict[str, _Experts] = {}
    for parameter in chunk:
        pieces = ParameterPlace(name=parameter.name, shape=parameter.shape, start=0).pieces()
        prefix, _, tail = pieces[0].address.parameter.rpartition("experts.")
        if pieces[0].address.expert is None:
            arranged.append(parameter)
            continue
        if prefix not in layers:
            layers[prefix] = _Experts(f"{prefix}experts.", {})
            arranged.append(layers[prefix])
        linear, kind = tail.split(".")
        holds_all = parameter.name == pieces[0].address.parameter
        shape = parameter.shape[1:] if holds_all else parameter.shape
        of_tail = layers[prefix].tensors.setdefault((linear, kind), {})
        for piece in pieces:
            assert piece.address.expert is not None, "experts of a parameter are numbered"
            of_tail[piece.address.expert] = replace(parameter, shape=shape)
    return [
        parameter
        for one in arranged
        for parameter in (arrange(one) if isinstance(one, _Experts) else [one])
    ]


def _by_buffer(order: Chunks, *, is_quantized: bool) -> list[tuple[str, list[Parameter]]]:
    """Return storage dtype and parameters of each buffer; weights that are quantized lie apart."""
    groups: list[tuple[str, list[Parameter]]] = []
    for chunk in order:
        by_dtype: dict[str, list[Parameter]] = {}
        for parameter in chunk:
            apart = is_quantized and parameter.is_quantized
            by_dtype.setdefault(_QUANTIZED if apart else parameter.dtype, []).append(parameter)
        groups += [(dtype, group[::-1]) for dtype, group in by_dtype.items()]
    return groups


def _lay_out(order: Chunks, stored: Sequence[StoredBuffer]) -> tuple[BufferPlaces, ...] | None:
    """Return the places of all parameters; None if they do not fit what is stored."""
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


def _lay_out_coalesced(
    order: Chunks, stored: Sequence[StoredBuffer], bucket_size: int | None
) -> tuple[BufferPlaces, ...] | None:
    """Return places in whole buffers, cut as Megatron cuts them; None if they do not fit."""
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
    return tuple(map(_coalesced, buffers))


def _coalesced(buffer: BufferPlaces) -> BufferPlaces:
    """Return one bucket of all buckets of a buffer."""
    places, start = [], 0
    for bucket in buffer.buckets:
        places += [replace(place, start=start + place.start) for place in bucket.parameters]
        start += bucket.numel
    return replace(buffer, buckets=(BucketPlaces(numel=start, parameters=tuple(places)),))


def _fill(
    group: Sequence[Parameter], buckets: Sequence[StoredBucket]
) -> tuple[BucketPlaces, ...] | None:
    """Lay parameters into buckets that they fill exactly; None if they do not."""
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
        if bucket.numel in (end, _aligned(end)):  # aligned: before one that begins a bucket
            if not _is_cut_by_ranks(bucket, places):
                return None
            filled.append(BucketPlaces(numel=bucket.numel, parameters=tuple(places)))
            places, end = [], 0
    return tuple(filled) if len(filled) == len(buckets) and not places else None


def _is_cut_by_ranks(bucket: StoredBucket, places: Sequence[ParameterPlace]) -> bool:
    """Return whether all edges inside of parameters can be those of equal shards."""
    edges = bucket.edges or frozenset()
    inside = edges - {edge for place in places for edge in (place.start, place.start + place.numel)}
    inside -= {bucket.numel}
    if not inside or bucket.padded is None:
        return True
    shards = [  # the first cut is as long as a shard
        edge
        for edge in edges
        if edge and bucket.padded % edge == 0 and bucket.numel // edge <= len(edges)
    ]
    return any(inside <= set(range(size, bucket.numel, size)) <= edges for size in shards)


def _sizes(group: Sequence[Parameter], bucket_size: int | None) -> list[int]:
    """Return the elements of the buckets that Megatron cuts, without the padding at their ends."""
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
