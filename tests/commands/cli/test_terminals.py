"""Commands in terminals of 60 and 120 columns, and with readers that go away."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from moe_optim.formats import FORMATS
from moe_optim.spelling import spell_bytes
from tools.documents.megatron_flags import recorded

COMMAND = [sys.executable, "-m", "moe_optim.commands.cli.main"]
STYLE = re.compile(r"\x1b\[[0-9;]*m")
IN_TE = [name for name, format in FORMATS.items() if not format.is_row_only]
ROWS = (*IN_TE, *(f"stock {name}" for name in ("bf16", "mxfp8", "nvfp4", "fp8_block")))


def run_in_terminal(columns, *words):
    """Return exit code and lines of a command whose stdout is a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None)
    process = subprocess.Popen(
        [*COMMAND, *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    os.close(theirs)
    said = b""
    while piece := read_some(ours):
        said += piece
    os.close(ours)
    return process.wait(), STYLE.sub("", said.decode()).splitlines()


def read_some(terminal):
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # what Linux says where nobody writes any more
        return b""


@pytest.mark.parametrize(("columns", "tables"), [(60, 4), (120, 2)])
def test_a_plan_fits_its_terminal_and_cuts_no_number(columns, tables, tmp_path):
    """All figures of the file stand in it, in fewer and wider tables where there is room."""
    path = tmp_path / "plan.json"
    words = ["--gpus", "64", "--gpu-memory", "80", "--bandwidth", "400", "--details"]
    words += ["--memory-bandwidth", "3.35", "--json", path, "--", "--grad-reduce-in-bf16"]
    code, lines = run_in_terminal(columns, "plan", "qwen3_30b_a3b", *words)
    assert code == 0
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)
    assert sum(line.startswith("format ") for line in lines) == tables
    for row in json.loads(path.read_text())["rows"]:
        shown = [line for line in lines if re.match(rf"{row['format']} +(yes|no|[-\d])", line)]
        assert len(shown) == tables
        text = " ".join(shown)
        for key in ("weight", "gradient", "optimizer", "step_memory", "total", "model"):
            assert spell_bytes(row[f"{key}_bytes_per_rank"]) in text
        assert f" {row['gather_ms']:.3g} ms" in text


def run_without_reader(*words):
    """Return exit code and errors of a command whose stdout nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, *map(str, words)], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    return done.returncode, done.stderr


@recorded  # importing Megatron warns
def test_a_closed_pipe_loses_no_file_of_a_plan(tmp_path):
    """As with ``| head -1``: tables are printed last."""
    rows = tmp_path / "plan.json"
    code, errors = run_without_reader("plan", "qwen3_30b_a3b", "--gpus", "8", "--json", rows)
    assert (code, errors) == (141, "")
    assert len(json.loads(rows.read_text())["rows"]) == len(ROWS)
