"""A checkpoint shown with one entry per layer, under state-dict keys.

Megatron's ``torch_dist`` stacks the experts of all layers if these have the same shapes,
``decoder.layers.mlp.experts.experts.linear_fc1.weight`` of [layers, E, 2F, H], and otherwise stores
one tensor per layer, ``decoder.layers.3.mlp.experts.experts.linear_fc1.weight``. Both are shown in
layout ``grouped``, as ``decoder.layers.3.mlp.experts.linear_fc1.weight``; states keep their prefix.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_optim.checkpoint.files.reader import CheckpointReader, Recorded, TensorInfo
from moe_optim.checkpoint.state_manifest import state_kinds
from moe_optim.errors import ConfigError, LayoutError

_STORED = re.compile(r"(?P<head>.*\bexperts\.)experts\.(?P<tail>linear_fc[12]\.(weight|bias))")
_STACKED = re.compile(r"(?P<head>.*\blayers\.)(?P<tail>[^0-9].*)")
STATE_KIND = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.")
_AXES = {"weight": 3, "bias": 2}
_MAX_LAYERS = 4096  # above any model; larger stacks are shown as stored


@dataclass(frozen=True, slots=True)
class Place:
    """Stored location of a tensor."""

    name: str
    layer: int | None = None
    """Index along the first axis; None for the whole tensor."""

    @property
    def index(self) -> tuple[int, ...]:
        """The layer, if there is one."""
        return () if self.layer is None else (self.layer,)


@dataclass(frozen=True, slots=True)
class Rename:
    """Replaces the key prefix ``old`` by ``new``, after the prefix of states if there is one."""

    old: str
    new: str

    def __call__(self, key: str) -> str:
        """Return the key, renamed if the prefix matches."""
        state = STATE_KIND.match(key)
        prefix = state[0] if state else ""
        rest = key.removeprefix(prefix)
        return prefix + self.new + rest.removeprefix(self.old) if rest.startswith(self.old) else key


class LayerView:
    """A checkpoint under the state-dict keys of its experts."""

    def __init__(
        self,
        reader: CheckpointReader,
        renames: Sequence[Rename] = (),
        *,
        num_layers: int | None = None,
    ) -> None:
        """Index the keys without reading values; the first matching rename applies to each key.

        Args:
            reader: open checkpoint.
            renames: renames in order of precedence.
            num_layers: layers of the model, if known. Then all stacked tensors are shown by layer,
                not only those of experts.

        Raises:
            ConfigError: a rename matches no key.
            LayoutError: two tensors get the same key.
        """
        self.reader = reader
        self.renames = tuple(renames)
        self.tensors: dict[str, TensorInfo] = {}
        self.places: dict[str, Place] = {}
        unused = set(renames)
        for shown, place, info in _show(reader, num_layers):
            fitting = next((rename for rename in renames if rename(shown) != shown), None)
            key = fitting(shown) if fitting else shown
            unused -= {fitting}
            if key in self.places:
                raise LayoutError(
                    f"{reader.path}: {key}: expected one tensor of that name, got "
                    f"{self.places[key].name} and {place.name}. Change --rename."
                )
            self.tensors[key], self.places[key] = info, place
        for rename in sorted(unused, key=lambda rename: rename.old):
            raise ConfigError(
                f"--rename {rename.old}={rename.new}: expected keys of {reader.path} to begin with "
                f"it, such as {next(iter(self.tensors), 'none')}, got none that does."
            )

    @property
    def recorded(self) -> Recorded:
        """Facts that the checkpoint records about itself."""
        return self.reader.recorded

    def nbytes(self, keys: Iterable[str]) -> int:
        """Return the total bytes of the tensors of ``keys``."""
        return sum(self.tensors[key].nbytes for key in keys)

    def read(self, key: str, rows: range | None = None) -> Tensor:
        """Return a copy of the tensor shown as ``key``, on the CPU, in its shown shape and dtype.

        ``rows`` is a range on its first axis; None for all. Errors are those of the reader's
        ``read``.
        """
        place = self.places[key]
        return self.reader.read(place.name, *place.index, *([] if rows is None else [rows]))

    def cuts(self, key: str) -> Sequence[int]:
        """Return the places on the first axis of ``key`` between which whole stored chunks lie."""
        place = self.places[key]
        return self.reader.cuts(place.name, *place.index)


def state_kind(key: str) -> str | None:
    """Return the kind of state of a key: masters, a moment or momentum, or None."""
    return next(iter(state_kinds([key])), None)


def stored_key(shown: str) -> str:
    """Return the ``torch_dist`` name of the expert tensor shown as ``shown``."""
    head, _, tail = shown.rpartition("experts.")
    return f"{head}experts.experts.{tail}"


def _show(
    reader: CheckpointReader, num_layers: int | None
) -> Iterator[tuple[str, Place, TensorInfo]]:
    for name, info in reader.tensors.items():
        found = _STORED.fullmatch(name) if reader.format == "torch_dist" else None
        key = found["head"] + found["tail"] if found else name
        if found:
            is_stacked = len(info.shape) == _AXES[found[3]] + 1
        else:
            is_stacked = reader.format == "torch_dist" and info.shape[:1] == (num_layers,)
        stacked = _STACKED.fullmatch(key) if is_stacked and info.shape[0] <= _MAX_LAYERS else None
        if stacked is None:
            yield key, Place(name), info
            continue
        of_layer = TensorInfo(info.shape[1:], info.dtype)
        for layer in range(info.shape[0]):
            yield f"{stacked['head']}{layer}.{stacked['tail']}", Place(name, layer), of_layer


def parse_renames(texts: Sequence[str]) -> tuple[Rename, ...]:
    """Parse options ``FROM=TO``; ConfigError for any other form."""
    renames = []
    for text in texts:
        old, equals, new = text.partition("=")
        if not old or not equals:
            raise ConfigError(f"--rename: expected FROM=TO, prefixes of keys, got '{text}'.")
        renames.append(Rename(old, new))
    return tuple(renames)
