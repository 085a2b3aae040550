"""Executes a conversion one set of experts at a time."""

from pathlib import Path

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
    one_thread,
    torch_dist_checkpoint,
    write_common_state,
    write_safetensors,
    write_torch_dist,
)
from moe_optim.commands.conversion.object_edits import replace_entries, replace_int
from moe_optim.commands.conversion.torch_dist_writer import TorchDistWriter
from moe_optim.errors import LayoutError, StateError


def convert_checkpoint(
    plan: ConversionPlan, target: Path, report: BytesDone = lambda _: None, *, workers: int = 1
) -> None:
    """Execute a plan; ``target`` appears when everything is written.

    A torch_dist checkpoint becomes a folder for ``--load``: one ``iter_*`` folder, or ``release``
    if no iteration is recorded, and Megatron's tracker file. A process holds 16 MiB at a time, or a
    stored chunk, an expert or a tensor that is no expert's where one is larger, and up to two
    copies of it.

    Args:
        plan: result of :func:`~moe_optim.commands.conversion.conversion_plan.plan_conversion`.
        target: output path; must not exist.
        report: progress callback; receives the bytes converted since its last call.
        workers: number of processes that share the files; the bytes written are the same for any.

    Raises:
        ConfigError: ``target`` exists.
        StateError: a file of the source is damaged, the disk is full, or a process died.
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
            write_safetensors(plan, folder, recorded, report, workers)
        else:
            with torch_dist_checkpoint(folder, iteration) as (into, writer):
                if plan.stored is not None:
                    _copy_objects(plan, plan.stored, into, writer, report)
                else:
                    own = {INTERLEAVE_ARG: plan.target_interleave}
                    write_common_state(writer, iteration or 0, own)
                write_torch_dist(plan, into, writer, plan.jobs, report, workers)
                writer.finish(plan.stored.config if plan.stored is not None else None)


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
