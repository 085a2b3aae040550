"""The interface of all readers of checkpoints: names, shapes and dtypes, and values on demand."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

FileFormat = Literal["torch_dist", "safetensors"]
"""Torch's distributed format as Megatron uses it, or Hugging Face's."""

STATE_PREFIX = "optimizer."
"""Prefix of the keys of masters, moments and whatever else belongs to the optimizer."""
FLAT_STATES = ".gbuf_idx_"
"""Part of the keys of states that are stored as whole buckets, parameters side by side."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor before it is read."""

    shape: tuple[int, ...]
    """Shape of the whole tensor, whatever pieces it is stored in."""
    dtype: torch.dtype
    """Stored dtype."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Recorded:
    """Facts that a checkpoint records about itself; None where it does not."""

    glu_interleave: int | None = None
    """Rows of gate and of linear blocks that alternate in fc1; 0: all gate rows come first."""
    layout: str | None = None
    """Layout of the experts' keys, see :mod:`moe_optim.experts.keys.layouts`."""
    num_experts: int | None = None
    """Experts of every layer."""
    iteration: int | None = None
    """Iteration after which it was saved."""
    version: str | None = None
    """Megatron's ``checkpoint_version``."""
    optimizer_sharding: str | None = None
    """Megatron's name for the sharding of optimizer states, such as ``fully_reshardable``."""
    parallel_sizes: Mapping[str, int] = field(default_factory=dict)
    """Kind of parallelism -> number of ranks it was saved by, such as ``expert``."""


class CheckpointReader(Protocol):
    """An opened checkpoint.

    ``read`` returns a tensor of its own on the CPU, and reads no more of the files than the stored
    pieces that overlap what is asked for.

    Raises:
        StateError: a file is missing, cut off or damaged.
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
        """Bytes of everything stored that is not a tensor, by name."""

    @property
    def recorded(self) -> Recorded:
        """Facts that the checkpoint records about itself."""

    def read(self, name: str, first: int | None = None) -> Tensor:
        """Return a tensor of its own on the CPU, contiguous, in the stored shape and dtype.

        Args:
            name: one of :attr:`tensors`.
            first: place on the first axis; the result is without that axis. None: the whole.
        """


def is_state(key: str) -> bool:
    """Return whether ``key`` is the optimizer's: a master, a moment or anything else of it."""
    return key.startswith(STATE_PREFIX) or key.startswith("chained_")
