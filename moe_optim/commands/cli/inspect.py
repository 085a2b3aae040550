"""Show the contents of a checkpoint, and check that it is complete.

Shows format, experts and their layout, optimizer state, amaxes, and other metadata of a torch_dist
or safetensors checkpoint; with --formats also the error that quantizing its experts would make. For
--ckpt-format torch, checks only that the files are complete. Exits with 1 if the checkpoint is
incomplete, with 2 if it cannot be read.
"""

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from moe_optim.checkpoint.files.folders import files_of_ranks
from moe_optim.commands.cli.options import add_source
from moe_optim.commands.console.checkpoint_paths import newest_checkpoint
from moe_optim.commands.console.checkpoint_progress import (
    open_view,
    progress_bar,
    say_which_was_taken,
)
from moe_optim.commands.console.tables import build_table
from moe_optim.commands.console.workers import (
    BYTES_OF_EACH,
    add_workers,
    number_of_workers,
    run_in_workers,
)
from moe_optim.errors import refuse
from moe_optim.formats import FORMATS
from moe_optim.screen import print_table, results_console
from moe_optim.spelling import spell_bytes

if TYPE_CHECKING:
    from moe_optim.commands.conversion.layer_view import LayerView
    from moe_optim.commands.export.stored import StoredWeights
    from moe_optim.experts.keys.layouts import ExpertSet

INCOMPLETE = 1
_AMAX_KINDS = {
    "weight_amax": "recorded",
    "calibrated_amax": "calibrated",
    "calibrated_input_amax": "input",
}
_AMAX = re.compile(rf"(?P<linear>linear_fc[12])\.(?P<kind>{'|'.join(_AMAX_KINDS)})$")
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Dtype -> abbreviation in the table."""
_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

Report = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_source(parser, "checkpoint", "CKPT")
    add = parser.add_argument
    add("--json", action="store_true", help="print the report as JSON")
    text = "also read all files and verify their checksums"
    add("--thorough", action="store_true", help=text)
    text = (
        "also quantize the experts, one at a time, from masters if there are any, and show "
        "relative errors, and shares of saturated and flushed weights, in each format: "
        f"{', '.join(FORMATS)}"
    )
    add("--formats", nargs="+", default=[], choices=FORMATS, metavar="FORMAT", help=text)
    add_workers(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if the checkpoint is incomplete."""
    path = newest_checkpoint(args.checkpoint)
    if files := files_of_ranks(path):
        refuse(
            {"--formats": args.formats},
            expected=f"{path}: expected a torch_dist or safetensors checkpoint",
            remedy="Remove it, or let a run convert the checkpoint.",
        )
        say_which_was_taken(args.checkpoint, path)
        report = _examine_files(args, path, files)
    else:
        report = _examine(args, open_view(args.checkpoint))
    if args.json:
        finite = json.loads(json.dumps(report), parse_constant=lambda _: None)  # null for Inf, NaN
        print(json.dumps(finite, indent=2))
    else:
        _print(report)
    return INCOMPLETE if report["defects"] else 0


def _examine(args: argparse.Namespace, view: "LayerView") -> Report:
    from moe_optim.checkpoint.files.reader import is_state
    from moe_optim.checkpoint.files.torch_dist import TorchDistReader
    from moe_optim.commands.conversion.expert_finding import survey_experts
    from moe_optim.commands.export.stored import find_quantized

    reader, recorded = view.reader, view.recorded
    stored = reader if isinstance(reader, TorchDistReader) else None
    checked = "every byte" if args.thorough else "metadata and sizes"
    if stored is None:
        checked = "headers and sizes"
    foreign = stored.foreign_objects(stored.objects) if args.thorough and stored else {}
    quantized = find_quantized(view.tensors)
    sets, faults = survey_experts(view, quantized.shapes if quantized else None)
    states = [key for key in view.tensors if is_state(key)]
    dtypes: Counter[str] = Counter()
    for info in reader.tensors.values():
        dtypes[str(info.dtype).removeprefix("torch.")] += info.nbytes
    errors = {"errors": _measure_errors(args, view, sets)} if args.formats else {}
    return errors | {
        "path": str(reader.path),
        "format": reader.format,
        "version": recorded.version,
        "iteration": recorded.iteration,
        # opening safetensors has compared their sizes
        "defects": _defects(args, reader.path) if stored else [],
        "checked": checked,
        "glu_interleave": recorded.glu_interleave,
        "parallel_sizes": dict(recorded.parallel_sizes),
        "optimizer": {
            "sharding": recorded.optimizer_sharding,
            "tensors": len(states),
            "bytes": view.nbytes(states),
            "dtypes": _dtypes_of_states(view, states),
        },
        "tensors": len(reader.tensors),
        "bytes": sum(info.nbytes for info in reader.tensors.values()),
        "bytes_by_dtype": dict(dtypes.most_common()),
        "objects": len(reader.objects),
        "foreign": foreign if args.thorough else None,
        "quantized": quantized
        and {
            "format": quantized.format,
            "conventions": [one.name for one in quantized.conventions],
            "weights": len(quantized.weights),
        },
        "experts": [_describe(view, one, quantized) for one in sets],
        "amaxes": _amaxes(view),
        "faults": [*(quantized.faults if quantized else ()), *faults],
    }


