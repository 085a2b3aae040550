"""Tables of the documents that are generated from the code."""

import argparse
import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from math import prod

from moe_optim.config import MoEOptimConfig, field_names, spell, spell_values
from moe_optim.experts.keys.layouts import LAYOUTS
from moe_optim.formats import FORMATS, BlockScaledFormat
from moe_optim.formats.health_figures import THRESHOLDS
from moe_optim.integration import patches
from moe_optim.integration.arguments import add_moe_optim_arguments
from moe_optim.rollout.conventions import CONVENTIONS, ONE_SCALE
from moe_optim.rules import RULES
from moe_optim.version import VERSION
from tools.rooms import ORDER

PATCH_GROUPS = {
    "training from the wheel": patches.DATASETS,
    "`moe-optim train`": patches.ENTRY,
    "`moe-optim run`, or plain `python` once enabled, with the flag": patches.SCRIPT,
    "where Transformer Engine and apex are absent": patches.ADAM,
    "the CPU runtime": patches.CPU,
    "the portable experts": patches.EXPERTS,
    "the optimizer": patches.OPTIMIZER,
    "optimizers that were built": patches.CHECKPOINTS,
    "`--ckpt-format torch`": patches.CHECKPOINTS_OF_RANKS,
}
"""Group of patches -> rows of the patch table."""

SHAPE = (1, 4096, 7168)
"""[E, R, C] of a weight with whole blocks in every format."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in lines)


def in_markdown(text: str) -> str:
    """Return a docstring as one line of Markdown."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def field_docs(cls: type) -> dict[str, str]:
    (tree,) = ast.parse(inspect.getsource(cls)).body
    docs = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and is_text:
            docs[field.target.id] = in_markdown(below.value.value)
    return docs


def knobs() -> str:
    docs = field_docs(MoEOptimConfig)
    return "\n".join(f"- **`{name}`** ({_values(name)}): {docs[name]}" for name in field_names())


def _values(name: str) -> str:
    default = spell(getattr(MoEOptimConfig(), name))
    values = [value.removeprefix("a number ") for value in spell_values(name)]
    if default not in values:  # a range
        return f"`{default}`, {values[0]}"
    return ", ".join(f"`{value}`" for value in sorted(values, key=lambda value: value != default))


def weight_bytes(format: BlockScaledFormat | None, *, in_te: bool = False) -> Fraction:
    """Return the bytes per parameter of a weight on each rank; None is bf16.

    Args:
        format: format of the weight.
        in_te: whether to include the scales of Transformer Engine's classes, without padding.
    """
    if format is None:
        return Fraction(2)
    _, rows, cols = SHAPE
    total = Fraction(0)
    for direction in format.directions:
        scales = (
            format.storage_scale_shape(rows, cols, direction)
            if in_te
            else format.scale_shape(SHAPE, direction)
        )
        total += Fraction(prod(scales) * format.scale_dtype.itemsize, prod(SHAPE))
        if direction == "rowwise" or format.columnwise_copy != "shared":
            total += format.data_bytes_per_element
    return total


def formats() -> str:
    return table(
        [
            *("format", "element", "block", "scale", "columnwise copy"),
            *("all-gather", "portable", "Transformer Engine"),
        ],
        [
            ["`bf16`", "bf16", "", "", "none", "2.00", "2.00", "2.00"],
            *(_format_row(format) for format in FORMATS.values()),
        ],
    )


def _format_row(format: BlockScaledFormat) -> list[str]:
    rows, cols = format.rowwise_block
    copies = {
        "quantized": "quantized separately",
        "shared": "shares the data",
        "transposed": "transposed data",
        "none": "none",
    }
    scales = {
        "e8m0": "E8M0",
        "e4m3": "E4M3",
        "power_of_two": "fp32 power of two",
        "fp32": "fp32",
        "bf16": "bf16",
    }
    scale = scales[format.scale_encoding]
    has_two_blocks = len(format.gathered_directions) == 2
    if format.has_global_amax:
        scale += ", and an fp32 amax per expert"
    return [
        f"`{format.name}`",
        format.element.upper(),
        f"{rows}x{cols}" + (f" and {cols}x{rows}" if has_two_blocks else ""),
        scale,
        copies[format.columnwise_copy],
        f"{float(format.gathered_bytes_per_element):.2f}",
        f"{float(weight_bytes(format)):.2f}",
        "none" if format.is_row_only else f"{float(weight_bytes(format, in_te=True)):.2f}",
    ]


def patch_rows() -> str:
    rows = []
    for who, group in PATCH_GROUPS.items():
        rows.append([f"**{who}**", "", "", "", ""])
        for patch in group:
            target = patch.target.removeprefix("megatron.")
            forms = "<br>".join(f"`{form}`" for form in (patch.form, *patch.other_forms))
            columns = [f"`{patch.id}`", f"`{target}`", forms]
            rows.append([*columns, patch.because, patch.remove_when])
    return table(["id", "target", "which is", "because", "can go when"], rows)


def flags() -> str:
    parser = add_moe_optim_arguments(argparse.ArgumentParser(add_help=False))
    names = (" ".join(filter(None, (a.option_strings[0], a.metavar))) for a in parser._actions)
    helps = (in_markdown(a.help) for a in parser._actions)
    return "\n".join(f"- `{name}`: {text}" for name, text in zip(names, helps, strict=True))


