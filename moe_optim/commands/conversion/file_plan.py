"""A checkpoint to rewrite file by file; shared by all conversions."""

import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moe_optim.checkpoint.files.folders import TRACKER
from moe_optim.checkpoint.files.publishing import published
from moe_optim.checkpoint.files.reader import Recorded, TensorInfo
from moe_optim.checkpoint.files.torch_dist import COMMON_STATE, OWN_STATE, TorchDistReader
from moe_optim.checkpoint.sealing import record_checksums
from moe_optim.commands.console.checkpoint_paths import SUFFIX
from moe_optim.commands.console.workers import run_in_workers
from moe_optim.commands.conversion.layer_view import LayerView, Place
from moe_optim.commands.conversion.safetensors_files import Piece, notes_of, write_file, write_index
from moe_optim.commands.conversion.torch_dist_writer import Entry, TorchDistWriter
from moe_optim.experts.keys.conversion import convert_expert_set
from moe_optim.experts.keys.layouts import ExpertSet

PIECE_BYTES = 16 * 2**20
"""Size of a piece, unless one stored chunk, or one expert, is larger."""


def read_experts(view: LayerView, one: ExpertSet, experts: range) -> dict[str, Tensor]:
    """Return some experts of a set, by the keys of a set of these alone, numbered from 0."""
    if len(experts) == one.num_experts:
        return {key: view.read(key) for key in one.keys}
    return {
        key: view.read(one.prefix + pattern.key(), experts)
        if index is None
        else view.read(one.prefix + pattern.key(experts[index]))
        for pattern, index, key in replace(one, num_experts=len(experts)).entries()
    }


def convert_experts(
    tensors: Mapping[str, Tensor],
    experts: range,
    *,
    source: ExpertSet,
    target: ExpertSet,
    rows: tuple[int, int],
) -> dict[str, Tensor]:
    """Return some experts of ``source`` under the keys of ``target``.

    Args:
        tensors: result of :func:`read_experts`.
        experts: numbers of these experts.
        source: set of all experts.
        target: set of all experts in the result.
        rows: GLU interleave of both; 0 puts all gate rows first.
    """
    count = len(experts)
    found = convert_expert_set(
        tensors,
        replace(source, num_experts=count),
        target.layout,
        source_interleave=rows[0] or None,
        target_interleave=rows[1] or None,
    )
    keys = replace(target, prefix=source.prefix, num_experts=count).entries()
    return {
        target.prefix + pattern.key(None if index is None else experts[index]): found[key]
        for pattern, index, key in keys
    }


