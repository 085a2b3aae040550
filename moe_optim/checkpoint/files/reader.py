"""What every reader of a checkpoint gives: names, shapes and types first, values when asked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

FileFormat = Literal["torch_dist", "safetensors"]
"""What the files of a checkpoint are: torch's distributed format as Megatron uses it, or Hugging
Face's."""

STATE_PREFIX = "optimizer."
"""Keys of masters, moments and whatever else belongs to the optimizer begin with it."""
FLAT_STATES = ".gbuf_idx_"
"""In the keys of states that are stored as whole buckets, parameters side by side."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor before it is read."""

    shape: tuple[int, ...]
    """Of the whole tensor, whatever pieces it is stored in."""
    dtype: torch.dtype
    """That it is stored in."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Recorded:
    """What a checkpoint says about itself; None where it does not say."""

    glu_interleave: int | None = None
    """Rows of gate and of linear blocks that alternate in fc1; 0: all gate rows come first."""
    layout: str | None = None
    """Of the experts' keys, see :mod:`moe_optim.experts.keys.layouts`."""
    num_experts: int | None = None
    """Of every layer."""
    iteration: int | None = None
    """After which it was saved."""
    version: str | None = None
    """Megatron's ``checkpoint_version``."""
    optimizer_sharding: str | None = None
    """Megatron's name for how optimizer states are cut, such as ``fully_reshardable``."""
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
        """The folder or file that was opened."""

    @property
    def format(self) -> FileFormat:
        """Of the files."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors, by name."""

    @property
    def objects(self) -> Mapping[str, int]:
        """Bytes of everything stored that is not a tensor, by name."""

    @property
    def recorded(self) -> Recorded:
        """What the checkpoint says about itself."""

    def read(self, name: str, first: int | None = None) -> Tensor:
        """Return a tensor of its own on the CPU, contiguous, in the stored shape and dtype.

        Args:
            name: one of :attr:`tensors`.
            first: return only what lies at this place of the first axis, without that axis.
        """


def is_state(key: str) -> bool:
    """Return whether ``key`` is the optimizer's: a master, a moment or anything else of it."""
    return key.startswith(STATE_PREFIX) or key.startswith("chained_")
