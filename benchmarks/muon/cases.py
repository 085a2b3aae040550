"""Expert weights that Muon steps in benchmarks, and the rows of results."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from moe_optim.optimizer.muon import MatrixWeight, MuonSettings

CASES = ("apart", "together", "step", "host", "gather")
STOCK, PLUGIN = "stock", "plug-in"
MOMENTUM, WEIGHT_DECAY, LEARNING_RATE = 0.9, 0.1, 1e-4
"""Megatron's default of momentum, and usual values of the others."""
HOST_MATRICES = (384, 12_288)
SMALL_HOST_MATRICES = (12, 48)

Iteration = Literal["auto", "fp16", "gram"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Experts of some layers: a gated fc1 and an fc2 each."""

    count: int
    hidden: int
    ffn: int

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of one fc1, gate and up together, and of one fc2."""
        return (2 * self.ffn, self.hidden), (self.hidden, self.ffn)

    @property
    def parameters(self) -> int:
        """Number of elements of all experts."""
        return self.count * sum(map(prod, self.shapes))

    def batches(self, *, apart: bool) -> list[tuple[int, int, int]]:
        """Return number, rows and columns of equal matrices, with gate and up apart or together."""
        (rows, cols), second = self.shapes
        first = (2 * self.count, rows // 2, cols) if apart else (self.count, rows, cols)
        return [first, (self.count, *second)]

    def matrices(self, *, apart: bool) -> int:
        """Return the number of matrices."""
        return sum(number for number, _, _ in self.batches(apart=apart))

    def weights(self, *, apart: bool) -> "list[MatrixWeight]":
        """Return the description of fc1 and fc2."""
        from moe_optim.optimizer.muon import MatrixWeight

        return [
            MatrixWeight(
                name=name,
                shape=shape,
                split=(shape[0] // 2,) * 2 if apart and name == "linear_fc1" else (),
                is_expert=True,
                partition_dim=None,
                group=None,
            )
            for name, shape in zip(("linear_fc1", "linear_fc2"), self.shapes, strict=True)
        ]


QWEN3 = Experts(count=128, hidden=2048, ffn=768)
"""One layer of Qwen3-30B-A3B."""
SMALL = Experts(count=2, hidden=256, ffn=128)
LAYERS = 8
"""Layers whose gather is planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Figures of one way to do some work; None where a figure does not apply or was not taken."""

    case: str
    work: str
    way: str
    format: str | None = None
    matrices: int
    parameters: int
    ms: float | None = None
    """Median device time, from the first to the last kernel; of the host on a CPU."""
    host_ms: float | None = None
    """Median host time of a call that begins with an idle device."""
    floor_ms: float | None = None
    """Time of the fewest bytes at the speed of a copy, or of the fewest operations at that of a
    large bf16 product."""
    of_floor: float | None = None
    tflop_per_s: float | None = None
    """Operations of the plain iteration, without use of symmetry, per second."""
    of_stock: float | None = None
    """Time of this row over that of stock's; of host times where device times are not taken."""
    distance: float | None = None
    """Largest relative Frobenius distance from an fp64 iteration, over a few matrices."""
    bytes_per_parameter: float | None = None
    data_parallel: int | None = None
    launches: int | None = None
    chunks: int | None = None
    """Times that the workspace is filled."""


def settings_of(
    iteration: Iteration, *, apart: bool, workspace_bytes: int | None = None
) -> "MuonSettings":
    """Return Megatron's default settings, in the default workspace unless given."""
    from moe_optim.config import MoEOptimConfig
    from moe_optim.formats.reference.newton_schulz import Orthogonalization
    from moe_optim.optimizer.muon import MuonSettings

    return MuonSettings(
        orthogonalization=Orthogonalization(),
        nesterov=False,
        tp_mode="blockwise",
        splits_qkv=True,
        splits_gate_up=apart,
        iteration=iteration,
        workspace_bytes=workspace_bytes or MoEOptimConfig().muon_workspace_mib << 20,
    )


def plain_operations(batches: Sequence[tuple[int, int, int]], steps: int) -> int:
    """Return the operations of a plain iteration of batches (number, rows, columns).

    With m rows and n columns, m <= n, a step multiplies X X^T, A A and B X: 4 m^2 n + 2 m^3.
    """
    return sum(
        steps * number * (4 * short**2 * long + 2 * short**3)
        for number, short, long in _by_side(batches)
    )


def fewest_operations(
    batches: Sequence[tuple[int, int, int]], steps: int, iteration: Iteration
) -> int:
    """Return the operations of an iteration that computes half of each symmetric product.

    A step of the plain form takes m^2 n for X X^T, m^3 for A A and 2 m^2 n for B X. The Gram form
    computes X X^T and Q X at every start; a step takes one symmetric product of squares for the
    polynomial, two to advance the Gram matrix unless X is computed next, and one to accumulate Q
    unless it is the first since.
    """
    from moe_optim.kernels.newton_schulz import GRAM_SPAN

    starts = 1 + sum(index % GRAM_SPAN == GRAM_SPAN - 1 for index in range(1, steps))
    total = 0
    for number, short, long in _by_side(batches):
        if iteration != "gram":
            one = steps * (3 * short**2 * long + short**3)
        else:
            squares = steps + 3 * (steps - starts)
            one = starts * 3 * short**2 * long + squares * short**3
        total += number * one
    return total


def _by_side(batches: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [(number, min(rows, cols), max(rows, cols)) for number, rows, cols in batches]


def draw(numel: int, device: str, *, std: float = 1e-3, seed: int = 0) -> "torch.Tensor":
    """Return normal values, [numel] fp32."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    values = torch.empty(numel, dtype=torch.float32, device=device)
    return values.normal_(std=std, generator=generator)
