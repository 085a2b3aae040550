"""PTX as Triton writes it, read into instructions."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

WIDTHS = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
WIDTHS |= {"f32": np.uint32, "f64": np.uint64, "b8": np.uint8}

_COMMENT = re.compile(r"//.*")
_LABEL = re.compile(r"^(\$\w+):")
_REGISTERS = re.compile(r"^\.reg\s+\.(\w+)\s+(.*)$")
_PARAMETER = re.compile(r"\.param\s+\.(\w+)\s.*?(\w+_param_\d+)")
_THREADS = re.compile(r"\.reqntid\s+(\d+)")
_GUARD = re.compile(r"^@(!?)(%p\d+)\s+")
_ADDRESS = re.compile(r"^\[\s*([%$\w]+)\s*(?:\+\s*(-?\d+)\s*)?\]$")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``."""

    base: str
    offset: int


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant: an integer, or the bits of a floating-point number."""

    bits: int


Operand = str | Address | Immediate | tuple["str | Immediate", ...]
"""A register or a name, an address, a constant, or a vector of registers and constants."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, such as ``@%p1 add.s32 %r1, %r2, 3``."""

    parts: tuple[str, ...]
    """The opcode, cut at its dots."""
    operands: tuple[Operand, ...]
    guard: str | None
    """Register without which a thread does nothing."""
    negated: bool
    text: str


@dataclass(frozen=True, slots=True)
class Program:
    """One kernel."""

    name: str
    threads: int
    """Of a block."""
    parameters: Mapping[str, str]
    """Name -> type, in their order."""
    registers: Mapping[str, type]
    """Name without digits, or a whole name that inline assembly declares -> width."""
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    """Label -> number of the instruction behind it."""

    def dtype_of(self, register: str) -> type:
        """Return the unsigned dtype as wide as a register, or bool."""
        return self.registers[
            register if register in self.registers else register.rstrip("0123456789")
        ]


@cache
def parse(ptx: str) -> Program:
    """Read the one kernel of a module.

    Raises:
        ValueError: something is written in a way that Triton has not used so far.
    """
    head, _, body = ptx.partition("\n{\n")
    body = body.partition("// -- End function")[0]
    registers: dict[str, type] = {}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in _statements(body):
        if label := _LABEL.match(statement):
            labels[label[1]] = len(instructions)
        elif declared := _REGISTERS.match(statement):
            for name in declared[2].split(","):
                registers[name.strip().partition("<")[0]] = WIDTHS[declared[1]]
        elif not statement.startswith("."):
            instructions.append(_instruction(statement))
    entry = re.search(r"\.entry\s+(\w+)", head)
    threads = _THREADS.search(head)
    if entry is None or threads is None:
        raise ValueError(f"expected a kernel with .reqntid, got {head[-300:]!r}")
    return Program(
        name=entry[1],
        threads=int(threads[1]),
        parameters={name: type for type, name in _PARAMETER.findall(head)},
        registers=registers,
        instructions=tuple(instructions),
        labels=labels,
    )


def _statements(body: str) -> Iterator[str]:
    """Yield labels, declarations and instructions, without the braces of inline assembly."""
    for line in body.splitlines():
        line = _COMMENT.sub("", line).strip()
        if _LABEL.match(line):
            yield line
            continue
        if line.startswith("."):
            if line.startswith(".reg"):
                yield line.rstrip(";")
            continue
        for statement in line.split(";"):
            statement = statement.strip()
            if statement in ("{", "}", ""):
                continue
            opens = statement.startswith("{") and "}" not in statement
            yield statement[1:].strip() if opens else statement


def _instruction(statement: str) -> Instruction:
    guard = _GUARD.match(statement)
    rest = statement[guard.end() :] if guard else statement
    opcode, _, operands = rest.replace("\t", " ").partition(" ")
    return Instruction(
        parts=tuple(opcode.split(".")),
        operands=tuple(_operand(text.strip()) for text in _OPERAND.findall(operands)),
        guard=guard[2] if guard else None,
        negated=bool(guard and guard[1]),
        text=statement,
    )


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(_scalar(part.strip()) for part in text[1:-1].split(","))
    if text.startswith("["):
        found = _ADDRESS.match(text)
        if found is None:
            raise ValueError(f"expected [base + offset], got {text}")
        return Address(found[1], int(found[2] or 0))
    return _scalar(text)


def _scalar(text: str) -> str | Immediate:
    if text.startswith(("0f", "0d")):
        return Immediate(int(text[2:], 16))
    if re.match(r"^-?(0x[0-9a-fA-F]+|\d+)U?$", text):
        return Immediate(int(text.rstrip("U"), 0))
    return text
