"""Run SCRIPT in this process as `python SCRIPT ARGS` does.

With --use-moe-grouped-optim among ARGS it trains with moe_optim; without it, on a
machine with a GPU, nothing is replaced. On a machine without a GPU it trains on the CPU over gloo,
with or without the flag: torch.cuda is redirected and nine names of Megatron are replaced. It runs
one rank; for several: torchrun [...] --no-python moe-optim run SCRIPT ARGS. Options below come
before SCRIPT; all that follows it goes to the script.
"""

import argparse
from pathlib import Path

from moe_optim.config.recipes import check_requirements, load_recipe
from moe_optim.errors import raise_faults
from moe_optim.integration.arguments import FLAG
from moe_optim.integration.script_runner import (
    announce,
    check_script,
    find_script,
    meet_alone,
    prepare_imports,
    require_tree,
    run_script,
    trains_on_cpu,
)

USAGE = "moe-optim run [--megatron-lm PATH] [--recipe RECIPE] [--dry-run] SCRIPT [ARGS ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    text = (
        "checkout of Megatron-LM that overrides an installed megatron-core, and is also "
        "searched for SCRIPT"
    )
    add("--megatron-lm", type=Path, metavar="PATH", help=text)
    text = (
        "recipe to pass to SCRIPT: its megatron_args, --use-moe-grouped-optim and its section "
        "moe_optim; ARGS override it. A YAML file, or a name listed by `moe-optim recipes`"
    )
    add("--recipe", type=Path, metavar="RECIPE", help=text)
    text = (
        "run SCRIPT until its arguments are parsed, and list the errors in them; exits with 0 if "
        "there are none, else with 2. Without a launcher it assumes WORLD_SIZE ranks, or the "
        "minimum for the parallel sizes"
    )
    add("--dry-run", action="store_true", help=text)
    add("script", type=Path, metavar="SCRIPT", help="script that calls Megatron's pretrain()")
    text = (
        "the script's own arguments, and --use-moe-grouped-optim, --moe-optim-recipe PATH, "
        "--moe-optim-set KEY=VALUE"
    )
    rest = add("script_args", nargs=argparse.REMAINDER, metavar="ARGS", help=text)
    rest.required = False  # which an error about a missing SCRIPT would name


def run(args: argparse.Namespace) -> int:
    """Run the script to its end; its exit status and exceptions pass through."""
    if args.megatron_lm is not None:
        require_tree(args.megatron_lm)  # else the script would be reported missing
    script = find_script(args.script, args.megatron_lm)
    package = prepare_imports(script, args.megatron_lm)
    argv = _script_args(args)
    if args.recipe is not None:
        recipe = load_recipe(args.recipe)
        check_requirements(recipe, hardware=False)
        ours = [FLAG, "--moe-optim-recipe", str(recipe.path)]
        argv = [*recipe.megatron_argv(), *ours, *argv]  # the last occurrence of a flag counts
    meet_alone()
    cpu = trains_on_cpu()
    announce("moe-optim run", package, cpu=cpu)
    if args.dry_run:
        raise_faults(f"{script}: arguments", check_script(script, argv, cpu=cpu))
        print("moe-optim run: the arguments are valid")
        return 0
    run_script(script, argv, cpu=cpu)
    return 0


def _script_args(args: argparse.Namespace) -> list[str]:
    """Return the words after SCRIPT, with a ``--`` before them, which argparse drops."""
    words, rest = args.argv, list(args.script_args)
    at = len(words) - len(rest) - 1
    is_dropped = words[at] == "--" and Path(words[at - 1]) == args.script
    return ["--", *rest] if is_dropped else rest
