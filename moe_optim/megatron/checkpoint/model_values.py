"""Values for masters out of a state dict of the model: every parameter by its whole name."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.megatron.experts.loading import expert_values_for_chunks
from moe_optim.megatron.weights.names import unwrapped_name

_MOST_LISTED = 8


def model_values_for(
    model_chunks: Sequence[torch.nn.Module], state_dict: Mapping[str, Any]
) -> dict[torch.nn.Parameter, Tensor]:
    """Return the value of every parameter of a model. No rank communicates.

    Args:
        model_chunks: of one optimizer, in order.
        state_dict: as ``reload_model_params`` takes it: of one chunk, or the chunks' under
            ``model``, ``model0`` and so on, with the experts in any layout. Left alone.

    Returns:
        A tensor of its parameter's shape for each, of any float dtype, on any device.

    Raises:
        LayoutError: parameters that are missing, there twice or of another shape; all are named.
    """
    state = expert_values_for_chunks(model_chunks, state_dict)
    form = next((form for form in ("model", "model_") if f"{form}0" in state), None)
    values: dict[torch.nn.Parameter, Tensor] = {}
    faults: list[str] = []
    for index, chunk in enumerate(model_chunks):
        of_chunk = state[f"{form}{index}"] if form else state.get("model", state)
        found = dict(of_chunk)
        DistributedOptimizer._synthesize_state_dict_params_for_model(found, chunk)
        by_name: dict[str, list[str]] = {}
        for key in found:
            by_name.setdefault(unwrapped_name(key), []).append(key)
        for name, param in chunk.named_parameters():
            keys = by_name.get(unwrapped_name(name), [])
            if len(keys) != 1:
                faults.append(f"{unwrapped_name(name)} is there {len(keys)} times")
            elif found[keys[0]].shape != param.shape:
                shapes = f"{list(found[keys[0]].shape)}, expected {list(param.shape)}"
                faults.append(f"{keys[0]} is {shapes}")
            else:
                values[param] = found[keys[0]]
    if faults:
        more = f" and {len(faults) - _MOST_LISTED} more" if len(faults) > _MOST_LISTED else ""
        raise LayoutError(
            "reload_model_params: state_dict: expected every parameter of the model once, got: "
            f"{'; '.join(faults[:_MOST_LISTED])}{more}. Give the state of the whole model."
        )
    return values
