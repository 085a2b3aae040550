"""Hook for communication that must precede Megatron's generation of a state to save."""

import re
from typing import Any

from moe_optim.calibration.state_entries import synchronize_amax
from moe_optim.integration.agreement import gather_objects
from moe_optim.integration.engine import original
from moe_optim.weights.names import BASE, is_wrapper, unwrapped_name

_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")


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
    if _saves_states_by_name(args, optimizer, optim_sd_kwargs or {}) and _differ_in_frozen(model):
        # A tensor across all layers would lack the states of frozen ones. Megatron passes this dict
        # to model and optimizer, and saves it for loading.
        (optim_sd_kwargs or {})["metadata"]["non_homogeneous_layers"] = True
    return original("megatron.training.checkpointing:generate_state_dict")(
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


def _saves_states_by_name(args: Any, optimizer: Any, options: dict[str, Any]) -> bool:
    sharding = (options.get("metadata") or {}).get("distrib_optim_sharding_type")
    is_saved = optimizer is not None and not args.no_save_optim and not options.get("is_loading")
    return is_saved and sharding == "fully_reshardable"


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
