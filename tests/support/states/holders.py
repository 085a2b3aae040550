"""Stand-ins for the bucket that a weight is bound to, whose state a test sets by hand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_optim.weights.storage import new_version


@dataclass(eq=False)
class StandInBucket:
    """Says of its weights what it is told to."""

    is_fresh: bool = True
    is_offloaded: bool = False
    version: int = -1
    gradients: int = 0
    """How many have been announced."""

    def before_gradient(self) -> None:
        self.gradients += 1

    def note_initial(self) -> None:
        """Nothing drops initial values here."""

    def gather(self) -> None:
        """New bytes have arrived."""
        self.version = new_version()


def bind(storage: Any, buffers: Mapping[str, Tensor] | None = None) -> StandInBucket:
    """Bind a storage to a bucket of its own with memory for some buffers; return the bucket."""
    bucket = StandInBucket()
    storage.bind(buffers or {}, bucket=bucket)
    return bucket
