"""Keys of optimizer states in a checkpoint, and manifests of those that lie bucket by bucket.

Megatron saves masters and moments bucket by bucket, or by parameter name. Two expert layouts fill
buckets of equal size with the same experts in different order, which sizes cannot distinguish: a
manifest has the location of each expert. Pure: no device, no group.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from moe_optim.checkpoint.files.reader import FLAT_STATES
from moe_optim.errors import LayoutError, listed

MOMENTUM = "momentum_buffer"
"""Name of Muon's state, as in emerging-optimizers."""
MASTER, WHOLE_MASTER = MASTERS = ("param", "fp32_param")
"""Names of masters: in distributed optimizers, and in all others of Megatron."""
SHARDING_TYPE, BY_NAME = "distrib_optim_sharding_type", "fully_reshardable"
"""Key of the sharding type in Megatron's metadata, and its value for states by name."""
BY_NAME_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>[^.]+)\.(?P<name>.+)")
"""Form of the keys of states by parameter name, of one optimizer or of a chain."""
_FLAT = re.compile(rf".*{re.escape(FLAT_STATES)}\d+\..*\.bucket_idx_\d+\.(?P<kind>[^.]+)")

MANIFEST = "moe_optim_manifest"
"""Key of manifests in states, and part of the keys they are saved under."""
VERSION = 1
_MAX_NUMEL = 2**62
_MAX_AXES = 16
_MAX_PIECES = 2**20  # parameters, counted per expert; above any real model

_EXPERTS = re.compile(
    r"(?P<experts>(?:.+\.)?experts\.)"
    r"(?:local_experts\.(?P<local>[0-9]{1,9})\.)?"
    r"(?P<linear>linear_fc[12]\.)(?P<kind>weight|bias)(?P<index>[0-9]{1,9})?"
)
_DIMENSIONS = {"weight": 2, "bias": 1}  # of one expert


def state_kinds(keys: Iterable[str]) -> set[str]:
    """Return the kinds of states among the keys of a checkpoint, such as ``exp_avg``."""
    found = [_FLAT.fullmatch(key) or BY_NAME_KEY.fullmatch(key) for key in keys]
    return {match["kind"] for match in found if match is not None}


def require_same_optimizer(
    kinds: Collection[str], where: str, *, is_muon: bool, has_matrices: bool
) -> None:
    """Raise LayoutError for states of Adam in a run with Muon, and for those of Muon without it.

    Args:
        kinds: kinds of the saved states; none if no optimizer was saved.
        where: source in error messages.
        is_muon: whether this is a run with Muon.
        has_matrices: whether Muon steps any parameter of this rank. Where all matrices are frozen,
            a run with Muon has the states of Adam alone.
    """
    if not kinds or is_muon == (MOMENTUM in kinds) or (is_muon and not has_matrices):
        return
    wanted, got = "Muon's", "Adam's alone"
    if not is_muon:
        wanted, got = "Adam's", "Muon's"
    raise LayoutError(
        f"{where}: expected {wanted} optimizer states, got {got} ({', '.join(sorted(kinds))}): one "
        "optimizer cannot continue from states of the other. Give the --optimizer that the "
        "checkpoint was saved with, or load only the weights (--no-load-optim)."
    )


def flat_groups(keys: Iterable[str]) -> list[str]:
    """Return the prefix of each data-parallel group of flat states among keys, sorted."""
    return sorted({key.partition(FLAT_STATES)[0] for key in keys if FLAT_STATES in key})


def bucket_key(group: str, dtype: str, buffer: int, bucket: int) -> str:
    """Return the key prefix of a bucket's states; the kind of state follows a dot."""
    return f"{group}{FLAT_STATES}{buffer}.dtype_{dtype}.bucket_idx_{bucket}"


