"""The three flags of the plug-in, and what they ask for.

They are read from the command line itself and not from Megatron's ``args``: ``--yaml-cfg`` replaces
those after parsing, and ``--use-checkpoint-args`` overwrites some of them.
"""

from argparse import Action, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from moe_optim.config import MoEOptimConfig
from moe_optim.config.recipes import load_recipe
from moe_optim.errors import ConfigError

FLAG = "--use-moe-grouped-optim"


class _SwitchOn(Action):
    """Turns the plug-in on, and Megatron's distributed optimizer, which that of the plug-in is."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, help=help)

    def __call__(self, parser: ArgumentParser, args: Namespace, *_: Any) -> None:
        setattr(args, self.dest, True)
        args.use_distributed_optimizer = True


def add_moe_optim_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the plug-in's flags to ``parser``, in a group of their own, and return it.

    A parser that has them already is left alone.
    """
    if FLAG in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(title="moe_optim")
    group.add_argument(
        FLAG,
        action=_SwitchOn,
        help="Keep expert weights quantized and train them with moe_optim's distributed optimizer. "
        "Implies --use-distributed-optimizer.",
    )
    group.add_argument(
        "--moe-optim-recipe",
        metavar="PATH",
        help="Take the moe_optim section of this recipe. Its megatron_args are not read here.",
    )
    group.add_argument(
        "--moe-optim-set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="Set one field of moe_optim, after the recipe. May be given several times.",
    )
    return parser


def request_from_argv(argv: Sequence[str]) -> MoEOptimConfig | None:
    """Return the configuration that a command line asks for, or None without the flag.

    Args:
        argv: arguments without the program name; those of Megatron are skipped.

    Raises:
        ConfigError: a recipe or a field without ``--use-moe-grouped-optim``, or either is wrong.
    """
    parser = add_moe_optim_arguments(ArgumentParser(allow_abbrev=False, add_help=False))
    args, _ = parser.parse_known_args(list(argv))
    if not args.use_moe_grouped_optim:
        if args.moe_optim_recipe or args.moe_optim_set:
            raise ConfigError(
                f"command line: --moe-optim-recipe and --moe-optim-set need {FLAG}, got them "
                f"without it. Add {FLAG}, or remove them."
            )
        return None
    config = MoEOptimConfig()
    if args.moe_optim_recipe:
        config = load_recipe(args.moe_optim_recipe).moe_optim
    return config.replace_from(args.moe_optim_set)
