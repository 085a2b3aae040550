"""Converts a checkpoint's experts to another layout; other tensors are kept."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from moe_optim.checkpoint.files.folders import COMMON_FILE
from moe_optim.checkpoint.files.metadata import Blob
from moe_optim.checkpoint.files.reader import FLAT_STATES, FileFormat, Recorded, is_state
from moe_optim.checkpoint.files.torch_dist import (
    INTERLEAVE_ARG,
    MANIFEST_INTERLEAVE,
    TorchDistReader,
)
from moe_optim.checkpoint.state_manifest import MANIFEST, MOMENTUM, WHOLE_MASTER
from moe_optim.commands.console.checkpoint_paths import require_target
from moe_optim.commands.conversion.expert_finding import (
    check_row_order,
    find_experts,
    known_interleave,
    require_experts,
    without_experts,
)
from moe_optim.commands.conversion.file_plan import (
    BytesDone,
    FilePlan,
    Part,
    by_layer,
    convert_experts,
    kept_parts,
    torch_dist_checkpoint,
    write_common_state,
    write_torch_dist,
)
from moe_optim.commands.conversion.layer_view import (
    STATE_KIND,
    LayerView,
    Place,
    stored_key,
)
from moe_optim.commands.conversion.object_edits import replace_int
from moe_optim.commands.conversion.torch_dist_writer import TorchDistWriter
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.experts.keys.layouts import STORED_ALIKE, ExpertSet, KeyLayout, get_layout


@dataclass(frozen=True, kw_only=True)
class ConversionRequest:
    """Options of a conversion; None derives the value from the checkpoint."""

    to: KeyLayout
    """Expert layout of the result."""
    source_layout: KeyLayout | None = None
    """Expert layout of the source, where several match."""
    glu_interleave: int | None = None
    """GLU interleave of the result; 0 puts all gate rows first."""
    source_glu_interleave: int | None = None
    """GLU interleave of the source, if it is not recorded."""
    format: FileFormat | None = None
    """File format of the result."""
    weights_only: bool = False
    """Whether to drop all optimizer state."""
    num_experts: int | None = None
    """Experts per layer, if keys and shapes do not determine it."""


@dataclass(frozen=True, kw_only=True)
class ConversionPlan(FilePlan):
    """Experts of all layers and their states, then all other tensors."""

    objects: tuple[str, ...]
    """Keys of objects to copy."""
    to: KeyLayout
    """Expert layout of the result."""
    source_interleave: int
    """GLU interleave of the source; 0 puts all gate rows first."""
    target_interleave: int
    """GLU interleave of the result; 0 puts all gate rows first."""
    format: FileFormat
    """File format of the result."""

    def place_of(self, part: Part, name: str) -> tuple[Place, int]:
        """Return where the tensor ``name``, which a ``part`` becomes, is stored.

        The second value is the number of layers of a tensor that stacks them.
        """
        if self.format == "safetensors":
            return super().place_of(part, name)
        place = self.view.places.get(name) if self.view.reader.format == "torch_dist" else None
        if place is None:
            return Place(name if part.experts is None else stored_key(name)), 0
        return place, self.view.reader.tensors[place.name].shape[0] if place.index else 0

    @property
    def _recorded(self) -> Recorded:
        counts = {one.num_experts for one in self.sets}
        return Recorded(
            layout=self.to.name,
            glu_interleave=self.target_interleave,
            num_experts=counts.pop() if len(counts) == 1 else None,
            iteration=self.view.recorded.iteration,
        )

    def _write_tensors(self, folder: Path, report: BytesDone, workers: int) -> None:
        if self.format == "safetensors":
            super()._write_tensors(folder, report, workers)
            return
        iteration = self.view.recorded.iteration
        with torch_dist_checkpoint(folder, iteration) as (into, writer):
            if self.stored is not None:
                _copy_objects(self, self.stored, into, writer, report)
            else:
                own = {INTERLEAVE_ARG: self.target_interleave}
                write_common_state(writer, iteration or 0, own)
            write_torch_dist(self, into, writer, report, workers)
            writer.finish(self.stored.config if self.stored is not None else None)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors and objects, without headers."""
        return super().total_bytes + sum(self.view.reader.objects[key] for key in self.objects)


