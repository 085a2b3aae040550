"""Health in TensorBoard and Weights & Biases, through the writers that Megatron has made.

One rank has writers, the last one, and the others write nothing. Tags, where ``layer`` is such as
``layers.3.fc1`` and ``figure`` such as ``saturated``::

    moe_optim/layer/figure              scalar, of all experts of the layer
    moe_optim/layer/figure/experts      histogram over them
    moe_optim/layer/figure/by_expert    tensor, in the order of the experts (TensorBoard alone)
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from moe_optim.formats.health_figures import TAGS, ExpertLoad, LayerHealth


def current_iteration() -> int | None:
    """Return the iteration that is being trained, from 1 on, as Megatron's log counts.

    None where another loop than Megatron's trains.
    """
    arguments = getattr(_megatron_globals(), "_GLOBAL_ARGS", None)
    finished = getattr(arguments, "curr_iteration", None)
    return None if finished is None else int(finished) + 1


def write(layers: Sequence[LayerHealth | ExpertLoad], iteration: int) -> None:
    """Write figures where this rank has a writer, TensorBoard's under ``iteration``.

    Weights & Biases take no step below the last one that was logged: there they go under the
    present one, with the iteration beside them.
    """
    megatron = _megatron_globals()
    if megatron is None:
        return
    if (tensorboard := megatron.get_tensorboard_writer()) is not None:
        for health in layers:
            _write_tensorboard(tensorboard, health, iteration)
    if (wandb := megatron.get_wandb_writer()) is not None:
        figures: dict[str, Any] = {f"{TAGS}iteration": iteration}
        for health in layers:
            figures |= _for_wandb(wandb, health)
        wandb.log(figures, current_iteration())


def _megatron_globals() -> Any:
    """Return Megatron's module of global variables if something has imported it, else None."""
    return sys.modules.get("megatron.training.global_vars")


def _write_tensorboard(writer: Any, health: LayerHealth | ExpertLoad, iteration: int) -> None:
    tag = f"{TAGS}{health.layer}"
    for name, value in health.of_layer().items():
        writer.add_scalar(f"{tag}/{name}", value, iteration)
    for name, values in health.of_experts().items():
        writer.add_tensor(f"{tag}/{name}/by_expert", values.float(), iteration)
    for name, values in _finite(health):
        writer.add_histogram(f"{tag}/{name}/experts", values, iteration)


def _for_wandb(wandb: Any, health: LayerHealth | ExpertLoad) -> dict[str, Any]:
    tag = f"{TAGS}{health.layer}"
    scalars = {f"{tag}/{name}": of for name, of in health.of_layer().items()}
    return scalars | {
        f"{tag}/{name}/experts": wandb.Histogram(values.tolist())
        for name, values in _finite(health)
    }


def _finite(health: LayerHealth | ExpertLoad) -> Iterator[tuple[str, Tensor]]:
    """Yield figures of experts without what is not finite, where that leaves some."""
    for name, values in health.of_experts().items():
        finite = values[values.isfinite()]
        if len(finite):
            yield name, finite
