"""What a tree of Megatron-LM with the diffs of ``patches/`` calls: the same table, nothing rebound.

A patched tree asks ``megatron.core.moe_optim_hook`` for a replacement by the id of a patch, where
``install()`` would rebind the name that the patch targets.
"""

import functools
import importlib
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from moe_optim.config import MoEOptimConfig
from moe_optim.integration import patches
from moe_optim.integration.arguments import add_moe_optim_arguments, config_from_argv
from moe_optim.integration.installation import install_in_patched_tree

HOOK = "megatron.core.moe_optim_hook"
"""The module that the diffs add to Megatron."""


def switch_on(parser: ArgumentParser, argv: Sequence[str]) -> ArgumentParser:
    """Let the patched tree build this package's classes, as its command line configures them.

    Optimizers still apply the patches that they need when they are built, and so does Adam where
    neither Transformer Engine nor apex is.

    Args:
        parser: Megatron's; gets the plug-in's flags.
        argv: arguments without the program name, ``--use-moe-grouped-optim`` among them.

    Raises:
        ConfigError: flags of the plug-in are wrong.
        StateError: another configuration is installed already.
    """
    install_in_patched_tree(config_from_argv(argv) or MoEOptimConfig())
    hook: Any = importlib.import_module(HOOK)
    hook.replacement_of = replacement_of
    return add_moe_optim_arguments(parser)


@functools.cache
def replacement_of(patch_id: str) -> Any:
    """Return what the table of patches has under an id; it is imported on the first call."""
    (patch,) = (patch for patch in patches.PATCHES if patch.id == patch_id)
    module, _, path = patch.replacement.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))