def plan_conversion(view: LayerView, request: ConversionRequest) -> ConversionPlan:
    """Return the plan without reading tensor values.

    Args:
        view: view of the source.
        request: options of the conversion.

    Raises:
        ConfigError: the request contradicts itself or the checkpoint.
        LayoutError: experts or their states are incomplete, or cannot be converted.
    """
    reader = view.reader
    format = request.format or reader.format
    require_target(request.to.name, format, request.glu_interleave)
    to = request.to if format == "safetensors" else get_layout("grouped")
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
    require_experts(view, sets, len(view.tensors))
    _check_states(view, sets)
    before = known_interleave(view, request.source_glu_interleave)
    after = request.glu_interleave
    if after is None:  # only Megatron's layouts keep it
        after = before if to.name in STORED_ALIKE else 0
    sets.sort(key=lambda one: is_state(one.prefix))
    stays = reader.format == format == "torch_dist" and before == after
    experts = [_expert_part(view, one, to, before, after, stays=stays) for one in sets]
    others = kept_parts(view, without_experts(kept, sets))
    plan = ConversionPlan(
        view=view,
        files=by_layer(experts, others),
        objects=objects,
        left_out=(
            *(key for key in view.tensors if request.weights_only and is_state(key)),
            *(name for name in reader.objects if name not in objects),
        ),
        to=to,
        source_interleave=before,
        target_interleave=after,
        format=format,
    )
    if not stays:
        _check_interleaves(plan)
    return plan


def _expert_part(
    view: LayerView, one: ExpertSet, to: KeyLayout, before: int, after: int, *, stays: bool
) -> Part:
    target = replace(one, layout=to)
    convert = partial(convert_experts, source=one, target=target, rows=(before, after))
    return Part(
        sources=one.keys,
        nbytes=view.nbytes(one.keys),
        experts=one,
        convert_experts=None if stays else convert,
    )


def _refuse_flat_states(view: LayerView) -> None:
    flat = [key for key in view.tensors if FLAT_STATES in key]
    if flat:
        raise LayoutError(
            f"{view.reader.path}: expected optimizer states by parameter, got whole buckets "
            f"({flat[0]} and {len(flat) - 1} more). Load it at its own sizes and save with "
            "--dist-ckpt-optim-fully-reshardable, or convert with --weights-only."
        )


def _check_states(view: LayerView, sets: list[ExpertSet]) -> None:
    by_prefix = {one.prefix: one for one in sets}
    found = {prefix: match for prefix in by_prefix if (match := STATE_KIND.match(prefix))}
    if not found:
        return
    heads = _heads_of_states(view)
    trained = {prefix[match.end() :] for prefix, match in found.items()} & by_prefix.keys()
    expected = {f"{head}{name}": name for head in heads.values() for name in sorted(trained)}
    faults = [f"no {prefix}" for prefix in expected if prefix not in by_prefix]
    faults += [f"{prefix} without weights" for prefix in found if prefix not in expected]
    faults += [
        f"{prefix} of other experts than {weight}"
        for prefix, weight in expected.items()
        if prefix in by_prefix and replace(by_prefix[prefix], prefix=weight) != by_prefix[weight]
    ]
    if faults:
        raise LayoutError(
            f"{view.reader.path}: expected {' and '.join(sorted(heads))} of a layer's experts or "
            f"none, got {'; '.join(faults)}. Convert with --weights-only."
        )


