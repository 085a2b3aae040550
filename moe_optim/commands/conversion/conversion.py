"""Converting a checkpoint: a set of experts is read, converted and written before the next."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from moe_optim.checkpoint.files.folders import TRACKER
from moe_optim.checkpoint.files.publishing import published
from moe_optim.checkpoint.files.reader import Recorded, TensorInfo
from moe_optim.checkpoint.files.torch_dist import (
    COMMON_FILE,
    COMMON_STATE,
    INTERLEAVE_ARG,
    MANIFEST_INTERLEAVE,
    OWN_STATE,
    TorchDistReader,
)
from moe_optim.checkpoint.integrity import record_checksums
from moe_optim.checkpoint.state_manifest import MANIFEST
from moe_optim.commands.conversion.conversion_plan import ConversionPlan, output_folder
from moe_optim.commands.conversion.layer_view import stored_key
from moe_optim.commands.conversion.object_edits import replace_entries, replace_int
from moe_optim.commands.conversion.one_thread import one_thread
from moe_optim.commands.conversion.safetensors_files import SafetensorsWriter
from moe_optim.commands.conversion.torch_dist_writer import TorchDistWriter
from moe_optim.errors import LayoutError, StateError

Report = Callable[[int], None]
"""Takes how many bytes have been converted since the last call."""


def convert_checkpoint(plan: ConversionPlan, target: Path, report: Report = lambda _: None) -> None:
    """Carry out a plan; ``target`` appears when everything is written.

    A torch_dist checkpoint becomes a folder that ``--load`` takes: one ``iter_*`` folder, or
    ``release`` where no iteration is recorded, and Megatron's tracker file.

    Args:
        plan: what goes where.
        target: a path where nothing is yet.
        report: called with how many bytes have been converted since its last call.

    Raises:
        ConfigError: there is something at ``target`` already.
        StateError: a file of the source is damaged, or the disk is full.
        LayoutError: the source cannot record a changed GLU interleave.
    """
    with one_thread(), published(target, needed_bytes=plan.disk_bytes) as folder:
        if plan.format == "safetensors":
            _write_safetensors(plan, folder, report)
        else:
            into, said = output_folder(folder, plan.view.recorded.iteration)
            into.mkdir()
            with TorchDistWriter(into) as writer:
                _write_torch_dist(plan, into, writer, report)
            record_checksums(into)
            (folder / TRACKER).write_text(said)


def _write_safetensors(plan: ConversionPlan, folder: Path, report: Report) -> None:
    counts = {one.num_experts for one in plan.sets}
    recorded = Recorded(
        layout=plan.to.name,
        glu_interleave=plan.target_interleave,
        num_experts=counts.pop() if len(counts) == 1 else None,
        iteration=plan.view.recorded.iteration,
    )
    writer = SafetensorsWriter(folder, recorded)
    for expert_set in plan.sets:
        writer.write(plan.convert(expert_set))
        report(plan.set_bytes(expert_set))
    for keys in plan.other_files():
        writer.write({key: plan.view.read(key) for key in keys})
        report(plan.view.nbytes(keys))
    writer.finish()


def _write_torch_dist(
    plan: ConversionPlan, folder: Path, writer: TorchDistWriter, report: Report
) -> None:
    stored = plan.stored
    if stored is not None:
        _copy_objects(plan, stored, folder, writer, report)
    else:
        writer.write_object(f"{COMMON_STATE}/shard_0_1", _own_common_state(plan))
    copied: set[str] = set()
    for expert_set in plan.sets:
        names = {plan.view.places[key].name for key in expert_set.keys}
        if stored is not None and plan.copies_experts and names <= stored.tensors.keys():
            for name in sorted(names - copied):  # of all layers, where they are stored as one
                writer.copy(stored, name)
                report(stored.tensors[name].nbytes)
            copied |= names
        else:
            for key, tensor in plan.convert(expert_set).items():
                _write_expert_tensor(plan, writer, key, tensor)
            report(plan.set_bytes(expert_set))
    for key in plan.others:
        name = plan.view.places[key].name
        if stored is not None and name in stored.tensors:
            writer.copy(stored, name)
        else:
            info = plan.view.tensors[key]
            writer.write_chunk(key, info, (0,) * len(info.shape), plan.view.read(key))
        report(plan.view.tensors[key].nbytes)
    writer.finish(stored.config if stored is not None else None)


def _write_expert_tensor(
    plan: ConversionPlan, writer: TorchDistWriter, key: str, tensor: torch.Tensor
) -> None:
    """Write one tensor of one layer where the source has it, or by itself."""
    info = TensorInfo(tuple(tensor.shape), tensor.dtype)
    place = plan.view.places.get(key) if plan.view.reader.format == "torch_dist" else None
    if place is None:
        writer.write_chunk(stored_key(key), info, (0,) * tensor.ndim, tensor)
    elif place.layer is None:
        writer.write_chunk(place.name, info, (0,) * tensor.ndim, tensor)
    else:
        whole = plan.view.reader.tensors[place.name]
        writer.write_chunk(place.name, whole, (place.layer, *[0] * tensor.ndim), tensor[None])


def _copy_objects(
    plan: ConversionPlan,
    stored: TorchDistReader,
    folder: Path,
    writer: TorchDistWriter,
    report: Report,
) -> None:
    for name in plan.objects:
        changed = _changed(plan, stored, name, partial(stored.read_bytes, stored.blobs[name][0]))
        if changed is not None:
            writer.write_object(name, changed)
        else:
            writer.copy(stored, name)
        report(plan.view.reader.objects[name])
    if (blob := stored.common_file) is not None:
        changed = _changed(plan, stored, COMMON_FILE, partial(stored.read_bytes, blob))
        with (folder / COMMON_FILE).open("wb") as file:
            file.writelines(stored.blocks(blob) if changed is None else [changed])


def _changed(
    plan: ConversionPlan, stored: TorchDistReader, name: str, read: Callable[[], bytes]
) -> bytes | None:
    """Return an object as the result has it, None if that is how it is stored."""
    is_common = name in (stored.common_key, COMMON_FILE)
    key = _interleave_key(plan, name, is_common=is_common)
    entries = plan.common_entries if is_common else {}
    if key is None and not entries:
        return None
    content = read()
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
            f"{plan.view.reader.path}: expected {key} in what it says about itself, to change it "
            f"to {plan.target_interleave}, got none. Convert with --format safetensors."
        )
    return changed


def _interleave_key(plan: ConversionPlan, name: str, *, is_common: bool) -> str | None:
    """Return under which key an object names the interleave, if that changes."""
    if plan.source_interleave == plan.target_interleave:
        return None
    if is_common:
        return INTERLEAVE_ARG
    return MANIFEST_INTERLEAVE if f".{MANIFEST}." in name else None


def _own_common_state(plan: ConversionPlan) -> bytes:
    """Return the common state of a checkpoint that did not come from Megatron."""
    state = {
        "checkpoint_version": 3.0,  # as Megatron writes, above all for the order of QKV rows
        "iteration": plan.view.recorded.iteration or 0,
        OWN_STATE: {INTERLEAVE_ARG: plan.target_interleave},
    }
    content = io.BytesIO()
    torch.save([state], content)
    return content.getvalue()
