"""Finds the experts of a checkpoint, their keys and row order."""

from collections.abc import Collection, Iterable, Mapping

import torch

from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.commands.conversion.layer_view import STATE_KIND, LayerView
from moe_optim.commands.conversion.model_sources import configured_experts
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.experts.keys.finding import find_expert_sets, survey_expert_sets
from moe_optim.experts.keys.layouts import STORED_ALIKE, ExpertSet, KeyLayout, get_layout

STORED = "experts.experts."
"""Part of the ``torch_dist`` names of expert tensors other than weights."""


def find_experts(
    view: LayerView,
    keys: Collection[str],
    *,
    layout: KeyLayout | None = None,
    num_experts: int | None = None,
) -> list[ExpertSet]:
    """Return the experts of every layer, including states.

    ``layout`` None means the recorded layout, or any that matches.

    Raises:
        ConfigError: another layout is recorded.
        LayoutError: experts are incomplete, or match several layouts.
    """
    try:
        return find_expert_sets(
            _shapes(view, keys),
            layouts=source_layouts(view, layout),
            num_experts=num_experts or _said_experts(view),
        )
    except LayoutError as error:
        refuse_quantized(view, [key for key in keys if ".experts." in key])
        raise LayoutError(f"{view.reader.path}: {error}") from error


def require_experts(view: LayerView, sets: Collection[ExpertSet], tensors: int) -> None:
    """Raise LayoutError if ``sets`` is empty; ``tensors`` is the number of tensors searched."""
    if not sets:
        raise LayoutError(
            f"{view.reader.path}: expected weights of gated experts, got none among {tensors:,} "
            "tensors. `moe-optim inspect` lists its contents."
        )


def is_quantized(info: TensorInfo) -> bool:
    """Return whether elements are codes that need scales."""
    if info.dtype == torch.int32:  # eight codes per word
        return len(info.shape) == 2
    return info.dtype.itemsize == 1 and info.dtype != torch.bool


def refuse_quantized(view: LayerView, keys: Iterable[str]) -> None:
    """Raise one LayoutError if any of ``keys`` contains codes of a quantized weight."""
    found = [key for key in keys if is_quantized(view.tensors[key])]
    if found:
        info = view.tensors[found[0]]
        raise LayoutError(
            f"{view.reader.path}: expected weights in bf16, fp16 or fp32, got {len(found):,} "
            f"tensors that are quantized, such as {found[0]}, {info.dtype} {list(info.shape)}. "
            "Take the checkpoint that they were quantized from, or dequantize them: `moe-optim "
            "convert --to hf` reads what the quantization_config in config.json declares."
        )


def survey_experts(
    view: LayerView,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    num_experts: int | None = None,
) -> tuple[list[ExpertSet], list[str]]:
    """Return the complete experts of every layer, and faults; ``shapes`` overrides stored ones."""
    return survey_expert_sets(
        _shapes(view, view.tensors) if shapes is None else shapes,
        layouts=source_layouts(view, None),
        num_experts=num_experts or _said_experts(view),
    )


def _said_experts(view: LayerView) -> int | None:
    """Return the experts per layer recorded in the checkpoint or its ``config.json``."""
    return view.recorded.num_experts or configured_experts(view.reader)


def _shapes(view: LayerView, keys: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return shapes by key, without states of routers beside stateless frozen experts."""
    found = {key: STATE_KIND.match(key) for key in keys if STORED not in key}
    trained = {
        module
        for key, state in found.items()
        if state and (module := key[state.end() :].rpartition("experts.")[0])
    }
    return {
        key: view.tensors[key].shape
        for key, state in found.items()
        if not state
        or not key.endswith("router.weight")
        or key[state.end() :].removesuffix("router.weight") in trained
    }


def without_experts(keys: Iterable[str], sets: Iterable[ExpertSet]) -> tuple[str, ...]:
    """Return the keys that are not in ``sets``."""
    taken = {key for one in sets for key in (*one.keys, *one.extra_states)}
    return tuple(key for key in keys if key not in taken)


def source_layouts(view: LayerView, given: KeyLayout | None) -> list[KeyLayout] | None:
    """Return the candidate layouts (None: any); ConfigError if ``given`` is not one."""
    if view.reader.format == "torch_dist":
        if given and given.name not in STORED_ALIKE:
            raise ConfigError(
                f"--from {given.name}: expected one of {', '.join(STORED_ALIKE)}, as which "
                f"torch_dist stores experts, got another for {view.reader.path}. Leave it out."
            )
        return [get_layout("grouped")]
    recorded = view.recorded.layout
    if given and recorded and given.name != recorded:
        raise ConfigError(
            f"--from {given.name}: {view.reader.path} records layout {recorded}. Leave --from out."
        )
    name = given.name if given else recorded
    return [get_layout(name)] if name else None


def known_interleave(view: LayerView, given: int | None) -> int:
    """Return the given or recorded GLU interleave, else 0; ConfigError if the two differ."""
    recorded = view.recorded.glu_interleave
    if given is not None and recorded is not None and given != recorded:
        raise ConfigError(
            f"--source-glu-interleave {given}: {view.reader.path} records a GLU interleave of "
            f"{recorded}. Leave --source-glu-interleave out."
        )
    return (recorded or 0) if given is None else given


def check_row_order(view: LayerView, interleave: int) -> None:
    """Raise LayoutError for rows interleaved within each expert-tensor-parallel rank's shard.

    Megatron stores the first half of the rows of all ranks, then the second half of all.
    """
    ranks = view.recorded.parallel_sizes.get("expert tensor", 1)
    if interleave and ranks > 1:
        raise LayoutError(
            f"{view.reader.path}: expected interleaved rows of whole experts, got those of experts "
            f"cut by --expert-tensor-parallel-size {ranks}, stored in another order. Train without "
            "one of the two, or keep the interleave."
        )
