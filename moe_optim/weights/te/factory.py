"""Weights of portable experts in the tensor classes of Transformer Engine."""

from collections.abc import Sequence
from typing import Any

import torch

from moe_optim.errors import ConfigError
from moe_optim.formats import BlockScaledFormat
from moe_optim.kernels.member_table import Backend
from moe_optim.weights.storage import WeightStorage
from moe_optim.weights.te.quantizer import import_error, make_quantizer
from moe_optim.weights.te.storage import TransformerEngineStorage


def make_te_storages(
    format: BlockScaledFormat,
    shape: tuple[int, int, int],
    *,
    apart: bool,
    name: str,
    device: torch.device | str | None,
    record_amax: bool,
    backend: Backend,
) -> Sequence[WeightStorage]:
    """Return a ``GroupedTensor`` of all experts, or a tensor of their class an expert.

    Nothing of Transformer Engine's is launched, so that formats are held in its classes also where
    its kernels do not run.

    Raises:
        ConfigError: Transformer Engine cannot be imported.
        LayoutError: ``shape`` does not fit the format.
    """
    experts, rows, cols = format.check_shape(shape, name)
    if why := import_error():
        raise ConfigError(
            f"moe_optim: storage: expected Transformer Engine for transformer_engine, got {why}. "
            "Install it, or set storage: portable."
        )
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

    quantizer = make_quantizer(format)
    if apart:
        size = (rows, cols)
        weights = [
            quantizer.make_empty(size, dtype=torch.bfloat16, device=device) for _ in range(experts)
        ]
        names = [f"{name}{index}" for index in range(experts)]
    else:
        grouped: Any = GroupedTensor.make_grouped_tensor_with_shapes(
            num_tensors=experts,
            shapes=[(rows, cols)] * experts,
            quantizer=quantizer,
            device=device,
            dtype=torch.bfloat16,
        )
        weights, names = [grouped], [name]
    storages = []
    for weight, called in zip(weights, names, strict=True):
        storages.append(
            TransformerEngineStorage(
                weight, format, called, record_amax=record_amax, backend=backend
            )
        )
    return storages
