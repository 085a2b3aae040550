"""Recommendation of a plan: format, reason, and whether the weights fit a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moe_optim.commands.plan.costs import STOCK_BF16
from moe_optim.commands.plan.experts import PlannedExperts, is_native
from moe_optim.commands.plan.gpus import GPUS, PlannedGpu
from moe_optim.commands.plan.rows import PlanRow
from moe_optim.config import MoEOptimConfig, field_names, spell
from moe_optim.config.recipes import Recipe
from moe_optim.formats import FORMATS
from moe_optim.integration.arguments import FLAG
from moe_optim.integration.argv import last_value, spell_format
from moe_optim.rules import native_formats
from moe_optim.spelling import spell_bytes, spell_number

GIB = 2**30
_COMMON = ("mxfp8", "nvfp4", "fp8_block")
"""Formats of Megatron's flags that keep weights quantized."""
_OF_MXFP8 = "--reuse-grad-buf-for-mxfp8-param-ag"
_NOT_OF_BLOCKS = _OF_MXFP8, "--moe-single-grouped-weight", "--moe-single-grouped-bias"
"""Flags that Megatron does not take with blockwise FP8, or that have no effect there."""
_BLACKWELL_FORMATS = frozenset(("mxfp8", "mxfp8_2d", "nvfp4"))
"""Formats whose GEMMs Transformer Engine has on Blackwell only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Formats that a recipe's weights can be kept in."""

    own: str
    """Format of the recipe."""
    candidates: tuple[str, ...]
    """Formats to choose from; empty if the recipe's weights are not managed by this package."""
    why: str
    keeps_own: bool = True
    """Whether a run can use the recipe's format."""
    default: str = "bf16"
    """Format that a run uses with ``format: auto``."""
    has_bf16: bool = False
    """Whether Transformer Engine's experts stay bf16 because no flag quantizes them."""
    missing_gemms: str = ""
    """What Transformer Engine lacks on a known GPU for the recipe's weights."""

    def rows_to_show(self) -> list[str]:
        """Return the formats to compare, each with stock's row; without candidates the common."""
        names = dict.fromkeys(self.candidates or ("bf16", *_COMMON))
        kept = names | ({self.own: None} if self.own in FORMATS else {})
        return [*kept, STOCK_BF16, *(f"stock {name}" for name in kept)]


def find_choice(
    recipe: Recipe, argv: Sequence[str], experts: PlannedExperts, gpu: str | None = None
) -> Choice:
    """Return the formats that a recipe can use; LayoutError if the weights do not fit its own.

    4-bit and 8-bit weights give different models: neither is proposed in place of the other. A
    row-only format is that of an inference engine, and is kept. ``gpu`` is a key of ``GPUS``.
    """
    own, default = (spell_format(one, argv) for one in (recipe.moe_optim.format, "auto"))
    choose: Any = partial(Choice, own=own, default=default)
    if own in FORMATS:
        for weight, shape in experts.weights:
            FORMATS[own].check_shape(shape, f"{recipe.path}: {weight}")
    if is_native(experts.args):
        bits = "fp8" if "--fp8-param-gather" in argv else "fp4"
        recipe_name = {"fp8": "delayed", "fp4": "nvfp4"}[bits]  # Megatron's default
        flag = f"--{bits}-recipe {last_value(argv, f'--{bits}-recipe') or recipe_name}"
        candidates = native_formats(flag)
        if not candidates:
            return choose(candidates=(), why=f"weights of {flag} stay Megatron's")
        is_hopper = gpu is not None and not GPUS[gpu].is_blackwell
        if not is_hopper or _BLACKWELL_FORMATS.isdisjoint(candidates):
            why = f"that {flag} supports"
            return choose(candidates=candidates, why=why, keeps_own=own in candidates)
        said = f"--gpu {gpu}: Transformer Engine has GEMMs for {flag} on Blackwell only"
        choose = partial(choose, keeps_own=False)
        if bits == "fp4":
            why = f"Transformer Engine has no 4-bit GEMMs on {gpu}"
            missing = f"{said}. Name a Blackwell GPU."
            return choose(candidates=(), why=why, missing_gemms=missing)
        excess = ", ".join(word for word in argv if word in _NOT_OF_BLOCKS)
        missing = f"{said}: the flags below replace it{f'; remove {excess}' * bool(excess)}."
        blocks, why = native_formats("--fp8-recipe blockwise"), f"with 8-bit GEMMs on {gpu}"
        return choose(candidates=blocks, default=blocks[0], why=why, missing_gemms=missing)
    if own == "bf16" and recipe.moe_optim.compute is not None:
        why = f"compute: {recipe.moe_optim.compute} keeps bf16 weights"
        return choose(candidates=(), why=why)
    if not experts.is_portable:
        return choose(candidates=(), why="its flags keep bf16 weights", has_bf16=True)
    if own in FORMATS and FORMATS[own].is_row_only:
        return choose(candidates=(own,), why="with its codes and scales")
    wanted = FORMATS[own].element_bits if own in FORMATS else 8
    alike = (one for one in FORMATS.values() if one.element_bits == wanted and not one.is_row_only)
    why = f"with {wanted} bits, which portable experts support on any GPU"
    return choose(candidates=tuple(one.name for one in alike), why=why)


