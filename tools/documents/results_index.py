"""Index of measurements: source, machine and documents, one row per result file."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.kernel_hash import hash_kernels, kernel_sources
from tools.documents.code_tables import table
from tools.documents.measured_tables import RESULTS, read_result, result_files

ROOT = Path(__file__).parents[2]
NAMES = {
    "torch": "torch",
    "megatron-core": "core",
    "transformer-engine": "TE",
    "megatron-bridge": "Bridge",
    "modelopt": "ModelOpt",
}
"""Package -> label in the table, for those whose versions are shown."""
SPELT = {"several": "several versions; ", "in the file": "", "none": ""} | dict.fromkeys(
    ("torch 2.11.0, core 0.19.2, TE 2.20.2", "torch 2.11.0, core 0.19.2"), ""
)
"""Version label in the table -> label below a block; empty for the versions tested most."""


def results_index() -> str:
    rows = [
        [f"[`{path.name}`]({path.name})", _shown_in(path), *_measured_by(path)]
        for path in sorted(RESULTS.glob("*.json"))
    ]
    return table(["file", "shown in", "device", "versions", "commit", "command"], rows)


def measured_line(block: str) -> str:
    """Return the source of the measurements of a block, and whether kernels have changed since.

    Empty for a block without a table or without result files.
    """
    found: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
    for name in result_files(block):
        device, versions, commit, _ = _measured_by(RESULTS / name)
        changed = "; with earlier kernels" if _has_other_kernels(read_result(name)) else ""
        files = found.setdefault((SPELT.get(versions, f"{versions}; "), changed), {})
        files.setdefault((device, f"commit {commit}"), []).append(f"`{name}`")
    sources = [(*shared, *source) for shared, files in found.items() for source in files]
    if len(sources) == 1:
        ((versions, changed, device, commit),) = sources
        return f"Measured: {f'{device}; ' if device else ''}{versions}{commit}{changed}."
    lines = (_spell_files(files, *shared) for shared, files in found.items())
    return f"Measured: {' '.join(lines)}" if found else ""


def _spell_files(files: Mapping[tuple[str, str], list[str]], versions: str, changed: str) -> str:
    spelt = (
        f"{', '.join(names)} ({', '.join(filter(None, source))})" for source, names in files.items()
    )
    return f"{', '.join(spelt)}{f'; {versions}'.removesuffix('; ')}{changed}."


def _has_other_kernels(report: Any) -> bool:
    """Return whether any part of a report was measured with other kernels than the current ones."""
    return any(found != _kernels_of_today() for found in _find(report, "kernels"))


@cache
def _kernels_of_today() -> str:
    return hash_kernels(kernel_sources())


def _shown_in(path: Path) -> str:
    found = [
        one
        for one in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
        if f"results/{path.name}" in one.read_text(encoding="utf-8")
    ]
    names = ((one.relative_to(ROOT), "README" if one.parent == ROOT else one.stem) for one in found)
    return ", ".join(f"[{name}](../../{place})" for place, name in names)


def _measured_by(path: Path) -> list[str]:
    """Return device, versions, commit and command, also of parts that record their own."""
    report = read_result(path.name)
    device, commit, commands = (
        list(dict.fromkeys(one for key in keys for one in _find(report, key)))
        for keys in (["device"], ["commit"], ["command", "commands"])
    )
    versions = list(dict.fromkeys(map(_spell, _find_dicts(report, "versions"))))
    return [
        ", ".join(device),
        (versions[0] or "in the file") if len(versions) == 1 else "several" if versions else "none",
        ", ".join(commit),
        f"`{commands[0]}`" if len(commands) == 1 else f"{len(commands)}, in the file",
    ]


def _spell(versions: Mapping[str, str | None]) -> str:
    return ", ".join(
        f"{called} {versions[name]}" for name, called in NAMES.items() if versions.get(name)
    )


def _find(report: Any, key: str) -> Iterator[str]:
    """Yield the texts under a key, of the whole report or of each part."""
    for found in _find_values(report, key):
        yield from [found] if isinstance(found, str) else found or ()


def _find_dicts(report: Any, key: str) -> Iterator[Mapping[str, str | None]]:
    """Yield the mappings under a key, of the whole report or of each part."""
    for found in _find_values(report, key):
        yield from [found] if isinstance(found, dict) else [{}] * len(found)


def _find_values(report: Any, key: str) -> Iterator[Any]:
    if isinstance(report, dict) and key in report:
        yield report[key]
    elif isinstance(report, dict | list):
        for part in report.values() if isinstance(report, dict) else report:
            yield from _find_values(part, key)
