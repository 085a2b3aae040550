"""Plans the rewriting of a checkpoint part by part; shared by all conversions."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_optim.checkpoint.files.folders import TRACKER
from moe_optim.checkpoint.files.reader import Recorded
from moe_optim.checkpoint.files.torch_dist import COMMON_STATE, OWN_STATE
from moe_optim.checkpoint.sealing import record_checksums
from moe_optim.commands.conversion.layer_view import LayerView
from moe_optim.commands.conversion.safetensors_files import SafetensorsWriter
from moe_optim.commands.conversion.torch_dist_writer import TorchDistWriter
from moe_optim.experts.keys.layouts import ExpertSet
from moe_optim.rollout.families import NamePair

BLOB_BYTES = 4096
"""Upper bound of the overhead of ``torch.save`` per tensor."""
BytesDone = Callable[[int], None]
"""Progress callback; receives the bytes converted since its last call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Tensors that are converted together: one tensor, or the experts of a layer."""

    sources: tuple[str, ...]
    """Keys to read."""
    experts: ExpertSet | None = None
    """Experts of the part; None for any other tensor."""
    pair: NamePair | None = None
    """Names of a renamed tensor on both sides."""
    target: str = ""
    """Name in the result, or prefix of the experts there."""


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """A checkpoint and its parts, one of which is in memory at a time."""

    view: LayerView
    parts: tuple[Part, ...]
    """Parts in the order in which they are written."""
    source_interleave: int
    """GLU interleave of the source; 0 puts all gate rows first."""
    left_out: tuple[str, ...] = ()
    """Keys of tensors and objects that the result omits."""

    @property
    def experts(self) -> tuple[Part, ...]:
        """Parts that contain the experts of a layer."""
        return tuple(part for part in self.parts if part.experts is not None)

    @property
    def others(self) -> tuple[Part, ...]:
        """All other parts."""
        return tuple(part for part in self.parts if part.experts is None)

    @property
    def num_tensors(self) -> int:
        """Number of tensors read."""
        return sum(len(part.sources) for part in self.parts)

    @property
    def total_bytes(self) -> int:
        """Bytes converted, without headers."""
        return sum(map(self.part_bytes, self.parts))

    @property
    def layer_bytes(self) -> int:
        """Bytes of the largest layer of experts, an upper bound of the memory used."""
        return max(map(self.part_bytes, self.experts), default=0)

    def part_bytes(self, part: Part) -> int:
        """Return the stored bytes of a part."""
        return self.view.nbytes(part.sources)

    def read(self, part: Part) -> dict[str, Tensor]:
        """Return the tensors of a part on the CPU, by key, in the shapes and dtypes of the view."""
        return {key: self.view.read(key) for key in part.sources}

    def convert(self, part: Part) -> dict[str, Tensor]:
        """Read a part and return its output tensors by name."""
        return self.read(part)

    def files(self) -> Iterator[list[Part]]:
        """Yield the parts of each file: each layer of experts alone, then the others in groups."""
        yield from ([part] for part in self.experts)
        yield from self.grouped(self.others)

    def grouped(self, parts: Iterable[Part]) -> Iterator[list[Part]]:
        """Yield ``parts`` in groups of at most :attr:`layer_bytes`; a larger part stays alone."""
        group: list[Part] = []
        size, most = 0, self.layer_bytes
        for part in parts:
            nbytes = self.part_bytes(part)
            if group and size + nbytes > most:
                yield group
                group, size = [], 0
            group.append(part)
            size += nbytes
        if group:
            yield group


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


def write_safetensors(
    plan: FilePlan, folder: Path, recorded: Recorded, bytes_done: BytesDone
) -> None:
    """Write all parts of a plan as numbered safetensors with their index."""
    writer = SafetensorsWriter(folder, recorded)
    for group in plan.files():
        tensors: dict[str, Tensor] = {}
        for part in group:
            tensors |= plan.convert(part)
        writer.write(tensors)
        bytes_done(sum(map(plan.part_bytes, group)))
    writer.finish()


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
