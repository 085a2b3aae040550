"""Recommendation of a plan: format, reason, and whether the weights fit a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_optim.commands.plan.costs import STOCK_BF16, PlanRow
from moe_optim.commands.plan.experts import PlannedExperts, is_native
from moe_optim.config.recipes import Recipe
from moe_optim.formats import FORMATS
from moe_optim.integration.argv import last_value, spell_format
from moe_optim.rules import native_formats
from moe_optim.spelling import spell_bytes

GIB = 2**30


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


def find_choice(recipe: Recipe, argv: Sequence[str], experts: PlannedExperts) -> Choice:
    """Return the formats that a recipe can use without becoming a different model.

    4-bit and 8-bit weights give different models: neither is proposed in place of the other. A
    row-only format is that of an inference engine, and is kept.

    Raises:
        LayoutError: the weights do not fit the recipe's format.
    """
    own = spell_format(recipe.moe_optim.format, argv)
    if own in FORMATS:
        for weight, shape in experts.weights:
            FORMATS[own].check_shape(shape, f"{recipe.path}: {weight}")
    if is_native(experts.args):
        bits = "fp8" if "--fp8-param-gather" in argv else "fp4"
        default = {"fp8": "delayed", "fp4": "nvfp4"}[bits]  # Megatron's default
        flag = f"--{bits}-recipe {last_value(argv, f'--{bits}-recipe') or default}"
        if not (candidates := native_formats(flag)):
            return Choice(own=own, candidates=(), why=f"weights of {flag} stay Megatron's")
        why, keeps_own = f"that {flag} supports", own in candidates
        return Choice(own=own, candidates=candidates, why=why, keeps_own=keeps_own)
    if not experts.is_portable:
        return Choice(own=own, candidates=(), why="its flags keep bf16 weights")
    if own in FORMATS and FORMATS[own].is_row_only:
        return Choice(own=own, candidates=(own,), why="with its codes and scales")
    wanted = FORMATS[own].element_bits if own in FORMATS else 8
    names = tuple(
        name
        for name, format in FORMATS.items()
        if format.element_bits == wanted and not format.is_row_only
    )
    return Choice(
        own=own,
        candidates=names,
        why=f"with {wanted} bits, which portable experts support on any GPU",
    )


def recommend(choice: Choice, rows: Sequence[PlanRow], gpu_memory: float | None) -> str:
    """Return the recommended format, the reason, and whether it fits ``gpu_memory`` GiB."""
    if not choice.candidates:
        return (
            f"Recommended: none of these for this recipe, as {choice.why}. Add "
            "--fp8-recipe blockwise --fp8-param-gather for fp8_block on Hopper, or "
            "--fp8-recipe mxfp8 --fp8-param-gather on Blackwell."
        )
    named = {row["format"]: row for row in rows}
    best = min(
        (named[name] for name in choice.candidates if name in named),
        key=lambda row: (row["total_bytes_per_rank"], row["gathered_bytes_per_step"]),
    )
    name, bf16, gpus = best["format"], named[STOCK_BF16], best["gpus"]
    gathered = best["gathered_bytes_per_step"] / bf16["gathered_bytes_per_step"]
    among = "the only format" if len(choice.candidates) == 1 else "the least memory of formats"
    said = (
        f"Recommended: {name}, {among} {choice.why}. At {gpus:,} GPU{'s' * (gpus != 1)} its "
        f"experts use {spell_bytes(best['total_bytes_per_rank'])} per rank, "
        f"{_against(best['against_stock_bf16_bytes'], 'stock bf16')}"
    )
    if best["against_stock_bytes"] is not None:
        said += f" and {_against(best['against_stock_bytes'], f'stock {name}')}"
    said += f"; the all-gather transfers {gathered:.2f} of stock bf16's bytes."
    if name != choice.own:
        rest = "keep it to resume a run, for a new one add" if choice.keeps_own else "instead add"
        said += f" The recipe uses {choice.own}; {rest} --set moe_optim.format={name}."
    if gpu_memory is None:
        return said
    left = bytes_left(best["total_bytes_per_rank"], gpu_memory)
    if left < 0:
        return (
            f"{said} It does not fit {gpu_memory:g} GiB: {spell_bytes(-left)} are missing. Use "
            "more GPUs, or more expert or pipeline parallelism."
        )
    return (
        f"{said} It fits {gpu_memory:g} GiB and leaves {spell_bytes(left)} for dense weights, "
        "their optimizer and activations."
    )


def bytes_left(total: int, gpu_memory: float) -> float:
    """Return the bytes left on a GPU of ``gpu_memory`` GiB; negative if experts do not fit."""
    return gpu_memory * GIB - float(total)


def _against(difference: float, what: str) -> str:
    if difference == 0:
        return f"as much as {what}"
    return f"{spell_bytes(abs(difference))} {'less' if difference < 0 else 'more'} than {what}"