def _measure_errors(
    args: argparse.Namespace, view: "LayerView", sets: "Sequence[ExpertSet]"
) -> list[Report]:
    from moe_optim.commands.conversion.quantization_error import measure_errors, sources_of

    sets, formats = sources_of(sets), [*dict.fromkeys(args.formats)]
    total = view.nbytes(key for one in sets for key in one.keys)
    workers = number_of_workers(args.workers, total)
    with progress_bar("quantizing", total) as report:
        return measure_errors(view, sets, formats, report, workers=workers)


def _examine_files(args: argparse.Namespace, path: Path, files: list[Path]) -> Report:
    """Check the files of ``--ckpt-format torch`` without unpickling any."""
    return {
        "path": str(path),
        "format": "torch",
        "defects": _defects(args, path),
        "checked": "every byte" if args.thorough else "tables of its archives",
        "ranks": len({file.parent for file in files}),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }


def _dtypes_of_states(view: "LayerView", states: list[str]) -> dict[str, list[str]]:
    from moe_optim.checkpoint.state_manifest import MASTERS
    from moe_optim.commands.conversion.layer_view import state_kind

    found: dict[str, set[str]] = {}
    for key in states:
        if (kind := state_kind(key)) is not None:
            dtype = str(view.tensors[key].dtype).removeprefix("torch.")
            found.setdefault(kind, set()).add(dtype)
    kinds = sorted(found, key=lambda kind: (kind not in MASTERS, kind))
    return {kind: sorted(found[kind]) for kind in kinds}