def recommend(choice: Choice, rows: Sequence[PlanRow]) -> PlanRow | None:
    """Return the row of the format with least memory among the candidates; None without any."""
    named = {row["format"]: row for row in rows}
    return min(
        (named[name] for name in choice.candidates if name in named),
        key=lambda row: (row["total_bytes_per_rank"], row["gathered_bytes_per_step"]),
        default=None,
    )


def explain(choice: Choice, best: PlanRow | None, rows: Sequence[PlanRow]) -> str:
    """Return the recommended format, the reason, and what its experts save, as a sentence."""
    if choice.has_bf16:
        return (
            "The given flags keep weights in bf16. Those below quantize them: in blockwise FP8 "
            "for Hopper, or in MXFP8 if --gpu names a Blackwell GPU."
        )
    if best is None:
        return f"Recommended: none of these formats, as {choice.why}."
    bf16 = next(row for row in rows if row["format"] == STOCK_BF16)
    name, gpus = best["format"], spell_number(best["gpus"], "GPU")
    gathered = best["gathered_bytes_per_step"] / bf16["gathered_bytes_per_step"]
    among = "the only format" if len(choice.candidates) == 1 else "the least memory of formats"
    said = (
        f"Recommended: {name}, {among} {choice.why}. At {gpus} its "
        f"experts use {spell_bytes(best['total_bytes_per_rank'])} per rank, "
        f"{_against(best['against_stock_bf16_bytes'], 'stock bf16')}"
    )
    if best["against_stock_bytes"] is not None:
        said += f" and {_against(best['against_stock_bytes'], f'stock {name}')}"
    said += f"; the all-gather transfers {gathered:.2f} of stock bf16's bytes."
    if name != choice.own and not choice.missing_gemms:
        rest = "keep it to resume a run" if choice.keeps_own else "no run can use it"
        said += f" The recipe uses {choice.own}; {rest}."
    return said


def explain_fit(row: PlanRow, memory_gib: float, why_unknown: str) -> str:
    """Return whether the whole model fits a GPU, and what is left for activations."""
    total = row["model_bytes_per_rank"]
    where = f"{row['format']} at {spell_number(row['gpus'], 'GPU')}"
    if total is None:
        return (
            f"Whether the model fits is unknown: {why_unknown}. Experts alone take "
            f"{spell_bytes(row['total_bytes_per_rank'])} of {memory_gib:.1f} GiB."
        )
    left = bytes_left(total, memory_gib)
    needs = f"weights, gradients and optimizer take {spell_bytes(total)} of {memory_gib:.1f} GiB"
    if left < 0:
        return (
            f"{where} does not fit: {needs}. Use more GPUs, or more expert, tensor or pipeline "
            "parallelism."
        )
    return f"{where} fits: {needs} and leave {spell_bytes(left)} for activations."


def flags_to_add(
    choice: Choice, best: PlanRow | None, config: MoEOptimConfig, gpu: PlannedGpu | None
) -> list[str]:
    """Return the flags that a run adds to Megatron's own."""
    flags = [FLAG]
    format = best["format"] if best else config.format
    changed = {"format": format} if format != (choice.default if best else "auto") else {}
    changed |= {
        name: spell(value)
        for name in field_names()
        if name not in ("expert_layout", "format")
        and (value := getattr(config, name)) != getattr(MoEOptimConfig(), name)
    }
    for name, value in changed.items():
        flags += ["--moe-optim-set", f"{name}={value}"]
    if choice.missing_gemms:
        flags = [*_HOPPER, *flags] if best is not None else []
    if choice.has_bf16:
        flags = [*(_BLACKWELL if gpu and gpu.is_blackwell else _HOPPER), *flags]
    return flags


_HOPPER = ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--fp8-param-gather")
_BLACKWELL = (
    *("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8", "--fp8-param-gather"),
    _OF_MXFP8,
)
"""Flags that quantize Transformer Engine's weights with native GEMMs."""


def bytes_left(total: int, gpu_memory: float) -> float:
    """Return the bytes left on a GPU of ``gpu_memory`` GiB; negative if ``total`` does not fit."""
    return gpu_memory * GIB - float(total)


def _against(difference: float, what: str) -> str:
    if difference == 0:
        return f"as much as {what}"
    return f"{spell_bytes(abs(difference))} {'less' if difference < 0 else 'more'} than {what}"
