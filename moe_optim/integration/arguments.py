"""The plug-in's flags, the configuration that they give, and Megatron's own flags parsed.

The plug-in's flags are read from the command line itself and not from Megatron's ``args``:
``--yaml-cfg`` replaces those after parsing, and ``--use-checkpoint-args`` overwrites some of them.
"""

from argparse import Action, ArgumentParser, Namespace
from collections.abc import Sequence
from math import lcm
from typing import Any, NoReturn

from moe_optim.config import MoEOptimConfig
from moe_optim.config.recipes import load_recipe
from moe_optim.errors import ConfigError

FLAG = "--use-moe-grouped-optim"


class _SwitchOn(Action):
    """Turns the plug-in on, and Megatron's distributed optimizer, which the plug-in's extends."""

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


def config_from_argv(argv: Sequence[str]) -> MoEOptimConfig | None:
    """Return the configuration that a command line gives, or None without the flag.

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
    if args.moe_optim_recipe:
        config = load_recipe(args.moe_optim_recipe).moe_optim
    else:
        config = MoEOptimConfig()
    return config.replace_from(args.moe_optim_set) if args.moe_optim_set else config


class FlagsParser(ArgumentParser):
    """Raises what argparse would end the process with."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"megatron_args: expected flags that Megatron takes, got: {message}.")


def parse_with_megatron(argv: Sequence[str]) -> Namespace:
    """Return what Megatron's parser makes of ``argv``, unvalidated; imports Megatron.

    Raises:
        ConfigError: a flag that Megatron does not have, or a value that it does not take.
    """
    from megatron.training.arguments import add_megatron_arguments

    parser: ArgumentParser = add_megatron_arguments(FlagsParser(allow_abbrev=False))
    try:
        return parser.parse_args(list(argv))
    except (AssertionError, SyntaxError, ArithmeticError) as error:  # Megatron evaluates values
        raise ConfigError(
            f"megatron_args: expected values that Megatron takes, got: {error}."
        ) from error


def ranks_multiple(args: Namespace) -> int:
    """Return what the number of ranks must be a multiple of, for parsed flags of Megatron."""
    dense = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    whole = expert_tensor * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    instances = args.num_distributed_optimizer_instances
    return lcm(dense * args.context_parallel_size, dense * instances, whole * instances)
