"""Measures Newton-Schulz iterations of batches, beside one matrix at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.muon.cases import (
    Experts,
    Iteration,
    Row,
    draw,
    fewest_operations,
    plain_operations,
    settings_of,
)
from benchmarks.muon.floors import Machine
from benchmarks.timing import host_us, median_ms, release

if TYPE_CHECKING:
    import torch

    from moe_optim.kernels.newton_schulz import NewtonSchulz

ONE_AT_A_TIME = "emerging-optimizers, one at a time"
WAYS: dict[str, tuple[Literal["auto", "reference"], Iteration]] = {
    "torch.baddbmm, bf16": ("reference", "auto"),
    "torch.baddbmm, gram, fp16": ("reference", "gram"),
    "plug-in, bf16": ("auto", "auto"),
    "plug-in, fp16": ("auto", "fp16"),
    "plug-in, gram, fp16": ("auto", "gram"),
}
"""Way of iterating batches -> backend and ``muon_iteration``."""
WORK = "Newton-Schulz"
CHECKED = 3
"""Matrices of each batch that are compared with fp64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrices:
    """Batches of fp32 matrices, [number, rows, columns] each."""

    batches: tuple["torch.Tensor", ...]
    exact: tuple["torch.Tensor", ...]
    """fp64 iterations of the first of each batch, in fp32."""

    @classmethod
    def draw(cls, shapes: Sequence[tuple[int, int, int]], device: str) -> "Matrices":
        """Draw normal matrices of the given numbers and shapes."""
        import torch

        from moe_optim.formats.reference.newton_schulz import Orthogonalization, orthogonalize

        batches = tuple(
            draw(number * rows * cols, device, seed=seed).view(number, rows, cols)
            for seed, (number, rows, cols) in enumerate(shapes)
        )
        exact = tuple(
            orthogonalize(batch[:CHECKED], Orthogonalization(), dtype=torch.float64)
            for batch in batches
        )
        return cls(batches=batches, exact=exact)

    def distance(self, results: Sequence["torch.Tensor"]) -> float:
        """Return the largest relative Frobenius distance of the first results from fp64's."""
        worst = 0.0
        for result, exact in zip(results, self.exact, strict=True):
            off = (result[: len(exact)].double() - exact).norm(dim=(1, 2))
            worst = max(worst, float((off / exact.double().norm(dim=(1, 2))).max()))
        return worst


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Measurements of one way of iterating."""

    ms: float
    host_ms: float
    distance: float


def measure(case: str, experts: Experts, on: Machine) -> Iterator[Row]:
    """Yield a row of stock, one matrix at a time, and one of every way of iterating batches.

    Stock's call normalizes and casts each matrix, too; batches are packed normalized, which the
    step's row of packing times.
    """
    matrices = Matrices.draw(experts.batches(apart=case == "apart"), on.device)
    stock = _measure_stock(matrices, on)
    yield _row(case, experts, on, ONE_AT_A_TIME, "auto", stock, stock)
    for way, (backend, iteration) in WAYS.items():
        taken = _measure_batches(matrices, backend, iteration, on)
        yield _row(case, experts, on, way, iteration, taken, stock)
        release(on.device)


def _row(
    case: str,
    experts: Experts,
    on: Machine,
    way: str,
    iteration: Iteration,
    taken: Taken,
    stock: Taken,
) -> Row:
    apart = case == "apart"
    batches = experts.batches(apart=apart)
    steps = settings_of(iteration, apart=apart).orthogonalization.num_steps
    floor = fewest_operations(batches, steps, iteration) / on.operations_per_ms
    return Row(
        case=case,
        work=WORK,
        way=way,
        matrices=experts.matrices(apart=apart),
        parameters=experts.parameters,
        ms=round(taken.ms, 4),
        host_ms=round(taken.host_ms, 4),
        floor_ms=round(floor, 4),
        of_floor=round(floor / taken.ms, 3),
        tflop_per_s=round(plain_operations(batches, steps) / taken.ms / 1e9, 2),
        of_stock=round(taken.ms / stock.ms, 4),
        distance=float(f"{taken.distance:.3g}"),
    )


def _measure_stock(matrices: Matrices, on: Machine) -> Taken:
    loop = _one_at_a_time(matrices.batches)
    distance = matrices.distance([_first_of_stock(batch) for batch in matrices.batches])
    (ms,) = median_ms([loop], on.device, repeats=on.repeats)
    host_ms = host_us(loop, on.device, repeats=on.repeats) / 1e3
    return Taken(ms=ms, host_ms=host_ms, distance=distance)


def _one_at_a_time(batches: Sequence["torch.Tensor"]) -> Callable[[], None]:
    from emerging_optimizers.utils import fp32_matmul_precision

    from moe_optim.formats.reference.newton_schulz import Orthogonalization

    stock, how = stock_iteration(), Orthogonalization()
    singles = [matrix for batch in batches for matrix in batch]

    def run() -> None:
        with fp32_matmul_precision(how.precision):
            for matrix in singles:
                stock(matrix)

    return run


def stock_iteration() -> Callable[["torch.Tensor"], "torch.Tensor"]:
    """Return emerging-optimizers' iteration of one matrix [R, C] with the default settings."""
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    from moe_optim.formats.reference.newton_schulz import Orthogonalization

    how = Orthogonalization()
    coefficients: Any = how.coefficient_type
    return partial(newton_schulz, steps=how.num_steps, coefficient_type=coefficients)


