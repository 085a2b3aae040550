"""A checkpoint to rewrite part by part, one part in memory at a time; shared by all conversions."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_optim.checkpoint.files.folders import TRACKER
from moe_optim.checkpoint.files.reader import Recorded, TensorInfo
from moe_optim.checkpoint.files.torch_dist import COMMON_STATE, OWN_STATE
from moe_optim.checkpoint.sealing import record_checksums
from moe_optim.commands.conversion.layer_view import LayerView
from moe_optim.commands.conversion.safetensors_files import SafetensorsWriter
from moe_optim.commands.conversion.torch_dist_writer import TorchDistWriter
from moe_optim.experts.keys.layouts import ExpertSet

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
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    """Returns the result by name, given the tensors of ``sources``."""
    experts: ExpertSet | None = None
    """Stored experts of the part; None for any other tensor."""
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
    def num_tensors(self) -> int:
        """Number of tensors read."""
        return sum(len(part.sources) for part in self.parts)

    @property
    def total_bytes(self) -> int:
        """Bytes converted, without headers."""
        return sum(part.nbytes for part in self.parts)

    @property
    def disk_bytes(self) -> int:
        """Upper bound of the bytes written, with headers."""
        experts = sum(one.num_experts for one in self.sets)
        return self.total_bytes + BLOB_BYTES * (self.num_tensors + experts + 16)

    def convert(self, part: Part) -> dict[str, Tensor]:
        """Read a ``part`` and return its output tensors by name, on the CPU."""
        return part.convert({key: self.view.read(key) for key in part.sources})


def kept_parts(view: LayerView, keys: Iterable[str]) -> list[Part]:
    """Return parts of one tensor each, which stay as they are."""
    return [Part(sources=(key,), nbytes=view.tensors[key].nbytes) for key in keys]


def in_files(parts: Iterable[Part], most: int) -> Iterator[tuple[Part, ...]]:
    """Yield ``parts`` in groups of at most ``most`` bytes; a larger part stays alone."""
    group: list[Part] = []
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


def write_safetensors(
    plan: FilePlan, folder: Path, recorded: Recorded, bytes_done: BytesDone
) -> None:
    """Write all parts of a plan as numbered safetensors with their index."""
    writer = SafetensorsWriter(folder, recorded)
    for file in plan.files:
        tensors: dict[str, Tensor] = {}
        for part in file:
            tensors |= plan.convert(part)
        writer.write(tensors)
        bytes_done(sum(part.nbytes for part in file))
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


def write_layer(
    writer: TorchDistWriter, name: str, tensor: Tensor, layer: int, num_layers: int
) -> None:
    """Write a tensor of one layer as a chunk of the tensor that stacks all layers."""
    whole = TensorInfo((num_layers, *tensor.shape), tensor.dtype)
    writer.write_chunk(name, whole, (layer, *[0] * tensor.dim()), tensor[None])


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