def expert_layouts() -> str:
    return table(
        ["layout", "keys after `...experts.`", "shape"],
        (
            [
                f"`{layout.name}`",
                "<br>".join(f"`{p.template.format(expert='N')}`" for p in layout.patterns),
                "<br>".join(f"[{', '.join(p.stored)}]" for p in layout.patterns).replace("*", " "),
            ]
            for layout in LAYOUTS.values()
        ),
    )


def conventions() -> str:
    """Return the tensor names of each convention, the default of a format first."""
    every = (*CONVENTIONS, ONE_SCALE)
    dtypes = {one.data_dtype for one in every} | {one.scale_dtype for one in every}
    short = {dtype: str(dtype).removeprefix("torch.") for dtype in dtypes}
    of_global = {None: "", False: "float32 [], multiplies", True: "float32 [1], divides"}
    names: dict[tuple[str, ...], list[str]] = {}  # other cells of a row -> its conventions
    for one in every:
        scales = "[R, 1]"
        if one is not ONE_SCALE:
            height, width = one.scale_block
            scales = f"[R{_over(height)}, C{_over(width)}]"
        tensors = [
            f"`{one.data}` {short[one.data_dtype]} [R, C{_over(one.elements)}]",
            f"`{one.scale}` {short[one.scale_dtype]} {scales}",
            f"`{one.global_scale}` {of_global[one.divides]}" if one.global_scale else "",
        ]
        if one.shape is not None:
            tensors[1] += f"; `{one.shape}` int64 [2]"
        name = "per-tensor scaling" if one is ONE_SCALE else f"`{one.format}`"
        cells = (name, *tensors, ", ".join(one.engines))
        names.setdefault(cells, []).append(f"`{one.name}`")
    rows = ([format, ", ".join(named), *cells] for (format, *cells), named in names.items())
    header = ["format", "convention", "elements", "scales", "global scale", "read by"]
    return table(header, rows)


def _over(divisor: int) -> str:
    return "" if divisor == 1 else f"/{divisor}"


def floors() -> str:
    rows = enumerate(ORDER)
    return table(
        ["layer", "modules"],
        (
            [
                str(floor),
                ", ".join("`moe_optim` itself" if r == "." else f"`{r}`" for r in line.split()),
            ]
            for floor, line in rows
        ),
    )


def health_thresholds() -> str:
    formats: dict[tuple[tuple[str, float], ...], list[str]] = {}
    for format, limits in THRESHOLDS.items():
        formats.setdefault(tuple(limits.items()), []).append(f"`{format}`")
    return table(
        ["format", *(f"`{figure}`" for figure in THRESHOLDS["mxfp8"])],
        (
            [", ".join(names), *(f"{limit:g}" for _, limit in limits)]
            for limits, names in formats.items()
        ),
    )


def refusals() -> str:
    """Return the refused settings of each scope, one per line of a cell."""
    found: dict[str, list[str]] = {}
    for rule in RULES:
        if rule.effect == "refuse":
            values = f" ({rule.reason})" if rule.remedy == "Give one of them" else ""
            name = rule.name.removesuffix(f" with {rule.scope}").rstrip(",")
            found.setdefault(rule.scope, []).append(_flags(name + values))
    return table(["in", "refused"], ([scope, "<br>".join(names)] for scope, names in found.items()))


def stock_steps() -> str:
    """Return what makes a step Megatron's, with remedies; an item for what has the same one."""
    found: dict[str, list[str]] = {}
    for rule in RULES:
        if rule.effect == "stock step":
            found.setdefault(rule.remedy, []).append(_flags(rule.name))
    return "\n".join(
        f"- {'; '.join(names)}: {remedy[0].lower()}{_flags(remedy[1:])}"
        for remedy, names in found.items()
    )


def _flags(text: str) -> str:
    """Return the text of a rule in Markdown: flags, settings and variables as code."""
    words = "|".join(name for name in field_names() if "_" in name)
    code = (
        r"--[a-z][a-z0-9-]+\*?(?: \w+=\w+)?",
        rf"\b(?:{'|'.join(field_names())}): \w+(?=$|[ ,;)])",
        rf"\b(?:(?:{words})(?:=\w+)?|use_\w+|NVTE_\w+(?:=\w+)?)\b",
        r"\b\w+(?:\.[a-z]\w+)+(?:=\w+|\(\))?",
        r"pip install '\S+'",
    )
    return re.sub("|".join(code), r"`\g<0>`", text)


def status() -> str:
    """Return version and maturity of the package, for the README."""
    return f"**Version {VERSION}, alpha**: names, knobs and files may still change."


CODE_TABLES: Mapping[str, Callable[[], str]] = {
    "conventions": conventions,
    "expert-layouts": expert_layouts,
    "flags": flags,
    "floors": floors,
    "formats": formats,
    "health-thresholds": health_thresholds,
    "knobs": knobs,
    "patches": patch_rows,
    "refusals": refusals,
    "status": status,
    "stock-steps": stock_steps,
}
