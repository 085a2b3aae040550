"""Options that several commands share."""

import argparse
from pathlib import Path
from typing import Any

from moe_optim.commands.console.workers import number_above_zero, whole_number
from moe_optim.experts.keys.layouts import LAYOUTS


def add_source(parser: argparse.ArgumentParser, name: str = "source", metavar: str = "SRC") -> None:
    """Add the checkpoint to read."""
    text = "checkpoint, or run folder, whose newest is used"
    parser.add_argument(name, type=Path, metavar=metavar, help=text)


def add_source_and_target(parser: argparse.ArgumentParser) -> None:
    """Add a checkpoint to read, a folder to write, and what SRC may not record."""
    add_source(parser)
    add = parser.add_argument
    add("target", type=Path, metavar="DST", help="output folder; must not exist")
    text = "expert layout of SRC, if it is not recorded or several match"
    add("--from", choices=LAYOUTS, dest="source_layout", metavar="LAYOUT", help=text)
    text = (
        "rows per block where gate and up alternate in SRC, if it is not recorded (default: "
        "0, all gate rows first)"
    )
    add("--source-glu-interleave", type=whole_number, metavar="N", help=text)
    text = (
        "folder of tokenizer files to copy to DST, with the special tokens of its config.json "
        "(default: that of SRC, if it is safetensors)"
    )
    add("--tokenizer", type=Path, metavar="DIR", help=text)


def add_naming(parser: argparse.ArgumentParser, source: str) -> None:
    """Add the options for facts that a checkpoint does not record; ``source`` is its metavar."""
    add = parser.add_argument
    text = f"replace the key prefix FROM of {source} by TO; may be repeated"
    words: Any = {"action": "append", "default": [], "metavar": "FROM=TO"}
    add("--rename", type=_renaming, help=text, **words)
    text = "experts per layer, if the checkpoint does not record it (layout legacy)"
    add("--num-experts", type=number_above_zero, metavar="N", help=text)


def _renaming(text: str) -> str:
    """Check ``FROM=TO`` before a checkpoint is opened; an argparse ``type``."""
    if not text.partition("=")[0] or "=" not in text:
        raise argparse.ArgumentTypeError(f"expected FROM=TO, prefixes of keys, got '{text}'")
    return text