def ranges_of_experts(sides: Sequence[tuple[LayerView, ExpertSet]], nbytes: int) -> Iterator[range]:
    """Yield ranges of experts that can be read one after the other, on all ``sides``.

    ``nbytes`` is the size of the set.
    """
    count = sides[0][1].num_experts
    cuts: list[Sequence[int]] = [range(count + 1)]
    for view, one in sides:
        for pattern in one.patterns:
            if not pattern.is_per_expert:
                is_first = pattern.stored[0] == "E"  # else experts have no axis of their own
                cuts.append(view.cuts(one.prefix + pattern.key()) if is_first else (0, count))
    return _ranges(cuts, PIECE_BYTES * count // max(1, nbytes))


def ranges_of_rows(views: Iterable[LayerView], key: str, nbytes: int) -> Iterator[range | None]:
    """Yield ranges on the first axis of a tensor of all ``views``; None for one without any."""
    views = list(views)
    shape = views[0].tensors[key].shape
    if not shape or 0 in shape:
        return iter((None,))
    return _ranges([view.cuts(key) for view in views], PIECE_BYTES * shape[0] // max(1, nbytes))


def _ranges(cuts: Iterable[Sequence[int]], most: int) -> Iterator[range]:
    """Yield ranges between common cuts, of ``most`` indices unless a single one has more."""
    found, *others = sorted(cuts, key=len)
    for other in others:
        if other != found:
            kept = other if isinstance(other, range) else set(other)
            found = [cut for cut in found if cut in kept]
    at = 0
    while at < len(found) - 1:
        after = max(at + 1, bisect_right(found, found[at] + most) - 1)
        yield range(found[at], found[after])
        at = after


BLOB_BYTES = 4096
"""Upper bound of the overhead of ``torch.save`` per tensor."""
BytesDone = Callable[[int], None]
"""Progress callback; receives the bytes converted since its last call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Tensors that are converted together: one tensor, or the experts of a layer."""

    sources: tuple[str, ...]
    """Keys to read."""
    nbytes: int
    """Bytes converted, without headers."""
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    """Returns the result by name, given the tensors of ``sources``; None if they stay the same."""
    experts: ExpertSet | None = None
    """Stored experts of the part; None for any other tensor."""
    convert_experts: Callable[[dict[str, Tensor], range], dict[str, Tensor]] | None = None
    """Returns some experts by name, given those of the range, numbered from 0. A tensor of all
    experts has those of the range on its first axis."""
    targets: tuple[str, ...] = ()
    """Names in the result, or prefix of the experts there; empty if they stay the same."""


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """A checkpoint and the parts of each file that it becomes."""

    view: LayerView
    files: tuple[tuple[Part, ...], ...]
    """Parts of each file, in the order in which they are written."""
    left_out: tuple[str, ...] = ()
    """Keys of tensors and objects that the result omits."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts in order."""
        return tuple(part for file in self.files for part in file)

    @property
    def experts(self) -> tuple[Part, ...]:
        """Parts that contain the experts of a layer."""
        return tuple(part for part in self.parts if part.experts is not None)

    @property
    def others(self) -> tuple[Part, ...]:
        """All other parts."""
        return tuple(part for part in self.parts if part.experts is None)

    @property
    def sets(self) -> tuple[ExpertSet, ...]:
        """The stored experts of all parts."""
        return tuple(part.experts for part in self.parts if part.experts is not None)

    @property
    def num_written(self) -> int:
        """Number of tensors of the result."""
        return len(
            {
                self.place_of(part, name)[0].name
                for part in self.parts
                for name in self.tensors(part)
            }
        )

    @property
    def total_bytes(self) -> int:
        """Bytes converted, without headers."""
        return sum(part.nbytes for part in self.parts)

    @property
    def disk_bytes(self) -> int:
        """Upper bound of the bytes written, with headers."""
        chunks = sum(len(part.sources) for part in self.parts)
        chunks += sum(len(one.patterns) * one.num_experts for one in self.sets)
        stored = sum(map(len, self.stored.blobs.values())) if self.stored is not None else 0
        return self.total_bytes + BLOB_BYTES * (chunks + stored + 16)

    @property
    def stored(self) -> TorchDistReader | None:
        """Reader of a ``torch_dist`` source, from which bytes can be copied; else None."""
        reader = self.view.reader
        return reader if isinstance(reader, TorchDistReader) else None

    def write(self, target: Path, report: BytesDone = lambda _: None, *, workers: int = 1) -> None:
        """Execute the plan; ``target``, which must not exist, appears when everything is written.

        ``report`` receives the bytes converted since its last call. ``workers`` processes share the
        files; the bytes written are the same for any number. Raises as :func:`convert_checkpoint`,
        and ConfigError for a tokenizer's folder without a tokenizer.
        """
        texts = self._texts()
        needed = self.disk_bytes + sum(map(len, texts.values()))
        with one_thread(), published(target, needed_bytes=needed) as folder:
            self._write_tensors(folder, report, workers)
            for name, content in texts.items():
                (folder / name).write_bytes(content)

    def _texts(self) -> dict[str, bytes]:
        """Return the files beside the tensors, by name."""
        return {}

    def _write_tensors(self, folder: Path, report: BytesDone, workers: int) -> None:
        write_safetensors(self, folder, self._recorded, report, workers)

    @property
    def _recorded(self) -> Recorded:
        """Facts that safetensors record about the result."""
        return self.view.recorded

    def place_of(self, part: Part, name: str) -> tuple[Place, int]:
        """Return where a tensor ``name``, which a ``part`` becomes, is stored: under its own name.

        ``torch_dist`` may stack layers in one tensor; the second value is the number of these.
        """
        return Place(name), 0

    def tensors(self, part: Part) -> dict[str, TensorInfo]:
        """Return the tensors that a part becomes, by name; reads no values."""
        infos = {key: self.view.tensors[key] for key in part.sources}
        given = {
            key: torch.empty(info.shape, dtype=info.dtype, device="meta")
            for key, info in infos.items()
        }
        if part.experts is not None and part.convert_experts is not None:
            found = part.convert_experts(given, range(part.experts.num_experts))
        else:
            found = given if part.convert is None else part.convert(given)
        return {name: TensorInfo(tuple(one.shape), one.dtype) for name, one in found.items()}

    def pieces(self, part: Part) -> Iterator[Piece]:
        """Read a ``part`` and yield what it becomes, on the CPU.

        A piece has experts or rows, see :mod:`pieces`, or one whole tensor that is converted.
        """
        view = self.view
        if part.experts is not None and part.convert_experts is not None:
            whole = self.tensors(part)
            for experts in ranges_of_experts([(view, part.experts)], part.nbytes):
                found = part.convert_experts(read_experts(view, part.experts, experts), experts)
                for name, values in found.items():
                    is_part = values.shape != whole[name].shape  # of a tensor of all experts
                    yield Piece(name, whole[name], experts.start * is_part, values)
        elif part.convert is not None:
            found = part.convert({key: view.read(key) for key in part.sources})
            for name, values in found.items():
                yield Piece(name, TensorInfo(tuple(values.shape), values.dtype), 0, values)
        else:
            for key in part.sources:
                for rows in ranges_of_rows([view], key, part.nbytes):
                    first = rows.start if rows else 0
                    yield Piece(key, view.tensors[key], first, view.read(key, rows))


def kept_parts(view: LayerView, keys: Iterable[str]) -> list[Part]:
    """Return parts of one tensor each, which stay as they are."""
    return [Part(sources=(key,), nbytes=view.tensors[key].nbytes) for key in keys]


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


def in_files[Item: _Sized](parts: Iterable[Item], most: int) -> Iterator[tuple[Item, ...]]:
    """Yield ``parts`` in groups of at most ``most`` bytes; a larger part stays alone."""
    group: list[Item] = []
    size = 0
    for part in parts:
        if group and size + part.nbytes > most:
            yield tuple(group)
            group, size = [], 0
        group.append(part)
        size += part.nbytes
    if group:
        yield tuple(group)


def by_layer(experts: Sequence[Part], others: Iterable[Part]) -> tuple[tuple[Part, ...], ...]:
    """Return the parts of each file: each layer of experts alone, others up to its bytes."""
    most = max((part.nbytes for part in experts), default=0)
    return (*((part,) for part in experts), *in_files(others, most))


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread.

    A conversion is bound by memory and disks, so more threads add nothing. On busy cores each row
    copy waits for the slowest thread: 50 times as long on two busy cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class FileJob(NamedTuple):
    """A file of the result."""

    number: int
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(one.nbytes for one in self.parts)


def write_safetensors(
    plan: FilePlan, folder: Path, recorded: Recorded, bytes_done: BytesDone, workers: int
) -> None:
    """Write all parts of a plan as numbered safetensors with their index."""
    metadata, total = notes_of(recorded), 0
    weight_map: dict[str, str] = {}
    jobs = [FileJob(n, parts) for n, parts in enumerate(plan.files)]
    shared = (plan, folder, metadata)
    for job, infos in run_in_workers(_write_safetensors, shared, jobs, workers=workers):
        weight_map |= dict.fromkeys(infos, _file_name(plan, job))
        total += sum(info.nbytes for info in infos.values())
        bytes_done(job.nbytes)
    write_index(folder, weight_map, {"total_size": total, **metadata})


def _write_safetensors(
    shared: tuple[FilePlan, Path, Mapping[str, str]], job: FileJob
) -> dict[str, TensorInfo]:
    plan, folder, metadata = shared
    infos = {name: info for part in job.parts for name, info in plan.tensors(part).items()}
    pieces = (piece for part in job.parts for piece in plan.pieces(part))
    write_file(folder / _file_name(plan, job), infos, metadata, pieces)
    return infos


def _file_name(plan: FilePlan, job: FileJob) -> str:
    return f"model-{job.number + 1:05d}-of-{len(plan.files):05d}{SUFFIX}"


def write_torch_dist(
    plan: FilePlan,
    folder: Path,
    writer: TorchDistWriter,
    bytes_done: BytesDone,
    workers: int,
) -> None:
    """Write the chunks of all parts into ``folder``, and add them to those of ``writer``."""
    found: dict[int, list[Entry]] = {}
    jobs = [FileJob(n, parts) for n, parts in enumerate(plan.files, 1)]
    for job, entries in run_in_workers(_write_chunks, (plan, folder), jobs, workers=workers):
        found[job.number] = entries
        bytes_done(job.nbytes)
    for _, entries in sorted(found.items()):
        writer.entries += entries


def _write_chunks(shared: tuple[FilePlan, Path], job: FileJob) -> list[Entry]:
    plan, folder = shared
    with TorchDistWriter(folder, job.number) as writer:
        for part in job.parts:
            for name, of, first, values in plan.pieces(part):
                place, layers = plan.place_of(part, name)
                offset = (first, *[0] * (values.dim() - 1)) if values.dim() else ()
                if place.layer is not None:
                    of = TensorInfo((layers, *of.shape), of.dtype)
                    offset, values = (place.layer, *offset), values[None]
                writer.write_chunk(place.name, of, offset, values.contiguous())
        return writer.entries


@contextmanager
def torch_dist_checkpoint(
    folder: Path, iteration: int | None
) -> Iterator[tuple[Path, TorchDistWriter]]:
    """Yield the folder and the writer of one checkpoint for Megatron's ``--load``.

    The folder is ``iter_*``, or ``release`` without an iteration; the tracker file names it.
    """
    said = "release" if iteration is None else str(iteration)
    into = folder / ("release" if iteration is None else f"iter_{iteration:07d}")
    into.mkdir()
    with TorchDistWriter(into) as writer:
        yield into, writer
    record_checksums(into)
    (folder / TRACKER).write_text(said)


def write_common_state(writer: TorchDistWriter, iteration: int, own: Mapping[str, Any]) -> None:
    """Write the common state of a checkpoint that Megatron did not save.

    ``own`` is stored under a key that Megatron does not read.
    """
    state = {
        "checkpoint_version": 3.0,  # as in Megatron; implies the order of QKV rows
        "iteration": iteration,
        OWN_STATE: dict(own),
    }
    writer.write_object(f"{COMMON_STATE}/shard_0_1", saved(state))


def saved(value: Any) -> bytes:
    """Return the ``torch_dist`` encoding of an object."""
    content = io.BytesIO()
    torch.save([value], content)
    return content.getvalue()
