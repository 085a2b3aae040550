"""Harmed checkpoints go through every command, which answers or refuses, and does nothing else."""

import json
import os
import subprocess
import sys

from tests.support.training_runs.runs import REPOSITORY

CASES = int(os.environ.get("FUZZ_CASES", "10"))
"""``make fuzz CASES=10000`` runs more."""
SEED = os.environ.get("FUZZ_SEED", "0")


def test_a_harmed_checkpoint_is_answered_or_refused_and_does_no_harm(tmp_path):
    """No error but ours, in one line; no code of the checkpoint runs; nothing is written but the
    target, and nothing outside of the checkpoint is read; 5 s and 1 GiB are enough for each."""
    words = ["tests.support.hostile.hostile_run", str(tmp_path / "sandbox"), SEED, "0", str(CASES)]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120 + 10 * CASES,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    harmful = [result for result in results if result["faults"]]
    report = "\n".join(f"{each['seed']}, {each['done']}: {each['faults']}" for each in harmful[:5])
    assert not harmful, f"{len(harmful)} of {len(results)} cases:\n{report}"
    assert len(results) == CASES, f"case {len(results)} ended all of them:\n{done.stderr[-3000:]}"
