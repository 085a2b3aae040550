"""Parses the plug-in's flags into its configuration, and Megatron's flags.

The plug-in's flags are read from the command line rather than Megatron's ``args``, which
``--yaml-cfg`` replaces and ``--use-checkpoint-args`` partly overwrites.
"""

from argparse import Action, ArgumentParser, HelpFormatter, Namespace
from collections.abc import Sequence
from math import lcm
from typing import Any, NoReturn

from moe_optim.config import MoEOptimConfig
from moe_optim.config.recipes import load_recipe
from moe_optim.errors import ConfigError

FLAG = "--use-moe-grouped-optim"
MUON_NAMES = ("muon", "dist_muon")  # values of --optimizer that select Muon


class _SwitchOn(Action):
    """Enables the plug-in and Megatron's distributed optimizer, which it extends."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, help=help)

    def __call__(self, parser: ArgumentParser, args: Namespace, *_: Any) -> None:
        setattr(args, self.dest, True)
        args.use_distributed_optimizer = True


def add_moe_optim_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the plug-in's flags to ``parser`` unless present, as a separate group; return it."""
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
        help="Use the moe_optim section of this recipe. Its megatron_args are ignored.",
    )
    group.add_argument(
        "--moe-optim-set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="Override one field of moe_optim. May be repeated.",
    )
    return parser


def extend_distributed_optimizer(settings: Any) -> None:
    """Let Muon extend Megatron's distributed optimizer rather than its layer-wise optimizer.

    Megatron's validation turns ``use_distributed_optimizer`` off for Muon, but buffers and
    checkpoints follow that flag. ``settings``, validated arguments or an ``OptimizerConfig``, are
    modified; ``dist_muon``, a deprecated name, becomes ``muon``. No-op for other optimizers.
    """
    if settings.optimizer in MUON_NAMES:
        settings.optimizer = "muon"
        settings.use_distributed_optimizer = True
        settings.use_layer_wise_distributed_optimizer = False


def config_from_argv(argv: Sequence[str]) -> MoEOptimConfig | None:
    """Return the configuration given by a command line, None without ``--use-moe-grouped-optim``.

    Skips Megatron's arguments. ConfigError for an invalid recipe or field, or one without the flag.
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
    """Raises errors instead of exiting."""

    def _get_formatter(self) -> HelpFormatter:
        return HelpFormatter(self.prog, width=80)  # every add_argument would ask for the terminal's

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"megatron_args: expected flags that Megatron takes, got: {message}.")


def parse_with_megatron(argv: Sequence[str]) -> Namespace:
    """Parse ``argv`` with Megatron's parser, unvalidated; imports Megatron.

    ConfigError for unknown flags or invalid values.
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
    """Return the number that must divide the world size, for parsed flags of Megatron."""
    dense = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    whole = expert_tensor * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    instances = args.num_distributed_optimizer_instances
    return lcm(dense * args.context_parallel_size, dense * instances, whole * instances)
