"""What a conversion of a checkpoint will do, decided before anything is read or written."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_optim.checkpoint.files.reader import FLAT_STATES, FileFormat, is_state
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.commands.conversion.expert_finding import (
    check_row_order,
    find_experts,
    known_interleave,
    without_experts,
)
from moe_optim.commands.conversion.flat_common import named_common_entries
from moe_optim.commands.conversion.flat_states import NamedStates
from moe_optim.commands.conversion.layer_view import STATE_KIND, STORED_ALIKE, LayerView
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.experts.keys.conversion import convert_expert_set
from moe_optim.experts.keys.layouts import ExpertSet, KeyLayout, get_layout

STATE = "optimizer.state."
"""Before the kind of state, a dot, and the key of the parameter that it belongs to."""
BLOB_BYTES = 4096
"""At most, of what ``torch.save`` writes besides the elements."""


@dataclass(frozen=True, kw_only=True)
class ConversionRequest:
    """What a user asks for; None where it follows from the checkpoint."""

    to: KeyLayout
    """Layout of the result's experts."""
    source_layout: KeyLayout | None = None
    """Layout to read experts in, where several fit."""
    glu_interleave: int | None = None
    """Rows of gate that alternate with as many of up in the result; 0: all gate rows first."""
    source_glu_interleave: int | None = None
    """The same of the checkpoint, where it does not say."""
    format: FileFormat | None = None
    """Of the result's files."""
    weights_only: bool = False
    """Whether masters, moments and everything else of the optimizer is left out."""
    num_experts: int | None = None
    """Of every layer, where keys and shapes do not tell."""


@dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """What goes where."""

    view: LayerView
    """The checkpoint."""
    sets: tuple[ExpertSet, ...]
    """The experts of all layers, then their states, as they are stored."""
    others: tuple[str, ...]
    """Tensors that are kept as they are."""
    objects: tuple[str, ...]
    """Kept as they are."""
    left_out: tuple[str, ...]
    """Tensors and objects that the result will not have."""
    to: KeyLayout
    """Layout of the result's experts."""
    source_interleave: int
    """Rows of gate that alternate with as many of up in the checkpoint; 0: all gate rows first."""
    target_interleave: int
    """The same of the result."""
    format: FileFormat
    """Of the result's files."""
    common_entries: Mapping[str, Any]
    """Entries of Megatron's common state that are not what they were."""

    @property
    def stored(self) -> TorchDistReader | None:
        """The files of a ``torch_dist`` checkpoint, from which bytes can be copied."""
        reader = self.view.reader
        if isinstance(reader, NamedStates):
            return reader.stored
        return reader if isinstance(reader, TorchDistReader) else None

    @property
    def copies_experts(self) -> bool:
        """Whether experts are stored afterwards as they were before, byte for byte."""
        formats = {self.view.reader.format, self.format}
        return formats == {"torch_dist"} and self.source_interleave == self.target_interleave

    @property
    def layer_bytes(self) -> int:
        """Bytes of the largest set of experts: what is read at once."""
        return max((self.set_bytes(one) for one in self.sets), default=0)

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that is written, without headers."""
        objects = sum(self.view.reader.objects[key] for key in self.objects)
        return sum(map(self.set_bytes, self.sets)) + self.view.nbytes(self.others) + objects

    @property
    def disk_bytes(self) -> int:
        """An upper bound of the bytes that are written, with headers."""
        copied = sum(map(len, self.stored.blobs.values())) if self.stored is not None else 0
        made = sum(one.num_experts * len(self.to.patterns) for one in self.sets)
        return self.total_bytes + BLOB_BYTES * (copied + made + len(self.others) + 16)

    def set_bytes(self, expert_set: ExpertSet) -> int:
        """Return how many bytes the tensors of ``expert_set`` have together, as they are stored."""
        return self.view.nbytes(expert_set.keys)

    def convert(self, expert_set: ExpertSet) -> dict[str, Tensor]:
        """Read one ``expert_set`` and return it as it is to be stored.

        By key, on the CPU, of the shapes of the layout :attr:`to`, in the dtype of the checkpoint.
        """
        tensors = {key: self.view.read(key) for key in expert_set.keys}
        layout_stays = expert_set.layout == self.to
        if layout_stays and self.source_interleave == self.target_interleave:
            return tensors
        return convert_expert_set(
            tensors,
            expert_set,
            self.to,
            source_interleave=self.source_interleave or None,
            target_interleave=self.target_interleave or None,
        )

    def other_files(self) -> Iterator[list[str]]:
        """Return the other tensors in groups no larger than a layer, but for larger tensors."""
        group: list[str] = []
        for key in self.others:
            if group and self.view.nbytes([*group, key]) > self.layer_bytes:
                yield group
                group = []
            group.append(key)
        if group:
            yield group


def plan_conversion(view: LayerView, request: ConversionRequest) -> ConversionPlan:
    """Return the plan, without reading a value.

    Args:
        view: of the checkpoint.
        request: what is asked for.

    Raises:
        ConfigError: what is asked for contradicts itself or what the checkpoint records.
        LayoutError: experts or their states are not complete, or cannot be converted.
    """
    reader = view.reader
    format = request.format or reader.format
    to = _target_layout(request.to, format)
    if view.renames and reader.format == format == "torch_dist":
        raise ConfigError(
            f"--rename: expected names of Megatron's to stay from torch_dist to torch_dist, got "
            f"{len(view.renames)} for {reader.path}, whose objects have them too. Leave it out."
        )
    kept = [key for key in view.tensors if not (request.weights_only and is_state(key))]
    objects = () if format == "safetensors" else tuple(reader.objects)
    if request.weights_only:
        objects = tuple(name for name in objects if not is_state(name))
    else:
        _refuse_flat_states(view)
    sets = find_experts(view, kept, layout=request.source_layout, num_experts=request.num_experts)
    if not sets:
        raise LayoutError(
            f"{reader.path}: expected weights of gated experts, got none among "
            f"{len(view.tensors):,} tensors. `moe-optim inspect` shows what there is."
        )
    _check_states(view, sets)
    source_interleave = known_interleave(view, request.source_glu_interleave)
    target = _target_interleave(request, to, source_interleave)
    entries: Mapping[str, Any] = {}
    if isinstance(reader, NamedStates) and format == "torch_dist":
        entries = named_common_entries(reader.stored)
    plan = ConversionPlan(
        view=view,
        sets=tuple(sorted(sets, key=lambda one: is_state(one.prefix))),
        others=without_experts(kept, sets),
        objects=objects,
        left_out=(
            *(key for key in view.tensors if key not in set(kept)),
            *(name for name in reader.objects if name not in objects),
        ),
        to=to,
        source_interleave=source_interleave,
        target_interleave=target,
        format=format,
        common_entries=entries,
    )
    if not plan.copies_experts:
        _check_interleaves(plan)
    return plan


def _target_layout(to: KeyLayout, format: FileFormat) -> KeyLayout:
    if format == "safetensors":
        return to
    if to.name not in STORED_ALIKE:
        raise ConfigError(
            f"--experts {to.name}: expected one of {', '.join(STORED_ALIKE)} for torch_dist, which "
            "stores these alike and no other. Add --format safetensors."
        )
    return get_layout("grouped")


def _refuse_flat_states(view: LayerView) -> None:
    flat = [key for key in view.tensors if FLAT_STATES in key]
    if flat:
        raise LayoutError(
            f"{view.reader.path}: expected optimizer states by parameter, got whole buckets "
            f"({flat[0]} and {len(flat) - 1} more). Save with --dist-ckpt-optim-fully-reshardable, "
            "or convert with --weights-only."
        )


def _check_states(view: LayerView, sets: list[ExpertSet]) -> None:
    """Every kind of state that any expert has must be there for its layer, or none: frozen ones."""
    path, by_prefix = view.reader.path, {one.prefix: one for one in sets}
    weights = {prefix for prefix in by_prefix if not is_state(prefix)}
    states = [prefix for prefix in by_prefix if prefix.startswith(STATE)]
    found = [STATE_KIND.match(key) for key in view.tensors] if states else []
    kinds = sorted({match[1] for match in found if match})
    trained = {prefix[match.end() :] for prefix in states if (match := STATE_KIND.match(prefix))}
    expected = {
        f"{STATE}{kind}.{name}": name for kind in kinds for name in weights if name in trained
    }
    faults = [f"no {prefix}" for prefix in expected if prefix not in by_prefix]
    faults += [f"{prefix} without weights" for prefix in states if prefix not in expected]
    faults += [
        f"{prefix} of other experts than {weight}"
        for prefix, weight in expected.items()
        if prefix in by_prefix and replace(by_prefix[prefix], prefix=weight) != by_prefix[weight]
    ]
    if faults:
        raise LayoutError(
            f"{path}: expected {' and '.join(kinds)} of a layer's experts or none, got "
            f"{'; '.join(faults)}. Convert with --weights-only."
        )


def _target_interleave(request: ConversionRequest, to: KeyLayout, source: int) -> int:
    """Return what was asked for; else Megatron's layouts keep theirs, and others have none."""
    if request.glu_interleave is not None:
        return request.glu_interleave
    return source if to.name in STORED_ALIKE else 0


def _check_interleaves(plan: ConversionPlan) -> None:
    check_row_order(plan.view, plan.source_interleave)
    asked: Mapping[str, tuple[int, KeyLayout]] = {
        "source": (plan.source_interleave, plan.sets[0].layout),
        "target": (plan.target_interleave, plan.to),
    }
    for side, (interleave, layout) in asked.items():
        if interleave and not layout.can_interleave:
            raise LayoutError(
                f"{plan.view.reader.path}: expected a GLU interleave of 0 for the {side} layout "
                f"{layout.name}, whose gate and up rows are separate tensors, got {interleave}."
            )
        bad = [one for one in plan.sets if interleave and one.ffn % interleave]
        if bad:
            raise LayoutError(
                f"{plan.view.reader.path}: {bad[0].prefix}: expected a GLU interleave that divides "
                f"{bad[0].ffn}, the width of its experts, got {interleave}. Give another."
            )


def output_folder(target: Path, iteration: int | None) -> tuple[Path, str]:
    """Return the folder of a torch_dist checkpoint in what ``--load`` takes, and what names it.

    The folder is one below ``target``: ``release`` without an ``iteration``.
    """
    name = "release" if iteration is None else f"iter_{iteration:07d}"
    return target / name, "release" if iteration is None else str(iteration)
