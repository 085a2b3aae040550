"""Commands whose reader goes away."""

import json
import os
import subprocess
import sys

from tools.documents.megatron_flags import recorded

COMMAND = [sys.executable, "-m", "moe_optim.commands.cli.main"]


@recorded  # importing Megatron warns
def test_a_closed_pipe_loses_no_file_of_a_plan(tmp_path):
    """As with ``| head -1``: tables are printed last."""
    rows = tmp_path / "plan.json"
    words = [*COMMAND, "plan", "qwen3_30b_a3b", "--gpus", "8", "--json", rows]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
    assert json.loads(rows.read_text())["rows"]
