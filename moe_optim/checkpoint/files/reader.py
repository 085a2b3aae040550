"""Interface of all checkpoint readers: names, shapes, dtypes, and values on demand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

FileFormat = Literal["torch_dist", "safetensors"]
"""Torch's distributed format as Megatron uses it, or Hugging Face's."""

STATE_PREFIX = "optimizer."
"""Key prefix of masters, moments and other optimizer state."""
FLAT_STATES = ".gbuf_idx_"
"""Key part of states stored bucket by bucket."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Metadata of a stored tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor, independent of its stored pieces."""
    dtype: torch.dtype
    """Stored dtype."""

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Recorded:
    """Facts recorded in a checkpoint; None where absent."""

    glu_interleave: int | None = None
    """Rows per alternating gate and up block in fc1; 0: all gate rows come first."""
    layout: str | None = None
    """Layout of expert keys, see :mod:`moe_optim.experts.keys.layouts`."""
    num_experts: int | None = None
    """Experts per layer."""
    iteration: int | None = None
    """Iteration of the save."""
    version: str | None = None
    """Megatron's ``checkpoint_version``."""
    optimizer_sharding: str | None = None
    """Megatron's sharding type of optimizer states, such as ``fully_reshardable``."""
    parallel_sizes: Mapping[str, int] = field(default_factory=dict)
    """Parallel sizes when saved, by kind of parallelism, such as ``expert``."""


class CheckpointReader(Protocol):
    """An open checkpoint.

    ``read`` accesses only the stored pieces that overlap the requested region; it raises StateError
    if a file is missing, cut off or damaged.
    """

    @property
    def path(self) -> Path:
        """Folder or file that was opened."""

    @property
    def format(self) -> FileFormat:
        """Format of the files."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors, by name."""

    @property
    def objects(self) -> Mapping[str, int]:
        """Size in bytes of every stored object that is not a tensor, by name."""

    @property
    def recorded(self) -> Recorded:
        """Facts recorded in the checkpoint."""

    def read(self, name: str, *index: int | range) -> Tensor:
        """Return a new contiguous CPU tensor, in the stored shape and dtype.

        Args:
            name: key in :attr:`tensors`.
            index: numbers on the first axes, which the result then lacks; the last may be a range
                of numbers, which stays an axis. None: whole tensor.
        """

    def cuts(self, name: str, *index: int) -> Sequence[int]:
        """Return the places on an axis between which whole stored chunks lie, from 0 to its size.

        Reading a range from one to another reads no byte of other ranges.

        Args:
            name: key in :attr:`tensors`.
            index: numbers on the axes before; the tensor has more.
        """


def is_state(key: str) -> bool:
    """Return whether ``key`` belongs to the optimizer."""
    return key.startswith(STATE_PREFIX) or key.startswith("chained_")
