"""Executes a conversion one set of experts at a time."""

from pathlib import Path

from torch import Tensor

from moe_optim.checkpoint.files.folders import COMMON_FILE
from moe_optim.checkpoint.files.metadata import Blob
from moe_optim.checkpoint.files.publishing import published
from moe_optim.checkpoint.files.reader import Recorded
from moe_optim.checkpoint.files.torch_dist import (
    INTERLEAVE_ARG,
    MANIFEST_INTERLEAVE,
    TorchDistReader,
)
from moe_optim.checkpoint.state_manifest import MANIFEST
from moe_optim.commands.conversion.conversion_plan import ConversionPlan
from moe_optim.commands.conversion.file_plan import (
    BytesDone,
    Part,
    one_thread,
    torch_dist_checkpoint,
    write_common_state,
    write_layer,
    write_safetensors,
)
from moe_optim.commands.conversion.layer_view import stored_key
from moe_optim.commands.conversion.object_edits import replace_entries, replace_int
from moe_optim.commands.conversion.torch_dist_writer import TorchDistWriter
from moe_optim.errors import LayoutError, StateError


def convert_checkpoint(
    plan: ConversionPlan, target: Path, report: BytesDone = lambda _: None
) -> None:
    """Execute a plan; ``target`` appears when everything is written.

    A torch_dist checkpoint becomes a folder for ``--load``: one ``iter_*`` folder, or ``release``
    if no iteration is recorded, and Megatron's tracker file.

    Args:
        plan: result of :func:`~moe_optim.commands.conversion.conversion_plan.plan_conversion`.
        target: output path; must not exist.
        report: progress callback; receives the bytes converted since its last call.

    Raises:
        ConfigError: ``target`` exists.
        StateError: a file of the source is damaged, or the disk is full.
        LayoutError: the source cannot record a changed GLU interleave.
    """
    iteration = plan.view.recorded.iteration
    with one_thread(), published(target, needed_bytes=plan.disk_bytes) as folder:
        if plan.format == "safetensors":
            counts = {one.num_experts for one in plan.sets}
            recorded = Recorded(
                layout=plan.to.name,
                glu_interleave=plan.target_interleave,
                num_experts=counts.pop() if len(counts) == 1 else None,
                iteration=iteration,
            )
            write_safetensors(plan, folder, recorded, report)
        else:
            with torch_dist_checkpoint(folder, iteration) as (into, writer):
                _write_torch_dist(plan, into, writer, report)


def _write_torch_dist(
    plan: ConversionPlan, folder: Path, writer: TorchDistWriter, report: BytesDone
) -> None:
    stored = plan.stored
    if stored is not None:
        _copy_objects(plan, stored, folder, writer, report)
    else:
        own = {INTERLEAVE_ARG: plan.target_interleave}
        write_common_state(writer, plan.view.recorded.iteration or 0, own)
    copied: set[str] = set()
    for part in plan.parts:
        names = {plan.view.places[key].name for key in part.sources}
        is_kept = part.experts is None or plan.copies_experts
        if stored is not None and is_kept and names <= stored.tensors.keys():
            for name in sorted(names - copied):  # of all layers, if stacked
                writer.copy(stored, name)
                report(stored.tensors[name].nbytes)
            copied |= names
        else:
            for key, tensor in plan.convert(part).items():
                _write_tensor(plan, writer, part, key, tensor)
            report(part.nbytes)
    writer.finish(stored.config if stored is not None else None)


def _write_tensor(
    plan: ConversionPlan, writer: TorchDistWriter, part: Part, key: str, tensor: Tensor
) -> None:
    """Write one tensor under its stored name, stacked with other layers if the source stacks it."""
    place = plan.view.places.get(key) if plan.view.reader.format == "torch_dist" else None
    if place is not None and place.layer is not None:
        layers = plan.view.reader.tensors[place.name].shape[0]
        write_layer(writer, place.name, tensor, place.layer, layers)
    elif place is not None:
        writer.write_whole(place.name, tensor)
    else:
        writer.write_whole(key if part.experts is None else stored_key(key), tensor)


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
            writer.copy(stored, name)
        report(plan.view.reader.objects[name])
    if (blob := stored.common_file) is not None:
        changed = _changed(plan, stored, COMMON_FILE, blob)
        with (folder / COMMON_FILE).open("wb") as file:
            file.writelines(stored.blocks(blob) if changed is None else [changed])


def _changed(plan: ConversionPlan, stored: TorchDistReader, name: str, blob: Blob) -> bytes | None:
    """Return an object with the new interleave and entries; None if nothing changes."""
    is_common = name in (stored.common_key, COMMON_FILE)
    key = None
    if plan.source_interleave != plan.target_interleave:
        in_manifest = MANIFEST_INTERLEAVE if f".{MANIFEST}." in name else None
        key = INTERLEAVE_ARG if is_common else in_manifest
    entries = plan.common_entries if is_common else {}
    if key is None and not entries:
        return None
    content = stored.read_bytes(blob)
    try:
        rows = plan.target_interleave or None
        changed = content if key is None else replace_int(content, key, rows)
        if changed is not None and entries:
            changed = replace_entries(changed, entries)
    except ValueError as error:
        raise StateError(
            f"{plan.view.reader.path}: expected {name} as Megatron saves it, got: {error}. The "
            "checkpoint is damaged: take another one."
        ) from error
    if changed is None:
        raise LayoutError(
            f"{plan.view.reader.path}: expected {key} in its metadata, to change it "
            f"to {plan.target_interleave}, got none. Convert with --format safetensors."
        )
    return changed
