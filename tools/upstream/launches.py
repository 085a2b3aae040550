"""Extracts Megatron's flags from launch scripts of other projects, without running them."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

Flags = dict[str, list[str]]
"""Flag with its dashes -> its values; the last occurrence counts."""

_OPENS = re.compile(r"^\s*\w+\+?=\(")
_SOURCE = re.compile(r"^\s*(?:source|\.)\s+\S*?([\w.-]+/[\w.-]+\.sh)")
_RECORDED = re.compile(r"^### \d+$", re.MULTILINE)


def find_launches(checkout: Path) -> Iterator[tuple[str, Mapping[str, list[str]]]]:
    """Yield path and flags of every launch in a checkout that trains a model with experts.

    Shell scripts (``*.sh``) define flags in arrays, ``NAME=( --flag value ... )``, of the script
    and of the files it sources; shell variables such as ``${NAME}`` stay unexpanded. Recorded
    command lines of launchers (``*.txt``, each below ``### <number>``) are parsed whole.
    """
    shells = sorted(checkout.rglob("*.sh"))
    for path in [*shells, *sorted(checkout.rglob("*.txt"))]:
        text = path.read_text(encoding="utf-8", errors="replace")
        if "--optimizer" not in text:
            continue
        of_one = [_of_shell(text, shells)] if path.suffix == ".sh" else _of_record(text)
        for flags in of_one:
            if {"--num-experts", "--optimizer"} <= flags.keys():
                yield str(path.relative_to(checkout)), flags


def _of_shell(text: str, shells: Sequence[Path]) -> Flags:
    found: Flags = {}
    for line in text.splitlines():
        if sourced := _SOURCE.match(line):
            named = [one for one in shells if one.as_posix().endswith(f"/{sourced[1]}")]
            for one in named[:1]:
                others = [other for other in shells if other != one]  # it may source its own name
                found |= _of_shell(one.read_text(encoding="utf-8", errors="replace"), others)
    return found | _grouped(word for line in _lines_of_arrays(text) for word in _split(line))


def _of_record(text: str) -> Iterator[Flags]:
    for command in _RECORDED.split(text):
        _, is_training, arguments = command.partition("/train.py")
        if is_training:
            yield _grouped(_split(arguments))


def _grouped(words: Iterable[str]) -> Flags:
    found: Flags = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            values = found[flag] = [value] if equals else []
        else:
            values.append(word)
    return found


def _lines_of_arrays(text: str) -> Iterator[str]:
    """Yield the lines between ``NAME=(`` and its closing ``)``."""
    is_inside = False
    for line in text.splitlines():
        if not is_inside and (opened := _OPENS.match(line)):
            is_inside, line = True, line[opened.end() :]
        if is_inside:
            code = line.partition(" #")[0].rstrip() if not line.lstrip().startswith("#") else ""
            code = code.removesuffix("\\").rstrip()
            ends = code.endswith(")") and code.count("(") < code.count(")")
            yield code[:-1] if ends else code
            is_inside = not ends


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # unbalanced quotes
        return []
