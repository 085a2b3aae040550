"""Run SCRIPT in this process as `python SCRIPT ARGS` does.

With --use-moe-grouped-optim among ARGS it trains with the grouped optimizer; without it, on a
machine with a GPU, nothing is replaced. Without a GPU it trains on the CPU, over gloo: then
torch.cuda is redirected and eight names of Megatron are replaced, with the flag or without. It is
one rank; for several: torchrun [...] --no-python moe-optim run SCRIPT ARGS.
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

HELP = "run an unmodified script such as pretrain_gpt.py of Megatron-LM"
USAGE = "moe-optim run [--megatron-lm PATH] [--recipe RECIPE] [--dry-run] SCRIPT [ARGS ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add(
        "--megatron-lm",
        type=Path,
        metavar="PATH",
        help="a checkout of Megatron-LM that wins over an installed megatron-core; SCRIPT is "
        "looked for there too",
    )
    add(
        "--recipe",
        type=Path,
        metavar="RECIPE",
        help="give SCRIPT all of a recipe: its megatron_args, --use-moe-grouped-optim and its "
        "section moe_optim; ARGS win. A YAML file, or a name that `moe-optim recipes` lists",
    )
    add(
        "--dry-run",
        action="store_true",
        help="run SCRIPT only until its arguments are parsed, and list everything that is wrong "
        "with them; exits with 0 if nothing is, else with 2. Without a launcher it assumes as many "
        "ranks as the parallel sizes need, or WORLD_SIZE",
    )
    add("script", type=Path, metavar="SCRIPT", help="a script that calls Megatron's pretrain()")
    add(
        "script_args",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="the script's own arguments, and --use-moe-grouped-optim, --moe-optim-recipe PATH, "
        "--moe-optim-set KEY=VALUE",
    )


def run(args: argparse.Namespace) -> int:
    """Run the script to its end; what it exits with or raises passes through.

    Raises:
        MoEOptimError: the script or the source tree cannot be used, or the plug-in refuses; in a
            dry run, with everything that is wrong.
    """
    if args.megatron_lm is not None:
        require_tree(args.megatron_lm)  # else it is the script that seems to be missing
    script = find_script(args.script, args.megatron_lm)
    package = prepare_imports(script, args.megatron_lm)
    argv = args.script_args
    if args.recipe is not None:
        recipe = load_recipe(args.recipe)
        check_requirements(recipe, hardware=False)
        ours = [FLAG, "--moe-optim-recipe", str(recipe.path)]
        argv = [*recipe.megatron_argv(), *ours, *argv]  # of a flag given twice, the last one counts
    meet_alone()
    cpu = trains_on_cpu()
    announce("moe-optim run", package, cpu=cpu)
    if args.dry_run:
        raise_faults(f"{script}: arguments", check_script(script, argv, cpu=cpu))
        print("moe-optim run: nothing is wrong with the arguments")
        return 0
    run_script(script, argv, cpu=cpu)
    return 0
