"""``moe-optim doctor``: what is installed here, what of it is used, and what to mend."""

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_optim import __version__
from moe_optim.commands.console.site_file import is_enabled, site_file
from moe_optim.config import Format
from moe_optim.environment import (
    MODULES,
    NEEDED,
    Package,
    find_folder,
    find_gpus,
    find_package,
    missing_for_datasets,
    unmet_version,
)
from moe_optim.screen import quiet, results_console

Report = dict[str, Any]

_IMPORTED = {**MODULES, "transformer-engine": "transformer_engine.pytorch"}
"""Package -> the module that does not import where the package is broken."""
_RECIPES = {
    "fp8": "tensorwise",
    "fp8_block_scaling": "blockwise",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""What Transformer Engine calls its recipes -> what Megatron's flags call them."""
_STYLES = {"ok": "green", "applied": "green", "missing": "red", "unfit": "red", "broken": "red"}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what is installed, which formats run here and what to mend",
        description="Show versions and places of everything moe_optim builds on, how each format "
        "runs on this machine, and the state of every patch. Exits with 1 when something needed "
        "is missing or broken, and names the line that mends it.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 when something needed is missing or broken."""
    if args.json:
        with _uncollected(), _uncompiled():
            report = examine()
        print(json.dumps(report, indent=2))
    else:
        status = Console(stderr=True).status("Importing what is installed ...")
        with status, _uncollected(), _uncompiled():
            report = examine()
        results_console().print(_render(report), soft_wrap=False)
    return 0 if report["ok"] else 1


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no garbage, which takes a tenth of the time: what is imported stays."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Have Megatron's modules mark nothing for compilation: a third of the time is a compiler's.

    Only in a process that ends with the report, and has not imported Megatron before.
    """
    torch: Any = None
    if "megatron.core" not in sys.modules:
        with contextlib.suppress(Exception):  # it is not there, or broken, which the report says
            torch = importlib.import_module("torch")
    if torch is None:
        yield
        return
    compile_ = torch.compile
    torch.compile = _leave_as_it_is
    try:
        yield
    finally:
        torch.compile = compile_


def _leave_as_it_is(function: Any = None, **_: Any) -> Any:
    return _leave_as_it_is if function is None else function


def examine() -> Report:
    """Return the report as JSON-ready values; imports what is installed, which takes seconds.

    ``ok`` is true exactly when ``problems``, one line each, is empty.
    """
    with quiet():
        packages = {name: _examine_package(name) for name in ("python", *MODULES)}
        patches = _examine_patches() if packages["megatron-core"]["state"] == "ok" else []
        gpus = [asdict(gpu) for gpu in find_gpus()] if packages["torch"]["state"] == "ok" else []
        has_te = packages["transformer-engine"]["state"] == "ok"
    problems = [entry["problem"] for entry in packages.values() if entry["problem"]]
    problems += [
        f"patch {patch['id']}: {patch['state']}. Install a megatron-core {NEEDED['megatron-core']}"
        for patch in patches
        if patch["state"].startswith("broken")
    ]
    return {
        "ok": not problems,
        "problems": problems,
        "moe_optim": {
            "version": __version__,
            "path": str(Path(__file__).parents[2]),
            "enabled": str(site_file()) if is_enabled() else None,
        },
        "packages": packages,
        "gpus": gpus,
        "formats": {name: _examine_format(name) for name in get_args(Format)},
        "native_products": _native_products() if gpus and has_te else [],
        "patches": patches,
    }


def _examine_package(name: str) -> Report:
    """Describe one package; ``problem`` says what to do about one that is needed.

    ``state`` is ``ok``, ``absent`` (and optional), ``missing``, ``unfit`` or ``broken``.
    """
    package, needed = find_package(name), NEEDED.get(name)
    entry: Report = {
        "version": package.version if package else None,
        "path": package.path if package else None,
        "checkout": package.checkout if package else False,
        "needed": needed,
        "state": "ok" if package else "absent",
        "note": _note(name, package),
        "problem": unmet_version(name, needed) if needed else None,
    }
    if name == "pybind11":
        entry["problem"] = missing_for_datasets()
    if entry["problem"]:
        entry["state"] = "unfit" if package else "missing"
    elif package and (error := _failure(name)):
        entry |= {"state": "broken", "note": error}
        if needed:
            entry["problem"] = f"{name}: expected it to work, got: {error}"
    return entry


def _note(name: str, package: Package | None) -> str:
    """Return what the version alone does not say."""
    if name == "apex" and package is None and (folder := find_folder("apex")):
        return f"{folder} is the unrelated apex of the package index, not NVIDIA's"
    if name == "pybind11" and package is None:
        return "a checkout of Megatron-LM, as --megatron-lm gives one, compiles a helper with it"
    if name != "megatron-core" or package is None:
        return ""
    if not package.checkout:
        return "the installed wheel wins"
    try:
        return f"a source checkout wins over the wheel {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return "a source checkout, no wheel"


def _failure(name: str) -> str | None:
    """Say why an installed package does not work, or None: import it as Megatron would."""
    if name == "python":
        return None
    if name == "megatron-core":
        core, training = find_folder("megatron.core"), find_folder("megatron.training")
        if core and training and core.parent != training.parent:
            return f"megatron.training comes from {training.parent}. Keep one of the two"
    module = _IMPORTED[name]
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken extension raises whatever it likes
        return f"importing {module} raised {type(error).__name__}: {error}. Install it again"
    return None


def _examine_format(name: str) -> dict[str, str]:
    """Say how portable experts multiply weights stored in a format, and why so."""
    if name == "bf16":
        return {"product": "native product", "because": "grouped bf16 product of torch"}
    return {"product": "emulated product", "because": "stored narrow, multiplied in bf16"}


def _native_products() -> list[str]:
    """Return the recipes whose products Transformer Engine has on this GPU, by its own account."""
    engine = importlib.import_module(_IMPORTED["transformer-engine"])
    asked = {name: getattr(engine, f"is_{name}_available", None) for name in _RECIPES}
    return [_RECIPES[name] for name, available in asked.items() if available and available()]


def _examine_patches() -> list[dict[str, str]]:
    from moe_optim.integration.engine import patch_state  # only where Megatron is
    from moe_optim.integration.patches import PATCHES

    return [
        {
            "id": patch.id,
            "state": patch_state(patch),
            "target": patch.target,
            "because": patch.because,
            "remove_when": patch.remove_when,
        }
        for patch in PATCHES
    ]


def _render(report: Report) -> RenderableType:
    own = report["moe_optim"]
    formats = [(name, *entry.values()) for name, entry in report["formats"].items()]
    enabled = (
        f"enabled for plain python and torchrun by {own['enabled']}"
        if own["enabled"]
        else "scripts run with `moe-optim run`, or with plain python after `moe-optim enable`"
    )
    parts: list[RenderableType] = [
        Text.assemble(("moe_optim ", "bold"), own["version"], (f"  {own['path']}", "dim")),
        Text(f"{enabled}\n"),
        _table(("package", "version", "state", "where"), _package_rows(report["packages"])),
        _table(("GPU", "capability", "memory"), _gpu_rows(report["gpus"])),
        _table(("format", "product of portable experts", "how"), formats),
        Text(f"Transformer Engine's own products: {_spell_native(report)}\n"),
    ]
    if report["patches"]:
        parts.append(
            _table(
                ("patch", "what, why (off: it fits, and is put in place on demand)"),
                _patch_rows(report["patches"]),
            )
        )
    if report["ok"]:
        parts.append(Text("Everything needed is here.", "green"))
    parts += [Text.assemble(("error: ", "bold red"), problem) for problem in report["problems"]]
    return Group(*parts)


def _spell_native(report: Report) -> str:
    if report["native_products"]:
        return f"{', '.join(report['native_products'])}, which its experts take"
    if report["packages"]["transformer-engine"]["state"] != "ok":
        return "none, as it is not here"
    return "none on this machine" if report["gpus"] else "none, as there is no GPU"


def _package_rows(packages: dict[str, Report]) -> Iterator[tuple[str, ...]]:
    for name, entry in packages.items():
        where = "\n".join(filter(None, (entry["path"], entry["note"])))
        yield name, entry["version"] or "", entry["state"], where or "optional"


def _gpu_rows(gpus: list[Report]) -> Iterator[tuple[str, ...]]:
    if not gpus:
        yield "none", "", "training runs on the CPU, over gloo"
    for gpu in gpus:
        yield gpu["name"], f"sm {gpu['sm']}", f"{gpu['memory_gib']} GiB"


def _patch_rows(patches: list[dict[str, str]]) -> Iterator[tuple[str | Text, ...]]:
    above = None
    for patch in patches:
        state, _, fault = patch["state"].partition(": ")
        details = Text(patch["id"])
        if patch["because"] != above:  # neighbours share their reason
            details.append(f"\n{patch['because']}", "dim")
        if fault:
            details.append(f"\n{fault}", "red")
        above = patch["because"]
        yield state, details


def _table(header: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> RenderableType:
    """Return a plain table and an empty line; states in it are coloured."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in header:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(
            *(Text(cell, _STYLES.get(cell, "")) if isinstance(cell, str) else cell for cell in row)
        )
    return Group(table, "")
