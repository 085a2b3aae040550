"""Recipes that nobody would write load, or end in one error of ours; FUZZ_CASES says how many."""

import json
import os
import subprocess
import sys

from tests.support.training_runs.runs import REPOSITORY

CASES = int(os.environ.get("FUZZ_CASES", "300"))


def test_any_recipe_loads_or_is_one_error_within_bounds():
    """5 s and 1 GiB each; nothing private is shown, no file is written and no code is run.

    ``python -m tests.support.hostile.fuzzed_recipes NUMBER`` shows the case of a number.
    """
    command = [sys.executable, "-m", "tests.support.hostile.fuzzed_recipes", "0", str(CASES)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    faults = [json.loads(line) for line in lines if line.startswith("{")]
    assert not faults, "\n".join(map(str, faults[:3]))
    assert done.returncode == 0, f"ended at {lines[-1:]}\n{done.stderr[-3000:]}"
    assert lines[-1] == f"at {CASES - 1}"
