"""What every reader of a checkpoint gives: names, shapes and types first, values when asked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

FileFormat = Literal["torch_dist", "safetensors"]

STATE_PREFIX = "optimizer."
"""Keys of masters, moments and whatever else belongs to the optimizer begin with it."""
FLAT_STATES = ".gbuf_idx_"
"""In the keys of states that are stored as whole buckets, parameters side by side."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

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
    num_experts: int | None = None
    iteration: int | None = None
    version: str | None = None
    optimizer_sharding: str | None = None
    parallel_sizes: Mapping[str, int] = field(default_factory=dict)


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
        """Return a tensor, or, without its first axis, what lies at place ``first`` there."""


def is_state(key: str) -> bool:
    """Return whether a key is the optimizer's: a master, a moment or anything else of it."""
    return key.startswith(STATE_PREFIX) or key.startswith("chained_")