@dataclass(frozen=True, order=True, slots=True)
class Address:
    """Layout-independent name of a tensor: an expert's, or another parameter's."""

    parameter: str
    """Parameter name; ``decoder.layers.0.mlp.experts.linear_fc1.weight`` for an expert."""
    expert: int | None = None
    """Rank-local expert index; None for other parameters."""

    def __str__(self) -> str:
        return (
            self.parameter if self.expert is None else f"{self.parameter} of expert {self.expert}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterPlace:
    """A parameter in a bucket."""

    name: str
    """Name in the model, without wrappers."""
    shape: tuple[int, ...]
    start: int
    """First element within the bucket."""

    @property
    def numel(self) -> int:
        """Logical elements."""
        return prod(self.shape)

    @property
    def num_stacked(self) -> int | None:
        """Number of stacked experts; None for a single expert or another parameter."""
        match = _EXPERTS.fullmatch(self.name)
        if match is None or match["local"] or match["index"]:
            return None
        return self.shape[0] if len(self.shape) > _DIMENSIONS[match["kind"]] else None

    def pieces(self) -> list[tuple[Address, int]]:
        """Return address and elements of each of its experts in order, or of itself."""
        match, count = _EXPERTS.fullmatch(self.name), self.num_stacked
        number = None if match is None else match["local"] or match["index"]
        if match is None or (number is None and count is None):
            return [(Address(self.name), self.numel)]
        parameter = f"{match['experts']}{match['linear']}{match['kind']}"
        if number is not None:
            return [(Address(parameter, int(number)), self.numel)]
        return [
            (Address(parameter, one), self.numel // self.shape[0]) for one in range(self.shape[0])
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPlaces:
    """A bucket as saved, without trailing padding."""

    numel: int
    parameters: tuple[ParameterPlace, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPlaces:
    """A buffer."""

    dtype: str
    """Buffer dtypes as in Megatron's keys."""
    buckets: tuple[BucketPlaces, ...]

    def joined(self) -> "BufferPlaces":
        """Return the buffer as one bucket, in which its buckets follow each other."""
        places, start = [], 0
        for bucket in self.buckets:
            places += [replace(place, start=start + place.start) for place in bucket.parameters]
            start += bucket.numel
        return replace(self, buckets=(BucketPlaces(numel=start, parameters=tuple(places)),))


@dataclass(frozen=True, slots=True)
class BucketSpan:
    """Consecutive elements of a bucket."""

    buffer: int
    bucket: int
    start: int
    numel: int

    @property
    def end(self) -> int:
        """End of the span, exclusive."""
        return self.start + self.numel

    def ends_at(self, other: "BucketSpan") -> bool:
        """Return whether ``other`` follows without a gap."""
        return (self.buffer, self.bucket, self.end) == (other.buffer, other.bucket, other.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateManifest:
    """Places of all parameters in one optimizer's states, for one data-parallel group."""

    buffers: tuple[BufferPlaces, ...]
    glu_interleave: int | None
    """Rows per alternating gate and up block in fc1; None: all gate rows come first."""
    versions: dict[str, str]
    """Versions of the packages that wrote it."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, numbers and strings."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, saved: Any, where: str) -> "StateManifest":
        """Parse the result of :meth:`to_dict`; LayoutError for invalid data or a later version."""
        try:
            version = saved["version"]
            buffers = tuple(map(_buffer_from, saved["buffers"]))
            interleave = saved["glu_interleave"]
            interleave = None if interleave is None else _count(interleave)
            versions = dict(saved["versions"])
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(
                f"{where}: expected a manifest of optimizer states, got something else "
                f"({error!r}). The checkpoint is damaged; load another one."
            ) from error
        if version != VERSION:
            got = version if isinstance(version, int) else "another"
            raise LayoutError(
                f"{where}: expected a manifest of version {VERSION}, got {got}. Load the "
                "checkpoint with the moe_optim that wrote it, and save it fully reshardable "
                "(--dist-ckpt-optim-fully-reshardable)."
            )
        manifest = cls(buffers=buffers, glu_interleave=interleave, versions=versions)
        pieces = sum([place.num_stacked or 1 for _, _, place in manifest.places()])
        if pieces > _MAX_PIECES:
            raise LayoutError(
                f"{where}: expected a manifest of at most {_MAX_PIECES:,} parameters and experts, "
                f"got one of {pieces:,}. The checkpoint is damaged; load another one."
            )
        return manifest

    def joined(self) -> "StateManifest":
        """Return the manifest of the same states with one bucket per buffer."""
        return replace(self, buffers=tuple(buffer.joined() for buffer in self.buffers))

    def holds_several_experts(self) -> bool:
        """Return whether any parameters have an ambiguous order."""
        return any(address.expert not in (None, 0) for address in self.addresses())

    def places(self) -> Iterator[tuple[int, int, ParameterPlace]]:
        """Yield buffer, bucket and place of every parameter."""
        for buffer_id, buffer in enumerate(self.buffers):
            for bucket_id, bucket in enumerate(buffer.buckets):
                for place in bucket.parameters:
                    yield buffer_id, bucket_id, place

    def addresses(self) -> dict[Address, BucketSpan]:
        """Return the span of each address; LayoutError for duplicates."""
        found: dict[Address, BucketSpan] = {}
        for buffer_id, bucket_id, place in self.places():
            start = place.start
            for address, numel in place.pieces():
                if address in found:
                    raise LayoutError(
                        f"{address}: expected one place in the optimizer state, got two: the "
                        "parameters of the model have ambiguous names. Rename one of them."
                    )
                found[address] = BucketSpan(buffer_id, bucket_id, start, numel)
                start += numel
        return found


def _buffer_from(saved: dict[str, Any]) -> BufferPlaces:
    buckets = []
    for bucket in saved["buckets"]:
        numel, places = _count(bucket["numel"]), []
        for place in bucket["parameters"]:
            name, shape, start = _text(place["name"]), place["shape"], _count(place["start"])
            if len(shape) > _MAX_AXES:
                raise ValueError(f"expected at most {_MAX_AXES} axes, got {len(shape)}")
            one = ParameterPlace(name=name, shape=tuple(map(_count, shape)), start=start)
            if start + one.numel > numel:
                raise ValueError(f"{name[:200]!r} ends behind its bucket")
            places.append(one)
        buckets.append(BucketPlaces(numel=numel, parameters=tuple(places)))
    return BufferPlaces(dtype=_text(saved["dtype"]), buckets=tuple(buckets))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMEL:
        raise ValueError("expected a number of elements, got something else")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text, got something else")
    return value


def states_with_manifests(state: Any) -> Iterator[dict[Any, Any]]:
    """Yield every dict in a nested state that contains a manifest or a request for one."""
    if isinstance(state, dict) and MANIFEST in state:
        yield state
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, dict | list):
            yield from states_with_manifests(value)


class LayoutMap:
    """Maps elements of the target's parameters to spans of the source's buckets.

    ``source`` is the manifest of the checkpoint, ``target`` that of the loading model. LayoutError
    lists all parameters and experts that are missing, left over or of another size.
    """

    def __init__(self, source: StateManifest, target: StateManifest, where: str) -> None:
        self._source = source.addresses()
        wanted = target.addresses()
        found = {
            "missing": [str(address) for address in wanted if address not in self._source],
            "left over": [str(address) for address in self._source if address not in wanted],
            "of another size": [
                f"{address} has {span.numel} elements, expected {wanted[address].numel}"
                for address, span in self._source.items()
                if address in wanted and span.numel != wanted[address].numel
            ],
        }
        problems = [f"{what}: {listed(sorted(names))}" for what, names in found.items() if names]
        if problems:
            raise LayoutError(
                f"{where}: expected optimizer states of the parameters of this model, got others. "
                f"{'; '.join(problems)}. Load a checkpoint of the same model and the same tensor, "
                "pipeline and expert parallel sizes, or one that was saved fully reshardable "
                "(--dist-ckpt-optim-fully-reshardable)."
            )

    def spans(self, place: ParameterPlace, start: int, end: int) -> list[BucketSpan]:
        """Return the source spans of elements ``start`` to ``end`` of a target parameter."""
        spans: list[BucketSpan] = []
        before = 0
        for address, numel in place.pieces():
            first, last = max(start, before), min(end, before + numel)
            if first < last:
                at = self._source[address]
                span = BucketSpan(at.buffer, at.bucket, at.start + first - before, last - first)
                if spans and spans[-1].ends_at(span):
                    spans[-1] = replace(spans[-1], numel=spans[-1].numel + span.numel)
                else:
                    spans.append(span)
            before += numel
        return spans
