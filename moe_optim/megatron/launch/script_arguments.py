"""Megatron's own parser with the plug-in's flags in it."""

from argparse import ArgumentParser

from moe_optim.megatron.launch.arguments import add_moe_optim_arguments
from moe_optim.megatron.patching.engine import original


def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add Megatron's flags and the plug-in's to ``parser`` and return it."""
    stock = original("megatron.training.arguments:add_megatron_arguments")
    return add_moe_optim_arguments(stock(parser))
