"""Plan of rewriting a checkpoint part by part, and the writing of files that all plans share."""

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
from moe_optim.checkpoint.integrity import record_checksums
from moe_optim.commands.conversion.layer_view import LayerView
from moe_optim.commands.conversion.safetensors_files import SafetensorsWriter
from moe_optim.commands.conversion.torch_dist_writer import TorchDistWriter
from moe_optim.experts.keys.layouts import ExpertSet
from moe_optim.rollout.families import NamePair

BLOB_BYTES = 4096
"""Upper bound of what ``torch.save`` writes besides the elements of a tensor."""
BytesDone = Callable[[int], None]
"""Progress callback; takes the number of bytes converted since the last call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Tensors that are read, converted and written together: one tensor, or a layer's experts."""

    sources: tuple[str, ...]
    """Keys to read."""
    experts: ExpertSet | None = None
    """None for a tensor that is not an expert's."""
    pair: NamePair | None = None
    """Names on both sides of a tensor that gets another name."""
    target: str = ""
    """Name in the result, or the prefix of the experts there."""


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """A checkpoint and the parts of it that are rewritten, one part in memory at a time."""

    view: LayerView
    """The source."""
    parts: tuple[Part, ...]
    """In the order in which they are written."""
    source_interleave: int
    """Rows of gate that alternate with as many of up in the source; 0: all gate rows first."""
    left_out: tuple[str, ...] = ()
    """Tensors and objects that the result does not have."""

    @property
    def experts(self) -> tuple[Part, ...]:
        """Parts that are the experts of a layer."""
        return tuple(part for part in self.parts if part.experts is not None)

    @property
    def others(self) -> tuple[Part, ...]:
        """Parts that are not experts."""
        return tuple(part for part in self.parts if part.experts is None)

    @property
    def num_tensors(self) -> int:
        """Number of tensors that are read."""
        return sum(len(part.sources) for part in self.parts)

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that is converted, without headers."""
        return sum(map(self.part_bytes, self.parts))

    @property
    def layer_bytes(self) -> int:
        """Bytes of the largest layer of experts, which bounds what is held at once."""
        return max(map(self.part_bytes, self.experts), default=0)

    def part_bytes(self, part: Part) -> int:
        """Return the stored bytes of a part."""
        return self.view.nbytes(part.sources)

    def read(self, part: Part) -> dict[str, Tensor]:
        """Return the tensors of a part on the CPU, by key, in the shapes and dtypes of the view."""
        return {key: self.view.read(key) for key in part.sources}

    def convert(self, part: Part) -> dict[str, Tensor]:
        """Read a part and return what is written for it, by name."""
        return self.read(part)

    def files(self) -> Iterator[list[Part]]:
        """Yield the parts file by file: each layer of experts alone, then the others in groups."""
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
    """Let torch copy with one thread inside.

    A conversion waits for memory and disks; more threads add nothing to that. Where other processes
    want the cores, each row copy waits for the slowest thread: 50 times as long on two busy cores.
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
    """Give the folder and the writer of one checkpoint in what Megatron's ``--load`` takes.

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
    """Write the common state of a checkpoint that did not come from Megatron.

    ``own`` lies where Megatron does not look for its arguments.
    """
    state = {
        "checkpoint_version": 3.0,  # as Megatron writes; it tells the order of QKV rows
        "iteration": iteration,
        OWN_STATE: dict(own),
    }
    writer.write_object(f"{COMMON_STATE}/shard_0_1", saved(state))


def saved(value: Any) -> bytes:
    """Return what ``torch_dist`` stores for an object."""
    content = io.BytesIO()
    torch.save([value], content)
    return content.getvalue()
