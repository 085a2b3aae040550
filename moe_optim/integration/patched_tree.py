"""Entry points for a Megatron-LM tree patched with ``patches/``: same table, nothing rebound.

A patched tree calls ``megatron.core.moe_optim_hook`` with a patch id to get the replacement that
``install()`` would bind to the target.
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

HOOK = "megatron.core.moe_optim_hook"  # module that the diffs add to Megatron


def switch_on(parser: ArgumentParser, argv: Sequence[str]) -> ArgumentParser:
    """Let the patched tree build this package's classes, as configured by ``argv``.

    Adds the plug-in's flags to ``parser``, Megatron's. Optimizers still apply their own patches
    when built, as does Adam without Transformer Engine and apex.
    """
    install_in_patched_tree(config_from_argv(argv) or MoEOptimConfig())
    hook: Any = importlib.import_module(HOOK)
    hook.replacement_of = replacement_of
    return add_moe_optim_arguments(parser)


@functools.cache
def replacement_of(patch_id: str) -> Any:
    """Return the replacement of a patch id, imported on the first call."""
    (patch,) = (patch for patch in patches.PATCHES if patch.id == patch_id)
    module, _, path = patch.replacement.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))
