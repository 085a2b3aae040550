"""Runs all mutants, or some: ``python -m tests.mutation [-k WORD] [--jobs N]``."""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutation import runner
from tests.mutation.of_buckets import MUTANTS as OF_BUCKETS
from tests.mutation.of_checkpoints import MUTANTS as OF_CHECKPOINTS
from tests.mutation.of_kernels import MUTANTS as OF_KERNELS
from tests.mutation.of_muon import MUTANTS as OF_MUON
from tests.mutation.of_optimizer import MUTANTS as OF_OPTIMIZER

ALL = (*OF_BUCKETS, *OF_CHECKPOINTS, *OF_KERNELS, *OF_MUON, *OF_OPTIMIZER)


def main() -> int:
    """Print what became of each mutant, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "-k", default="", metavar="WORD", help="only those whose file or code has it"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at a time (default 2)")
    args = parser.parse_args()
    chosen = [mutant for mutant in ALL if args.k in str(mutant)]
    root = Path(__file__).parents[2]
    tests = sorted({name for mutant in chosen for name in mutant.killers})
    if failed := runner.run_tests(root, tests):
        print(f"fail without any mutant: {', '.join(failed)}")
        return 1
    with ThreadPoolExecutor(args.jobs) as pool:
        verdicts = pool.map(lambda mutant: runner.judge(root, mutant), chosen)
        kept = 0
        for mutant, verdict in zip(chosen, verdicts, strict=True):
            kept += not verdict.is_killed
            print(f"{verdict.word:9} {mutant}: {verdict.by}", flush=True)
    print(f"{len(chosen) - kept} of {len(chosen)} killed")
    return int(bool(kept) or not chosen)


if __name__ == "__main__":
    sys.exit(main())
