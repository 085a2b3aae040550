"""Health in TensorBoard and Weights & Biases, through Megatron's writers on the last rank.

Tags, for a ``layer`` such as ``layers.3.fc1`` and a ``figure`` such as ``saturated``::

    moe_optim/layer/figure              scalar over all experts of the layer
    moe_optim/layer/figure/experts      histogram over its experts
    moe_optim/layer/figure/by_expert    tensor by expert (TensorBoard only)
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from moe_optim.formats.health_figures import TAGS, ExpertLoad, LayerHealth


def current_iteration() -> int | None:
    """Return the number of the current iteration, from 1; None outside of Megatron's loop."""
    arguments = getattr(_megatron_globals(), "_GLOBAL_ARGS", None)
    finished = getattr(arguments, "curr_iteration", None)
    return None if finished is None else int(finished) + 1


def write(layers: Sequence[LayerHealth | ExpertLoad], iteration: int) -> None:
    """Write figures if this rank has a writer, to TensorBoard under ``iteration``.

    Weights & Biases rejects steps below the last logged one: there figures are logged under the
    current step, with the iteration as a value.
    """
    megatron = _megatron_globals()
    if megatron is None:
        return
    if (writer := megatron.get_tensorboard_writer()) is not None:
        for health in layers:
            tag = f"{TAGS}{health.layer}"
            for name, value in health.of_layer().items():
                writer.add_scalar(f"{tag}/{name}", value, iteration)
            for name, values in health.of_experts().items():
                writer.add_tensor(f"{tag}/{name}/by_expert", values.float(), iteration)
            for name, values in _finite(health):
                writer.add_histogram(f"{tag}/{name}/experts", values, iteration)
    if (wandb := megatron.get_wandb_writer()) is not None:
        figures: dict[str, Any] = {f"{TAGS}iteration": iteration}
        for health in layers:
            tag = f"{TAGS}{health.layer}"
            figures |= {f"{tag}/{name}": of for name, of in health.of_layer().items()}
            for name, values in _finite(health):
                figures[f"{tag}/{name}/experts"] = wandb.Histogram(values.tolist())
        wandb.log(figures, current_iteration())


def _megatron_globals() -> Any:
    return sys.modules.get("megatron.training.global_vars")


def _finite(health: LayerHealth | ExpertLoad) -> Iterator[tuple[str, Tensor]]:
    for name, values in health.of_experts().items():
        finite = values[values.isfinite()]
        if len(finite):
            yield name, finite
