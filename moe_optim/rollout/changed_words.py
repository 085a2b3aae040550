"""Updates of an engine that hold only the words of weights that have changed.

Steps at the learning rates of reinforcement learning change few bytes of quantized weights. The
sender keeps a copy of what it last exported; an update has the 4-byte words that differ from it,
with their positions.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from moe_optim.errors import LayoutError, StateError, listed
from moe_optim.rollout.units import flat_bytes

WORD = 4
"""Bytes per word."""
Weights = Mapping[str, Tensor | Sequence[Tensor]]
"""Tensors by name, or several under one name that lie one after another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A state of the weights, as one sender has exported it."""

    name: str
    """Random name of the export, since copies of a sender count alike."""
    number: int
    """Exports so far."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """Words that turn the weights of one generation into those of the next."""

    sizes: Mapping[str, int]
    """Bytes of each tensor, by name, in order."""
    base: Generation | None
    """Generation that a receiver must have; None for an update of all words."""
    generation: Generation
    """Generation that it has afterwards."""
    positions: Tensor | None
    """Indices of the words, ascending, [n] int32 or int64; None for all."""
    words: Tensor
    """[n] int32."""

    @property
    def nbytes(self) -> int:
        """Bytes of words and positions."""
        return self.words.nbytes + (0 if self.positions is None else self.positions.nbytes)


class ChangedWords:
    """Sender of updates. Keeps a copy of all tensors: memory of their size, on their device."""

    def __init__(self) -> None:
        self._generation = _new_generation(0)
        self._sizes: dict[str, int] = {}
        self._record = torch.empty(0, dtype=torch.int32, device="cpu")

    @torch.inference_mode(False)  # the copy outlives a caller's inference mode
    @torch.no_grad()
    def export(self, weights: Weights, *, full: bool = False) -> Update:
        """Return the words that differ from the last export, and record them. No rank communicates.

        Waits for the device. The first update has all words, as has one that would be larger
        otherwise.

        Args:
            weights: tensors of any shapes and dtypes on one device, as
                :func:`moe_optim.rollout.stacked_experts.stacked_experts` returns them; the same
                names and sizes in every call.
            full: whether to return all words, for receivers that lack an update.

        Raises:
            LayoutError: names or sizes differ from those of the first call.
        """
        sizes = _sizes_of(weights)
        if not self._sizes:
            device = next(iter(_pieces(weights)), self._record).device
            total = sum(map(_words, sizes.values()))
            self._record = torch.zeros(total, dtype=torch.int32, device=device)
            self._sizes, full = sizes, True
        _require_sizes("ChangedWords.export", self._sizes, sizes)
        base = self._generation
        self._generation = _new_generation(base.number + 1)  # also if this export fails
        differs = torch.empty(len(self._record), dtype=torch.bool, device=self._record.device)
        start = 0
        for name, size in sizes.items():
            here = slice(start, start + _words(size))
            now = _as_words(_each(weights[name]))
            torch.ne(now, self._record[here], out=differs[here])
            self._record[here] = now
            start = here.stop
        positions = differs.nonzero().view(-1)
        if len(differs) <= torch.iinfo(torch.int32).max:
            positions = positions.int()
        words = self._record[positions]
        if full or words.nbytes + positions.nbytes >= self._record.nbytes:
            return Update(
                sizes=sizes, base=None, generation=self._generation, positions=None,
                words=self._record.clone(),
            )  # fmt: skip
        return Update(
            sizes=sizes, base=base, generation=self._generation, positions=positions, words=words
        )


class ChangedWordsReceiver:
    """Receiver of a sender's updates, for the same tensors."""

    def __init__(self) -> None:
        self._generation: Generation | None = None

    @torch.inference_mode()  # engines may have made the weights in it
    def apply(self, update: Update, weights: Weights) -> None:
        """Write an update into tensors, which then have the bytes that the sender exported.

        No rank communicates. An update that is refused writes nothing.

        Args:
            update: next update of the sender, with tensors on the device of the weights.
            weights: contiguous tensors of the sender's names and sizes, of any shapes and dtypes;
                written in place.

        Raises:
            StateError: an update is missing, or comes from a sender that has restarted.
            LayoutError: names or sizes are not the sender's, or a tensor is not contiguous.
        """
        if update.base is not None and update.base != self._generation:
            has = "none" if self._generation is None else _spelt(self._generation)
            raise StateError(
                f"ChangedWordsReceiver.apply: expected an update of generation {has}, got one of "
                f"{_spelt(update.base)}: some were lost, repeated or reordered. Export with "
                "full=True and apply that."
            )
        _require_sizes("ChangedWordsReceiver.apply", update.sizes, _sizes_of(weights))
        if not all(one.is_contiguous() for one in _pieces(weights)):
            raise LayoutError(
                "ChangedWordsReceiver.apply: expected contiguous tensors, got another. Pass the "
                "memory itself, and transpose or cut afterwards."
            )
        self._generation = None  # until all is written
        counts = [0, *accumulate(map(_words, update.sizes.values()))]
        ends = counts
        if update.positions is not None:
            edges = torch.tensor(counts, dtype=torch.int64, device=update.positions.device)
            ends = torch.searchsorted(update.positions.long(), edges).tolist()
        for number, name in enumerate(update.sizes):
            here = slice(ends[number], ends[number + 1])
            words, start = update.words[here], 0
            at = None
            if update.positions is not None:
                at = (update.positions[here].long() - counts[number]) * WORD
            for piece in _each(weights[name]):
                flat = flat_bytes(piece.detach())
                _write(flat, words, None if at is None else at - start, start)
                start += len(flat)
        self._generation = update.generation


