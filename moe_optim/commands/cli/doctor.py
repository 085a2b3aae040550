"""Show what this machine can do, installed packages, and remedies for problems.

Shows on what it trains, with which GEMMs, and versions and paths of everything moe_optim builds on;
with --patches also the state of every patch. Exits with 1 if something required is missing or
broken, and names the command that repairs it.
"""

import argparse
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_optim import __version__
from moe_optim.commands.cli.enable import is_enabled, site_file
from moe_optim.commands.console.tables import build_table
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
from moe_optim.screen import print_table, quiet, results_console

Findings = dict[str, Any]

_IMPORTED = {**MODULES, "transformer-engine": "transformer_engine.pytorch"}
"""Package -> module whose import fails if the package is broken."""
_RECIPES = {"fp8": "tensorwise", "fp8_block_scaling": "blockwise"}
_RECIPES |= {"mxfp8": "mxfp8", "nvfp4": "nvfp4"}
"""Name of a recipe in Transformer Engine -> its name in Megatron's flags."""
_WITHOUT = {
    "emerging-optimizers": "Megatron's own step of Muon calls it: pip install 'moe_optim[muon]'",
    "pybind11": "optional; a checkout of Megatron-LM compiles a helper with it",
}
_STYLES = {"ok": "green", "applied": "green", "missing": "red", "unfit": "red", "broken": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--patches", action="store_true", help="also list every patch")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if something required is missing or broken."""
    with Console(stderr=True).status("Importing what is installed ..."):
        report = examine()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        console = results_console()
        for part in _parts(report, with_patches=args.patches):
            if isinstance(part, Table):
                print_table(console, part)
                console.print()
            else:
                console.print(part, soft_wrap=False)
    return 0 if report["ok"] else 1


def examine() -> Findings:
    """Return the report as JSON-ready values; importing the packages takes seconds.

    ``ok`` is true exactly when ``problems``, a list of lines, is empty.
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
        "native_gemms": _native_gemms() if gpus and has_te else [],
        "patches": patches,
    }


def _examine_package(name: str) -> Findings:
    """Describe one package; ``problem`` contains the remedy if it is required.

    ``state`` is ``ok``, ``absent`` (and optional), ``missing``, ``unfit`` or ``broken``.
    """
    package, needed = find_package(name), NEEDED.get(name)
    problem = unmet_version(name, needed) if needed else None
    if name == "pybind11":
        problem = missing_for_datasets()
    state, note = "ok" if package else "absent", _note(name, package)
    if problem:
        state = "unfit" if package else "missing"
    elif package and (error := _failure(name)):
        state, note = "broken", error
        problem = f"{name}: expected it to work, got: {error}" if needed else None
    return {
        "version": package.version if package else None,
        "path": package.path if package else None,
        "checkout": package.checkout if package else False,
        "needed": needed,
        "state": state,
        "note": note,
        "problem": problem,
    }


def _note(name: str, package: Package | None) -> str:
    if package is None:
        if name == "apex" and (folder := find_folder("apex")):
            return f"{folder} is the unrelated apex of the package index, not NVIDIA's"
        return _WITHOUT.get(name, "")
    if name != "megatron-core":
        return ""
    if not package.checkout:
        return "the installed wheel"
    try:
        return f"a source checkout, which overrides the wheel {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return "a source checkout, no wheel"


def _failure(name: str) -> str | None:
    if name == "python":
        return None
    if name == "megatron-core":
        core, training = find_folder("megatron.core"), find_folder("megatron.training")
        if core and training and core.parent != training.parent:
            return f"megatron.training comes from {training.parent}. Keep one of the two"
    module = _IMPORTED[name]
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken extension may raise anything
        return f"importing {module} raised {type(error).__name__}: {error}. Install it again"
    return None


def _native_gemms() -> list[str]:
    engine = importlib.import_module(_IMPORTED["transformer-engine"])
    asked = {name: getattr(engine, f"is_{name}_available", None) for name in _RECIPES}
    return [_RECIPES[name] for name, available in asked.items() if available and available()]


def _examine_patches() -> list[dict[str, str]]:
    from moe_optim.integration.engine import patch_state  # needs Megatron
    from moe_optim.integration.patches import PATCHES

    facts = ("id", "target", "because", "remove_when")
    return [
        {"state": patch_state(patch), **{fact: getattr(patch, fact) for fact in facts}}
        for patch in PATCHES
    ]


def _parts(report: Findings, *, with_patches: bool) -> Iterator[Text | Table]:
    own, patches = report["moe_optim"], report["patches"]
    yield Text.assemble(("moe_optim ", "bold"), own["version"], (f"  {own['path']}", "dim"))
    yield from map(Text, _abilities(report))
    yield Text()
    header = ("package", "version", "state", "where")
    yield build_table(header, _package_rows(report["packages"]), fold=header, gap=2)
    if patches and with_patches:
        columns = ("state", "patch, reason (off: compatible, applied on demand)")
        yield build_table(columns, _patch_rows(patches), fold=columns, gap=2)
    if report["ok"]:
        yield Text("All requirements are met.", "green")
    for problem in report["problems"]:
        yield Text.assemble(("error: ", "bold red"), problem)


def _abilities(report: Findings) -> Iterator[str]:
    gpus = [f"{gpu['name']} (sm {gpu['sm']}, {gpu['memory_gib']} GiB)" for gpu in report["gpus"]]
    alike = {gpu: gpus.count(gpu) for gpu in gpus}
    trains = ", ".join(f"{count} x {gpu}" if count > 1 else gpu for gpu, count in alike.items())
    yield f"Trains on: {trains or 'the CPU over gloo (torch finds no GPU)'}"
    yield "Portable experts: every format on any machine; all multiply in bf16"
    native = "none on this machine" if report["gpus"] else "none (there is no GPU)"
    if report["native_gemms"]:
        native = f"{', '.join(report['native_gemms'])}, which its experts use"
    elif report["packages"]["transformer-engine"]["state"] != "ok":
        native = "none (it is not installed)"
    yield f"Transformer Engine's own GEMMs: {native}"
    enabled = report["moe_optim"]["enabled"]
    yield "Scripts: " + (
        f"plain python and torchrun, enabled by {enabled}"
        if enabled
        else "`moe-optim run SCRIPT`, or plain python after `moe-optim enable`"
    )
    if patches := report["patches"]:
        unfit = sum(patch["state"].startswith("broken") for patch in patches)
        found = f"{unfit} of {len(patches)} do not fit" if unfit else f"all {len(patches)} fit"
        yield f"Patches of megatron-core: {found} (--patches lists them)"
    yield f"Environment: {sys.prefix}"


def _package_rows(packages: dict[str, Findings]) -> Iterator[tuple[str | Text, ...]]:
    for name, entry in packages.items():
        where = "\n".join(filter(None, (_shorten(entry["path"]), entry["note"])))
        state = Text(entry["state"], _STYLES.get(entry["state"], ""))
        yield name, entry["version"] or "", state, where or "optional"


def _shorten(path: str | None) -> str | None:
    """Omit the folder of the environment, which is printed above."""
    if path is None or not Path(path).is_relative_to(sys.prefix):
        return path
    inner = str(Path(path).relative_to(sys.prefix))
    return inner[inner.find("site-packages") :] if "site-packages" in inner else inner


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
        yield Text(state, _STYLES.get(state, "")), details
