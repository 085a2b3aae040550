"""Refuses misspelled flags and invalid values before torch and Megatron are imported."""

from collections.abc import Sequence
from dataclasses import replace

from moe_optim.commands.plan.flags import is_recorded, recorded_parser, with_torch_dtypes
from moe_optim.config import MoEOptimConfig
from moe_optim.environment import find_package
from moe_optim.integration.argument_checks import FaultyFlags
from moe_optim.integration.arguments import (
    FLAG,
    add_moe_optim_arguments,
    extend_distributed_optimizer,
)
from moe_optim.rules import Setup, refusals


def list_early_faults(argv: Sequence[str]) -> list[str]:
    """Return faults of Megatron's flags by their record; none if the installed one has no record.

    If names and values are right there are none: the dry run knows all other faults. Else refused
    flags are listed, too.
    """
    installed = find_package("megatron-core")
    if installed is None or not is_recorded(installed):
        return []
    parsed = FaultyFlags(add_moe_optim_arguments(recorded_parser(all_patterns=True)), argv)
    faults, args = parsed.faults, parsed.args
    if not faults:
        return []
    if args is not None:
        extend_distributed_optimizer(args)
        args = with_torch_dtypes(args)
        setup = Setup(config=MoEOptimConfig(), args=args)
        if FLAG in parsed.argv:  # weights are unknown
            setup = Setup.of_flags(MoEOptimConfig(format="bf16"), args, args, [])
            setup = replace(setup, args=args)
        faults += [f"refused by moe_optim: {line}" for line in refusals(setup)]
    faults[-1] += " Megatron checks the rest once these are correct."
    return faults
