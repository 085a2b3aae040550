"""Hooks into Megatron's saving: what is saved, when it counts as complete, and its checksums.

A save records checksums before it declares a torch_dist checkpoint complete. For ``--ckpt-format
torch``, each rank writes its own files, and Megatron does not record when all are complete: such a
save begins with a checksum manifest that marks the checkpoint unfinished.
"""

import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from moe_optim.calibration.state_entries import complete_amaxes, synchronize_amax
from moe_optim.checkpoint.files.folders import is_local
from moe_optim.checkpoint.quick_plans import plan_quickly
from moe_optim.checkpoint.sealing import (
    invalidate,
    mark_unfinished,
    record_checksums,
    record_config,
    record_data,
)
from moe_optim.checkpoint.staging import MadeTensor, synchronously
from moe_optim.checkpoint.state_kinds import BY_NAME, SHARDING_TYPE
from moe_optim.checkpoint.state_manifest import states_with_manifests
from moe_optim.integration.agreement import agree, gather_objects
from moe_optim.integration.engine import original
from moe_optim.integration.installation import installed_config
from moe_optim.weights.names import BASE, is_wrapper, unwrapped_name
from moe_optim.weights.te.fields import is_tensorwise, read_values, te_formats_of

_CHECKPOINTING = "megatron.training.checkpointing"
_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")


def save(  # noqa: PLR0913  # Megatron's
    sharded_state_dict: Any,
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Any = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str | None = "nvrx",
    verify_integrity: bool = False,
) -> Any:
    """Save a distributed checkpoint; arguments and result are Megatron's. Every rank must call it.

    An overwritten checkpoint counts as incomplete until the new one is complete and its checksums
    are recorded. States that this package did not produce pass unchanged.
    """
    folder = Path(checkpoint_dir)
    is_ours = is_local(checkpoint_dir) and (
        installed_config() is not None or any(states_with_manifests(sharded_state_dict))
    )
    if installed_config() is not None:
        complete_amaxes(sharded_state_dict)
        _save_values(sharded_state_dict)
    if async_sharded_save:
        _detach_from_host_memory(sharded_state_dict)
    if is_ours:
        _on_first_rank(lambda: invalidate(folder))
    with plan_quickly(), nullcontext() if async_sharded_save else synchronously():
        request = original("megatron.core.dist_checkpointing:save")(
            sharded_state_dict,
            checkpoint_dir,
            sharded_strategy,
            validate_access_integrity,
            True,  # a request of Megatron's own, which this executes below
            preprocess_common_before_consistancy_check,
            content_metadata,
            async_strategy if async_sharded_save else "mcore",
            verify_integrity,
        )
    if is_ours:
        # the last functions write metadata.json and, if asked to, Megatron's checksums of all files
        *data, write_config = request.finalize_fns[: -1 if verify_integrity else None]
        request.finalize_fns[: len(data) + 1] = [
            *data,
            lambda: record_data(folder),
            write_config,
            lambda: _on_first_rank(lambda: record_config(folder)),
        ]
    if async_sharded_save:
        return request
    request.execute_sync()
    return None


def _save_values(sharded_state_dict: Any) -> None:
    """Replace Transformer Engine weights by bf16 values where Megatron's writers would not.

    Megatron's writers convert on GPUs only, and block formats only on some of them. Other weights
    are left to them, which convert one weight at a time.
    """
    for entry in nested_values(sharded_state_dict):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory):
            weight = entry.data
            is_on_host = isinstance(weight, torch.Tensor) and weight.device.type == "cpu"
            if te_formats_of(weight) or (is_on_host and is_tensorwise(weight)):
                entry.data = read_values(weight)