def _defects(args: argparse.Namespace, path: Path) -> list[str]:
    from moe_optim.checkpoint.integrity import checkpoint_defect

    if not args.thorough:
        defect = checkpoint_defect(path)
        return [defect] if defect else []
    nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    workers = number_of_workers(args.workers, nbytes)
    parts = max(workers, min(4 * workers, nbytes // BYTES_OF_EACH))  # each parses the metadata
    found: dict[int, list[str]] = {}
    with progress_bar("checking", nbytes) as report:
        shares = [(part, parts) for part in range(parts)]
        for (part, _), defects in run_in_workers(_corrupt, path, shares, workers=workers):
            found[part] = defects
            report(nbytes // parts)
    return list(dict.fromkeys(one for _, defects in sorted(found.items()) for one in defects))


def _corrupt(path: Path, share: tuple[int, int]) -> list[str]:
    from moe_optim.checkpoint.integrity import corrupt_files

    part, parts = share
    return [str(file) for file in corrupt_files(path, part=part, parts=parts)]


def _amaxes(view: "LayerView") -> list[Report]:
    """Summarize the amaxes of the experts of all layers; reads a few bytes for each.

    ``experts`` counts experts, or layers for amaxes of inputs; ``none`` those of them without one.
    """
    values: dict[tuple[str, str], list[float]] = {}
    for key in view.tensors:
        if (found := _AMAX.search(key)) is not None:
            of_kind = values.setdefault((_AMAX_KINDS[found["kind"]], found["linear"]), [])
            of_kind += view.read(key).flatten().tolist()
    return [
        {
            "kind": kind,
            "linear": linear,
            "experts": len(amaxes),
            "least": min(known, default=None),
            "largest": max(known, default=None),
            "none": len(amaxes) - len(known),
        }
        for (kind, linear), amaxes in sorted(values.items())
        for known in [[amax for amax in amaxes if not math.isnan(amax)]]
    ]


def _describe(view: "LayerView", one: "ExpertSet", quantized: "StoredWeights | None") -> Report:
    from moe_optim.commands.conversion.layer_view import state_kind

    stored = quantized.weights if quantized else {}
    dtypes = {str(view.tensors[key].dtype) for key in one.keys if key not in stored}
    dtypes |= {quantized.format for key in one.keys if quantized and key in stored}
    return {
        "prefix": one.prefix,
        "holds": state_kind(one.prefix) or "weights",
        "layout": one.layout.name,
        "experts": one.num_experts,
        "hidden": one.hidden,
        "ffn": one.ffn,
        "biases": one.has_bias,
        "dtype": ", ".join(sorted(dtype.removeprefix("torch.") for dtype in dtypes)),
        "bytes": view.nbytes(key for key in one.keys if key not in stored)
        + sum(stored[key].nbytes for key in one.keys if key in stored),
    }


def _print(report: Report) -> None:
    console = results_console()
    console.print(report["path"], style="bold")
    red = {"complete": "red"} if report["defects"] else {}
    facts = [(name, Text(said, red.get(name, ""))) for name, said in _facts(report)]
    table = build_table(("", " "), facts, fold=" ")  # a key must stay whole
    table.show_header = False
    print_table(console, table)
    for prefix, table in _experts_tables(report.get("experts", [])):
        console.print(f"\nexperts in {prefix}", style="italic")
        print_table(console, table)
    if errors := report.get("errors"):
        console.print(f"\nerrors of {errors[0]['of']} in each format", style="italic")
        print_table(console, _errors_table(errors))
    for fault in _together(report.get("faults", [])):
        console.print(f"not understood: {fault}", style="yellow")


def _together(faults: list[str]) -> Iterator[str]:
    """Yield one fault of each group that differs only in layer and expert numbers, with a count."""
    alike = Counter(_NUMBER.sub("*", fault) for fault in faults)
    for fault in faults:
        more = alike.pop(_NUMBER.sub("*", fault), 0) - 1
        if more >= 0:
            yield fault + (f" (and {more:,} like it: --json lists all)" if more else "")


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    defects = "; ".join(report["defects"])
    complete = f"no: {defects}" if defects else f"yes, by {report['checked']}"
    if report["format"] == "torch":
        yield "format", "torch: files of model-parallel ranks"
        yield "complete", complete
        size = spell_bytes(report["bytes"])
        yield "contents", f"{report['files']:,} files of {report['ranks']:,} ranks, {size}"
        return
    version = f", version {report['version']}" if report["version"] else ""
    yield "format", report["format"] + version
    if report["iteration"] is not None:
        yield "iteration", f"{report['iteration']:,}"
    yield "complete", complete
    held = [f"{spell_bytes(size)} {dtype}" for dtype, size in report["bytes_by_dtype"].items()]
    objects = f"; {report['objects']} objects" if report["objects"] else ""
    yield "contents", f"{report['tensors']:,} tensors, {', '.join(held)}{objects}"
    for name, why in (report["foreign"] or {}).items():
        yield "may run code", f"{name}: {why}"
    if quantized := report["quantized"]:
        named = " or ".join(quantized["conventions"])
        weights = f"{quantized['weights']:,} weights in {quantized['format']}"
        yield "quantized", f"{weights} for engines, in the names of {named}"
    if sizes := report["parallel_sizes"]:
        cut = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        yield "parallel", ", ".join(cut) or "one rank"
    yield from _optimizer_facts(report["optimizer"])
    for one in report["amaxes"]:
        range_ = f", {one['least']:.4g} to {one['largest']:.4g}" if one["least"] is not None else ""
        none = f", {one['none']:,} without one" if one["none"] else ""
        unit = "layers" if one["kind"] == "input" else "experts"
        yield f"{one['kind']} amaxes", f"{one['linear']}, {one['experts']:,} {unit}{range_}{none}"
    rows = report["glu_interleave"]
    said = {None: "not recorded", 0: "none: gate rows first"}.get(rows, f"blocks of {rows} rows")
    yield "GLU interleave", said


def _optimizer_facts(state: Report) -> Iterator[tuple[str, str]]:
    if not state["sharding"] and not state["tensors"]:
        return
    sharding = state["sharding"] or "states by parameter"
    yield "optimizer", f"{sharding}, {state['tensors']:,} tensors, {spell_bytes(state['bytes'])}"
    if kinds := [f"{kind} {' and '.join(held)}" for kind, held in state["dtypes"].items()]:
        yield "states", ", ".join(kinds)


def _experts_tables(experts: list[Report]) -> Iterator[tuple[str, Table]]:
    from moe_optim.commands.conversion.layer_view import STATE_KIND

    sizes = ("experts", "hidden", "ffn")
    groups: dict[str, dict[tuple[str, ...], list[int]]] = {}
    for one in experts:
        prefix = _LAYER.sub("*", STATE_KIND.sub("", one["prefix"], count=1))
        holds = one["holds"] + ", biases" * one["biases"]
        dtype = ", ".join(_SHORT.get(each, each) for each in one["dtype"].split(", "))
        alike = (holds, one["layout"], *(str(one[size]) for size in sizes), dtype)
        groups.setdefault(prefix, {}).setdefault(alike, []).append(one["bytes"])
    for prefix, rows in groups.items():
        cells = [
            (holds, layout, str(len(nbytes)), *rest, spell_bytes(sum(nbytes)))
            for (holds, layout, *rest), nbytes in rows.items()
        ]
        header = ("", "layout", "layers", *sizes, "dtype", "bytes")
        yield prefix, build_table(header, cells, right=("layers", *sizes, "bytes"))


def _errors_table(rows: list[Report]) -> Table:
    """Return a row per linear and format; figures above their thresholds of training are red."""
    from moe_optim.formats.health_figures import THRESHOLDS

    figures = {"error": "{:.4f}", "saturated": "{:.3%}", "flushed": "{:.3%}"}
    cells: list[list[str | Text]] = []
    for row in rows:
        layer, limits = _LAYER.search(row["prefix"]), THRESHOLDS[row["format"]]
        where = layer[0] if layer else row["prefix"]
        cells.append([where, row["linear"].removeprefix("linear_"), row["format"]])
        for figure, spelled in figures.items():
            is_within = row[figure] <= limits[figure]
            cells[-1].append(Text(spelled.format(row[figure]), "" if is_within else "red"))
        cells[-1].append(f"{row['worst_error']:.4f} ({row['worst_expert']})")
    numbers = (*figures, "worst expert")
    return build_table(("layer", "", "format", *numbers), cells, right=(*numbers, "layer"))
