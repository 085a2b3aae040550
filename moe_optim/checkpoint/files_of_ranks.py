"""Hooks for ``--ckpt-format torch``: checksums of the per-rank files, and their verification.

Each rank writes its own files, and Megatron does not record when all are complete. A save therefore
begins with a checksum manifest that marks the checkpoint unfinished.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_optim.checkpoint.hooks import is_local, on_first_rank
from moe_optim.checkpoint.integrity import require_intact
from moe_optim.checkpoint.load_session import open_session
from moe_optim.checkpoint.sealing import mark_unfinished, record_checksums
from moe_optim.integration.agreement import agree
from moe_optim.integration.engine import original
from moe_optim.integration.installation import config_or_bf16, installed_config

_CHECKPOINTING = "megatron.training.checkpointing"


def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Save a checkpoint; arguments and result are Megatron's. Every rank must call it.

    StateError if a per-rank file is incomplete, or the checksum manifest cannot be written.
    """
    return _save(original(f"{_CHECKPOINTING}:save_checkpoint"), iteration, *args, **kwargs)


def save_checkpoint_in_loop(iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Equivalent to :func:`save_checkpoint`, for the name that the training loop imports."""
    return _save(original("megatron.training.training:save_checkpoint"), iteration, *args, **kwargs)


def _save(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(stock).bind(*args, **kwargs)
    given.apply_defaults()
    folder = _folder_of_ranks(given.arguments)
    if folder is None:
        return stock(*args, **kwargs)
    on_first_rank(lambda: mark_unfinished(folder))
    result = stock(*args, **kwargs)
    on_first_rank(lambda: record_checksums(folder))
    return result


def _folder_of_ranks(given: dict[str, Any]) -> Path | None:
    """Return the folder of the per-rank files; None for other formats."""
    from megatron.training import get_args
    from megatron.training.checkpointing import get_checkpoint_name

    args = get_args()
    is_other = args.use_dist_ckpt or given["non_persistent_ckpt"]
    if is_other or installed_config() is None or not is_local(args.save):
        return None
    return Path(
        get_checkpoint_name(args.save, given["iteration"], given["release"], return_base_dir=True)
    )


def get_checkpoint_format(checkpoint_name: str, args: Any) -> Any:
    """Return the format of a checkpoint and open or verify it; arguments are Megatron's.

    Every rank of an initialized process group must call it: ranks share the reading. StateError
    lists all missing or damaged files.
    """
    found = original(f"{_CHECKPOINTING}:_get_checkpoint_format")(checkpoint_name, args)
    if installed_config() is not None and is_local(checkpoint_name):
        if found == "torch":
            _check(Path(checkpoint_name))
        elif found == "torch_dist" and torch.distributed.is_initialized():
            open_session(Path(checkpoint_name), None)
    return found


def _check(folder: Path) -> None:
    if not torch.distributed.is_initialized():  # only arguments are read; the load follows
        require_intact(folder, thorough=False)
        return
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    thorough = config_or_bf16().check_on_load != "quick"  # Megatron's reads compare nothing
    agree(lambda: require_intact(folder, thorough=thorough, part=rank, parts=ranks), None)