def _write(flat: Tensor, words: Tensor, at: Tensor | None, start: int) -> None:
    """Write words into a piece, at offsets in bytes; all of them from ``start`` if None."""
    values = words.view(torch.uint8)
    if at is None:
        flat.copy_(values[start : start + len(flat)])
        return
    places = (at.unsqueeze(1) + torch.arange(WORD, device=at.device)).view(-1)
    inside = (places >= 0) & (places < len(flat))
    flat[places[inside]] = values[inside]


def _each(given: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [given] if isinstance(given, Tensor) else given


def _pieces(weights: Weights) -> Iterator[Tensor]:
    for given in weights.values():
        yield from _each(given)


def _sizes_of(weights: Weights) -> dict[str, int]:
    return {name: sum(one.nbytes for one in _each(given)) for name, given in weights.items()}


def _require_sizes(where: str, want: Mapping[str, int], got: Mapping[str, int]) -> None:
    if list(want.items()) == list(got.items()):
        return
    names = [*want, *(name for name in got if name not in want)]
    wrong = [
        f"{name}: {got.get(name, 'no')} for {want.get(name, 'no')}"
        for name in names
        if got.get(name) != want.get(name)
    ]
    raise LayoutError(
        f"{where}: expected the tensors of the first export, in their order, got other bytes: "
        f"{listed(wrong) or 'another order'}. Pass the same ones, or begin with a new sender."
    )


def _words(nbytes: int) -> int:
    return -(-nbytes // WORD)


def _as_words(pieces: Sequence[Tensor]) -> Tensor:
    """Return pieces as one tensor of int32, padded with zeros: a view where possible."""
    flat = (
        flat_bytes(pieces[0].detach())
        if len(pieces) == 1
        else torch.cat([flat_bytes(one) for one in pieces])
    )
    if len(flat) % WORD or flat.storage_offset() % WORD:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % WORD)).clone()
    return flat.view(torch.int32)


def _new_generation(number: int) -> Generation:
    return Generation(name=secrets.token_hex(8), number=number)


def _spelt(generation: Generation) -> str:
    return f"{generation.number} ({generation.name})"
