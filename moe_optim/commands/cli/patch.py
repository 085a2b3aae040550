"""Add moe_optim to a checkout of Megatron-LM as source diffs, with git apply.

With the diffs of patches/megatron-lm-0.19, a checkout of core_v0.19.0 accepts
--use-moe-grouped-optim itself. Any other source tree is refused.
"""

import argparse
from pathlib import Path

from moe_optim.integration.script_runner import require_tree
from moe_optim.integration.source_diffs import SourceDiff, apply_diffs, load_diffs

_NOT_APPLIED, _UNKNOWN = 1, 2

_ACTIONS = {
    "check": "show whether each diff is applied or still fits, and change nothing; exits with 0 if "
    "all are applied, 1 if not, 2 if the source is unknown",
    "apply": "apply all diffs to the tree, or none",
    "revert": "remove all diffs from the tree, which restores every byte",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in _ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        action.add_argument(
            "tree", type=Path, metavar="PATH", help="checkout, the folder of pretrain_gpt.py"
        )


def run(args: argparse.Namespace) -> int:
    """Apply, revert or check the diffs and return the exit code."""
    tree = require_tree(args.tree)
    diffs = load_diffs()
    if args.action == "check":
        return _check(tree, diffs)
    changed = apply_diffs(tree, diffs, reverse=args.action == "revert")
    for path in changed:
        print(f"changed: {path}")
    if not changed:
        print("nothing to do")
    return 0


def _check(tree: Path, diffs: tuple[SourceDiff, ...]) -> int:
    states = [diff.state(tree) for diff in diffs]
    for diff, state in zip(diffs, states, strict=True):
        ids = f" ({', '.join(diff.patch_ids)})" if diff.patch_ids else ""
        print(f"{diff.path}{ids}: {state}")
    if not set(states) <= {"applied", "not applied"}:
        return _UNKNOWN
    return 0 if set(states) == {"applied"} else _NOT_APPLIED
