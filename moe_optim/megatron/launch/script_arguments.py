"""Megatron's own parser with the plug-in's flags in it."""

from argparse import ArgumentParser

from megatron.training import arguments

from moe_optim.megatron.launch.arguments import add_moe_optim_arguments

_stock_add_megatron_arguments = arguments.add_megatron_arguments


def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add Megatron's flags and the plug-in's to ``parser`` and return it."""
    return add_moe_optim_arguments(_stock_add_megatron_arguments(parser))