def _first_of_stock(batch: "torch.Tensor") -> "torch.Tensor":
    import torch
    from emerging_optimizers.utils import fp32_matmul_precision

    with fp32_matmul_precision("medium"):
        return torch.stack([stock_iteration()(matrix) for matrix in batch[:CHECKED]])


def _measure_batches(
    matrices: Matrices,
    backend: Literal["auto", "reference"],
    iteration: Iteration,
    on: Machine,
) -> Taken:
    """Time iterations of all batches, each of which is one plan; they share scratch."""
    import torch

    dtype = settings_of(iteration, apart=False).dtype
    normalized = [
        (batch / batch.norm(dim=(1, 2), keepdim=True)).to(dtype) for batch in matrices.batches
    ]
    inputs = [torch.empty_like(one) for one in normalized]
    plans = _plan(inputs, backend, iteration)

    def fill() -> None:
        for x, source in zip(inputs, normalized, strict=True):
            x.copy_(source)

    def launch() -> None:
        for plan in plans:
            plan.launch()

    distance = matrices.distance([_first_of(plan, fill) for plan in plans])
    (ms,) = median_ms([launch], on.device, fill, on.repeats)
    host_ms = host_us(launch, on.device, fill, on.repeats) / 1e3
    return Taken(ms=ms, host_ms=host_ms, distance=distance)


def _plan(
    inputs: Sequence["torch.Tensor"], backend: Literal["auto", "reference"], iteration: Iteration
) -> "list[NewtonSchulz]":
    import torch

    from moe_optim.kernels.newton_schulz import NewtonSchulz, scratch_numel

    settings = settings_of(iteration, apart=False)
    form: Literal["plain", "gram"] = "gram" if iteration == "gram" else "plain"
    needed = max(scratch_numel(*one.shape, form=form) for one in inputs)
    scratch = torch.empty(needed, dtype=settings.dtype, device=inputs[0].device)
    coefficients = settings.orthogonalization.coefficients()
    return [
        NewtonSchulz.build(x, scratch, coefficients=coefficients, form=form, backend=backend)
        for x in inputs
    ]


def _first_of(plan: "NewtonSchulz", fill: Callable[[], None]) -> "torch.Tensor":
    """Return copies of the first results of a batch, which the next launch overwrites."""
    fill()
    plan.launch()
    return plan.result[:CHECKED].float()