def _detach_from_host_memory(sharded_state_dict: Any) -> None:
    """Copy states in host memory, which a step must not change while they are written.

    Megatron copies views of larger memory, and everything on GPUs.
    """
    for entry in nested_values(sharded_state_dict):
        is_box = isinstance(entry, ShardedTensor) and not entry.has_regular_grid
        if isinstance(entry, MadeTensor):
            entry.data = entry.make()
        elif is_box and entry.data.device.type == "cpu":
            entry.data = entry.data.clone()


def _on_first_rank(act: Callable[[], None]) -> None:
    """Call ``act`` on the first rank; raise its error on all. Every rank must call it."""
    agree(lambda: act() if torch.distributed.get_rank() == 0 else None, None)


def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Save a checkpoint; arguments and result are Megatron's. Every rank must call it.

    StateError if a per-rank file is incomplete, or the checksum manifest cannot be written.
    """
    return _save_files(original(f"{_CHECKPOINTING}:save_checkpoint"), iteration, *args, **kwargs)


def save_checkpoint_in_loop(iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Equivalent to :func:`save_checkpoint`, for the name that the training loop imports."""
    stock = original("megatron.training.training:save_checkpoint")
    return _save_files(stock, iteration, *args, **kwargs)


def _save_files(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(stock).bind(*args, **kwargs)
    given.apply_defaults()
    folder = _folder_of_ranks(given.arguments)
    if folder is None:
        return stock(*args, **kwargs)
    _on_first_rank(lambda: mark_unfinished(folder))
    result = stock(*args, **kwargs)
    _on_first_rank(lambda: record_checksums(folder))
    return result


def _folder_of_ranks(given: dict[str, Any]) -> Path | None:
    from megatron.training import get_args
    from megatron.training.checkpointing import get_checkpoint_name

    args = get_args()
    is_other = args.use_dist_ckpt or given["non_persistent_ckpt"]
    if is_other or installed_config() is None or not is_local(args.save):
        return None
    return Path(
        get_checkpoint_name(args.save, given["iteration"], given["release"], return_base_dir=True)
    )


def generate_state_dict(  # noqa: PLR0913  # Megatron's
    args: Any,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    rng_state: Any,
    iteration: int | None = None,
    optim_sd_kwargs: dict[str, Any] | None = None,
    model_sd_kwargs: dict[str, Any] | None = None,
    rerun_state: Any = None,
) -> Any:
    """Return the state to save or to load into; arguments and result are Megatron's.

    Every rank must call it. If parameters are frozen in some layers only, states by name are saved
    under per-layer keys, which the checkpoint's metadata declares.
    """
    synchronize_amax(model)
    options = optim_sd_kwargs or {}
    is_saved = optimizer is not None and not args.no_save_optim and not options.get("is_loading")
    sharding = (options.get("metadata") or {}).get(SHARDING_TYPE)
    if is_saved and sharding == BY_NAME and _differ_in_frozen(model):
        # A tensor across all layers would lack the states of frozen ones. Megatron passes this dict
        # to model and optimizer, and saves it for loading.
        options["metadata"]["non_homogeneous_layers"] = True
    return original(f"{_CHECKPOINTING}:generate_state_dict")(
        args,
        model,
        optimizer,
        opt_param_scheduler,
        rng_state,
        iteration,
        optim_sd_kwargs,
        model_sd_kwargs,
        rerun_state,
    )


def _differ_in_frozen(model: list[Any]) -> bool:
    """Return whether any parameter is frozen in one layer and trained in another, across ranks.

    A linear behind an adapter counts as trained in its layer.
    """
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for chunk in model:
        for name, param in chunk.named_parameters():
            names[param.requires_grad].add(_LAYER.sub("*", unwrapped_name(name)))
        for name, module in chunk.named_modules():
            if not name.endswith(f".{BASE}"):
                names[is_wrapper(module)].add(_LAYER.sub("*", unwrapped_name(name)))
    of_ranks = gather_objects(names, None)
    trained = set().union(*(of_rank[True] for of_rank in of_ranks))
    return any(trained & of_rank[False] for of_rank in of_ranks)