def _heads_of_states(view: LayerView) -> dict[str, str]:
    """Return the key prefix of each kind of state that experts have, by kind.

    Beside states of Muon, those of Adam belong to other parameters.
    """
    heads = {match[1]: match[0] for match in map(STATE_KIND.match, view.tensors) if match}
    if MOMENTUM not in heads:
        return heads
    of_muon = heads[MOMENTUM].removesuffix(f"{MOMENTUM}.")
    return {kind: f"{of_muon}{kind}." for kind in (WHOLE_MASTER, MOMENTUM)}


def _check_interleaves(plan: ConversionPlan) -> None:
    check_row_order(plan.view, plan.source_interleave)
    path, first = plan.view.reader.path, plan.sets[0]
    if plan.source_interleave and not first.layout.can_interleave:
        raise LayoutError(
            f"{path}: expected a GLU interleave of 0 for the source layout {first.layout.name}, "
            f"whose gate and up rows are separate tensors, got {plan.source_interleave}."
        )
    for interleave in (plan.source_interleave, plan.target_interleave):
        bad = [one for one in plan.sets if interleave and one.ffn % interleave]
        if bad:
            raise LayoutError(
                f"{path}: {bad[0].prefix}: expected a GLU interleave that divides {bad[0].ffn}, "
                f"the width of its experts, got {interleave}. Give another."
            )


def convert_checkpoint(
    plan: ConversionPlan, target: Path, report: BytesDone = lambda _: None, *, workers: int = 1
) -> None:
    """Execute a plan; ``target`` appears when everything is written.

    A torch_dist checkpoint becomes a folder for ``--load``: one ``iter_*`` folder, or ``release``
    if no iteration is recorded, and Megatron's tracker file. A process holds 16 MiB at a time, or a
    stored chunk, an expert or a tensor that is no expert's where one is larger, and up to two
    copies of it.

    Args:
        plan: result of :func:`~moe_optim.commands.conversion.conversion.plan_conversion`.
        target: output path; must not exist.
        report: progress callback; receives the bytes converted since its last call.
        workers: number of processes that share the files; the bytes written are the same for any.

    Raises:
        ConfigError: ``target`` exists.
        StateError: a file of the source is damaged, the disk is full, or a process died.
        LayoutError: the source cannot record a changed GLU interleave.
    """
    plan.write(target, report, workers=workers)


def _copy_objects(
    plan: ConversionPlan,
    stored: TorchDistReader,
    folder: Path,
    writer: TorchDistWriter,
    report: BytesDone,
) -> None:
    for name in plan.objects:
        changed = _changed(plan, stored, name, stored.blobs[name][0])
        if changed is not None:
            writer.write_object(name, changed)
        else:
            writer.copy(stored, stored.blobs[name][0])
        report(plan.view.reader.objects[name])
    if (blob := stored.common_file) is not None:
        changed = _changed(plan, stored, COMMON_FILE, blob)
        with (folder / COMMON_FILE).open("wb") as file:
            file.writelines(stored.blocks(blob) if changed is None else [changed])


def _changed(plan: ConversionPlan, stored: TorchDistReader, name: str, blob: Blob) -> bytes | None:
    """Return an object with the new interleave; None if nothing changes."""
    if plan.source_interleave == plan.target_interleave:
        return None
    in_manifest = MANIFEST_INTERLEAVE if f".{MANIFEST}." in name else None
    key = INTERLEAVE_ARG if name in (stored.common_key, COMMON_FILE) else in_manifest
    if key is None:
        return None
    try:
        changed = replace_int(stored.read_bytes(blob), key, plan.target_interleave or None)
    except ValueError as error:
        raise StateError(
            f"{plan.view.reader.path}: expected {name} as Megatron saves it, got: {error}. The "
            "checkpoint is damaged: use another one."
        ) from error
    if changed is None:
        raise LayoutError(
            f"{plan.view.reader.path}: expected {key} in its metadata, to change it "
            f"to {plan.target_interleave}, got none. Convert with --format safetensors."
        )
    return changed
