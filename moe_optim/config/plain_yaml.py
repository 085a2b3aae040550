"""YAML as recipes use it: plain values, read in bounded time, refused without being repeated.

The text may be any file of the machine, since a recipe names its ``base``, and anyone's, since
recipes are passed on. So nothing is constructed from it but text, whole numbers, true, false, null,
lists and mappings; its size is bounded, aliases written out; and an error says where, never what.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import yaml

from moe_optim.errors import ConfigError

MAX_BYTES = 2**18
"""Size of a text; the largest recipe shipped has an eightieth of it."""
_MAX_LEVELS = 20  # a recipe has four: itself, a section, a list, a value
_MAX_VALUES = 20_000
_MAX_DIGITS = 18  # of a whole number: it fits into 64 bits

_QUOTED = re.compile(
    r"('<[\w ]+>'|'[][{},:?-]')|(['\"]).*\2"
)  # tokens that PyYAML quotes, and texts
_WORDS = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}
_INTEGER = re.compile("0|-?[1-9][0-9]*")  # only what str(int) gives back


class Document(NamedTuple):
    """What a text spells out."""

    value: Any
    lines: Mapping[Any, int]
    """Where each key of the outermost mapping stands, counted from 1; empty for other values."""


def parse_yaml(where: str, text: str) -> Any:
    """Return the value that ``text`` spells out, by the one reading of recipes and assignments.

    Args:
        where: how errors call the text.
        text: a whole document, or one value.

    Raises:
        ConfigError: it is no YAML, has tags, or is larger or nested deeper than any recipe.
    """
    return read_document(where, text).value


def read_document(where: str, text: str) -> Document:
    """Return what ``text`` spells out, and on which lines.

    Whole numbers, ``true``, ``false`` and ``null`` are values, all else is text: ``2e-3``, ``1.10``
    and ``12:30`` reach Megatron as they were written, which YAML's own rules would turn into text,
    1.1 and 750. A repeated key is an error.

    Args:
        where: how errors call the text.
        text: a whole document, or one value.

    Raises:
        ConfigError: it is no YAML, has tags, or is larger or nested deeper than any recipe.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where}: expected at most {MAX_BYTES:,} characters of YAML, got more.")
    remedy = "Correct it, or quote what is text"
    try:
        return _Reader(text).read()
    except yaml.MarkedYAMLError as error:  # its context is dropped: it repeats the text
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        problem = _QUOTED.sub(lambda found: found[1] or "...", error.problem or "")
        raise ConfigError(f"{where}:{line} expected YAML, got: {problem}. {remedy}.") from None
    except yaml.reader.ReaderError as error:
        line = f"line {text.count(chr(10), 0, error.position) + 1}"
        raise ConfigError(
            f"{where}: {line}: expected YAML, got: a character that it does not take. {remedy}."
        ) from None


def shorten(text: str, limit: int = 300) -> str:
    """Return ``text`` for a message: its middle left out where it is longer than ``limit``."""
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 2 :]}"


def quote(value: object) -> str:
    """Return what Python shows of a value of the user, for a message, which may be long."""
    return shorten(repr(value))


class _Reader:
    """Builds values from the events of PyYAML's parser, which construct nothing themselves."""

    def __init__(self, text: str) -> None:
        self._events: Iterator[Any] = yaml.parse(text, Loader=yaml.SafeLoader)
        self._lines: dict[Any, int] = {}
        self._values = 0  # so far, aliases written out
        self._anchors: dict[str, tuple[Any, int, int]] = {}  # its value, values and levels in it

    def read(self) -> Document:
        """Return the only document, None where there is none."""
        next(self._events)  # the stream starts
        start = next(self._events)
        if isinstance(start, yaml.StreamEndEvent):
            return Document(None, {})
        value, _ = self._build(next(self._events), 1)
        next(self._events)  # the document ends
        if not isinstance(after := next(self._events), yaml.StreamEndEvent):
            _refuse(after, "a second document")
        return Document(value, self._lines)

    def _build(self, event: Any, level: int) -> tuple[Any, int]:
        """Return the value that starts with ``event``, and how many levels lie below its own."""
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, level)
        before, below, value = self._values, 0, None
        self._add(event, 1, level)
        if event.tag is not None:
            _refuse(event, "a tag, and tags are not taken")
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            value, below = self._sequence(level)
        else:
            value, below = self._mapping(level)
        if event.anchor is not None:
            if event.anchor in self._anchors:
                _refuse(event, "an anchor for the second time")
            self._anchors[event.anchor] = value, self._values - before, below
        return value, below

    def _alias(self, event: Any, level: int) -> tuple[Any, int]:
        if event.anchor not in self._anchors:
            _refuse(event, "an alias of nothing that ends before it")
        value, values, below = self._anchors[event.anchor]
        self._add(event, values, level + below)
        return value, below

    def _sequence(self, level: int) -> tuple[list[Any], int]:
        items, below = [], 0
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            item, under = self._build(event, level + 1)
            items.append(item)
            below = max(below, under + 1)
        return items, below

    def _mapping(self, level: int) -> tuple[dict[Any, Any], int]:
        mapping: dict[Any, Any] = {}
        below = 0
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key, _ = self._build(event, level + 1)
            if isinstance(key, list | dict):
                _refuse(event, "a key that is not one value")
            if key in mapping:
                _refuse(event, "a key for the second time")
            if level == 1:
                self._lines[key] = event.start_mark.line + 1
            mapping[key], under = self._build(next(self._events), level + 1)
            below = max(below, under + 1)
        return mapping, below

    def _add(self, event: Any, values: int, level: int) -> None:
        self._values += values
        if self._values > _MAX_VALUES:
            _refuse(event, f"more than {_MAX_VALUES:,} values, aliases written out")
        if level > _MAX_LEVELS:
            _refuse(event, f"values nested more than {_MAX_LEVELS} deep")


def _scalar(event: Any) -> Any:
    text = event.value
    if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in text):
        _refuse(event, "a character that no command line can carry")
    if not event.implicit[0]:  # it is quoted, or a block
        return text
    if text in _WORDS:
        return _WORDS[text]
    if not _INTEGER.fullmatch(text):
        return text
    if len(text.lstrip("-")) > _MAX_DIGITS:
        _refuse(event, f"a whole number of more than {_MAX_DIGITS} digits")
    return int(text)


def _refuse(event: Any, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
