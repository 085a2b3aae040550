"""Counts the bytes that a gather of Muon's weights completes, from the layouts of buckets."""

from collections.abc import Iterator, Sequence
from math import lcm, prod
from typing import TYPE_CHECKING, Any

from benchmarks.muon.cases import LAYERS, PLUGIN, STOCK, Experts, Row

if TYPE_CHECKING:
    from moe_optim.formats import BlockScaledFormat

WORK = "bytes gathered"
DATA_PARALLEL = (2, 8)
_BF16 = 2  # bytes


def measure(experts: Experts, formats: Sequence[str]) -> Iterator[Row]:
    """Yield a row of stock's bf16, and one per format, at each data-parallel size."""
    from moe_optim.formats import FORMATS

    for dp_size in DATA_PARALLEL:
        yield _row(experts, STOCK, "bf16", dp_size, _stock_bytes(experts, dp_size))
        for name in formats:
            nbytes = planned_bytes(experts, FORMATS.get(name), dp_size)
            yield _row(experts, PLUGIN, name, dp_size, nbytes)


def _row(experts: Experts, way: str, format: str, dp_size: int, nbytes: int) -> Row:
    parameters = LAYERS * experts.parameters
    return Row(
        case="gather",
        work=WORK,
        way=way,
        format=format,
        matrices=LAYERS * experts.matrices(apart=False),
        parameters=parameters,
        bytes_per_parameter=round(nbytes / parameters, 4),
        data_parallel=dp_size,
    )


def _bucket_numel(dp_size: int) -> int:
    """Return Megatron's default length of a bucket (``DistributedDataParallel``)."""
    return max(40_000_000, 1_000_000 * dp_size)


def planned_bytes(experts: Experts, format: "BlockScaledFormat | None", dp_size: int) -> int:
    """Return the bytes of all buffers that gathers complete, of weights [E, R, C] in LAYERS layers.

    ``format`` is None for bf16. Weights of one shape share a buffer, as in training.
    """
    from moe_optim.buckets.layout import START, Slot, plan_buffers
    from moe_optim.buckets.matrix_layout import MatrixStack, iteration_cost, lay_out_matrices
    from moe_optim.commands.plan.buckets import bucket_divisor

    total = 0
    block = 1 if format is None else prod(format.rowwise_block)
    for rows, cols in experts.shapes:
        cost = iteration_cost(rows, cols)
        weight = MatrixStack(name="experts", count=experts.count, rows=rows, cols=cols, cost=cost)
        layout = lay_out_matrices(
            [weight] * LAYERS,
            dp_size=dp_size,
            bucket_numel=_bucket_numel(dp_size),
            unit=lcm(START, block, bucket_divisor(dp_size, high_busbw=False) // dp_size),
        )
        for number, (start, end) in enumerate(layout.buckets):
            slots = [
                Slot(name="experts", start=first - start, shape=(experts.count, rows, cols))
                for first, _, bucket in layout.places
                if bucket == number
            ]
            if format is None:
                total += _BF16 * (end - start)
            else:
                buffers = plan_buffers(format, slots, end - start, dp_size)
                total += sum(buffer.nbytes for buffer in buffers)
    return total


def _stock_bytes(experts: Experts, dp_size: int) -> int:
    """Return the bytes of Megatron's buffers of the same experts, one parameter each, in bf16."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    meta: Any = {"dtype": torch.bfloat16, "device": "meta"}
    params = [
        torch.nn.Parameter(torch.empty(shape, **meta))
        for _ in range(LAYERS)
        for shape in experts.shapes
        for _ in range(experts.count)
    ]
    layout = LayerWiseDistributedOptimizer._compute_per_buffer_param_layout(
        params, _bucket_numel(dp_size), dp_size, DistributedDataParallelConfig()
    )
    return int(_BF16 * layout.bucket_indices[-1][1])
