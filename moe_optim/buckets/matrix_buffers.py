"""Megatron's buffers of matrices that Muon steps: which parameters, which buffer, which places."""

import logging
from collections.abc import Iterable, Sequence
from math import lcm
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer.param_layout import PerBufferParamLayout
from megatron.core.utils import log_single_rank

from moe_optim.buckets.layout import START
from moe_optim.integration.engine import original
from moe_optim.integration.installation import installed_optimizer

if TYPE_CHECKING:
    from moe_optim.buckets.matrix_layout import MatrixLayout, MatrixStack

logger = logging.getLogger(__name__)
_NEITHER = ("is_embedding_or_output_parameter", "holds_biases")
"""Attributes of two-dimensional parameters that are no matrices."""
_GROUPING = "megatron.core.distributed.distributed_data_parallel:group_params_for_buffers"


def is_muon_matrix(param: torch.nn.Parameter) -> bool:
    """Return whether Muon steps ``param``: a matrix [R, C], or the matrices of experts [E, R, C].

    Embeddings and output layers are Adam's, by Megatron's rule, and so are 3-D weights without
    experts, such as those of convolutions, and biases of experts [E, R]. Linears of experts set
    ``allreduce`` on their weights.
    """
    if any(getattr(param, name, False) for name in _NEITHER):
        return False
    holds_experts = hasattr(param, "quantized_storage") or hasattr(param, "allreduce")
    return param.dim() == 2 or (param.dim() == 3 and holds_experts)


def tag_matrices(params: Iterable[torch.nn.Parameter]) -> None:
    """Set ``is_managed_by_layer_wise_optimizer``, so that Megatron's buffers separate parameters.

    Adam's parameters get False, matrices [R, C] True, and matrices of experts [E, R, C] the string
    ``RxC``: weights of one shape share a buffer, whose shards are whole matrices without padding.
    """
    for param in params:
        tag: bool | str = is_muon_matrix(param)
        if tag and param.dim() == 3:
            # Megatron's BufferKey hashes the tag and compares it, and all else tests its truth.
            tag = f"{param.shape[1]}x{param.shape[2]}"
        tagged: Any = param
        tagged.is_managed_by_layer_wise_optimizer = tag


def group_params_for_buffers(
    params: list[torch.nn.Parameter],
    grad_reduce_in_fp32: bool,
    merge_layerwise_fp8_grads: bool = False,  # noqa: ARG001  # of an optimizer that is not built
) -> dict[Any, tuple[list[torch.nn.Parameter], list[int]]]:
    """Group parameters by buffer as Megatron does, with Muon's matrices apart from the others."""
    if installed_optimizer() == "muon":
        tag_matrices(params)
    groups: dict[Any, tuple[list[torch.nn.Parameter], list[int]]] = original(_GROUPING)(
        params, grad_reduce_in_fp32
    )
    return groups


def holds_matrices(params: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether the parameters of a buffer are Muon's matrices."""
    return bool(params) and bool(getattr(params[0], "is_managed_by_layer_wise_optimizer", False))


def matrix_param_layout(
    params: list[torch.nn.Parameter],
    bucket_size: int | None,
    dp_size: int,
    divisor: int,
    param_indices: list[int] | None = None,
) -> PerBufferParamLayout:
    """Return the layout of a buffer in which every matrix lies inside one shard, and log it.

    ``params`` are in the order of the forward pass; ``divisor`` divides the length of a bucket and
    is a multiple of ``dp_size``. LayoutError if no rank can own some matrix whole.
    """
    from moe_optim.buckets.matrix_layout import lay_out_matrices

    backward = params[::-1]
    layout = lay_out_matrices(
        [_matrix_stack(param, len(params) - 1 - index) for index, param in enumerate(backward)],
        dp_size=dp_size,
        bucket_numel=bucket_size,
        unit=lcm(START, divisor // dp_size),
    )
    log_single_rank(logger, logging.INFO, describe_layout(layout))
    megatrons = PerBufferParamLayout(
        param_index_map=dict(zip(backward, layout.places, strict=True)),
        bucket_indices=list(layout.buckets),
        per_bucket_numel_unpadded=list(layout.numel_unpadded),
        param_indices=param_indices if param_indices is not None else [],
    )
    if hasattr(megatrons, "num_optimizer_shards"):  # Megatron's dev branch does not record it
        megatrons.num_optimizer_shards = dp_size
    return megatrons


def describe_layout(layout: "MatrixLayout") -> str:
    """Return a line with the number of buckets, the padding and the balance of a layout."""
    costs = layout.costs_by_rank()
    mean = sum(costs) / len(costs)
    spread = max(costs) / mean if mean else 1.0
    matrices = sum(weight.count for weight in layout.weights)
    return (
        f"moe_optim: muon: layout of {matrices} matrices: buckets {len(layout.buckets)}, ranks "
        f"{layout.dp_size}, padding {layout.padding:.1%}, highest cost of a rank {spread:.2f} of "
        "the mean"
    )


def _matrix_stack(param: torch.nn.Parameter, index: int) -> "MatrixStack":
    from moe_optim.buckets.matrix_layout import MatrixStack, iteration_cost

    storage = getattr(param, "quantized_storage", None)
    count, rows, cols = (1, *param.shape) if param.dim() == 2 else param.shape
    return MatrixStack(
        name=f"parameter {index}" if storage is None else storage.name,
        count=count,
        rows=rows,
        cols=cols,
        cost=iteration_cost(rows, cols),
    )
