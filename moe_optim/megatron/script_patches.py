"""What is rebound for scripts that know nothing of this package; a part of ``patches.PATCHES``."""

from moe_optim.megatron.patching import Patch

SCRIPT: tuple[Patch, ...] = (
    Patch(
        id="script-arguments",
        target="megatron.training.arguments:add_megatron_arguments",
        replacement="moe_optim.megatron.script_arguments:add_megatron_arguments",
        because="the parser of an unmodified script refuses flags that it does not know",
        remove_when="Megatron takes flags from packages that are installed beside it",
    ),
)
"""Needed by ``moe-optim run``, with ``--use-moe-grouped-optim`` alone."""
