"""Measures forward and backward fake quantization of experts, and an optimizer step over them.

Compares four implementations: ours; a loop over experts in plain torch; the same formula once over
stacked experts, including stacking and splitting; and NVIDIA ModelOpt's module on the stacked
tensor. Experts stored in one tensor need no stacking.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.timing import REPEATS, host_us, median_ms, release, temporary_bytes
from moe_optim.calibration.fake_quantization import Bits, fake_quantize
from moe_optim.formats.reference import fake as formula

Placement = Literal["contiguous", "scattered"]
PLACEMENTS: tuple[Placement, ...] = ("contiguous", "scattered")
OURS, OURS_STACKED = "moe_optim", "moe_optim on a stack"
LOOP, STACK, MODELOPT = "loop", "stack and unbind", "ModelOpt"

_GAP = 192  # elements between scattered experts; keeps rows aligned to 16 bytes
_PART = 0.5  # fraction of the true amax, so that some values are clipped

Experts = list[Tensor]
"""Leaf tensors: one [E, R, C], or E of [R, C]."""
Way = Callable[[Experts], Sequence[Tensor]]
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsCase:
    """Experts of one size on one grid."""

    experts: int
    rows: int
    cols: int
    bits: Bits
    device: str

    @property
    def numel(self) -> int:
        """Total elements of all experts."""
        return self.experts * self.rows * self.cols


def measure(case: ExpertsCase, speed: float) -> Iterator[Row]:
    """Yield a row for each placement and implementation, given the copy speed in bytes per ms."""
    contiguous: dict[str, Row] = {}
    for placement in PLACEMENTS:
        experts, gradients = _lay_out(case, placement)
        amax = _find_amax(experts) * _PART
        step = _time_step(experts, gradients, case.device)
        rows = []
        for name, way in _ways(case, amax, placement).items():
            row = _measure(case, experts, gradients, way, speed)
            row |= {"placement": placement, "way": name, "step_ms": step}
            rows.append(row)
            release(case.device)
        for row in rows:
            row |= _ratios(row, contiguous.get(row["way"]), rows)
        contiguous = {row["way"]: row for row in rows}
        yield from rows
        del experts, gradients
        release(case.device)


@cache
def import_modelopt() -> tuple[Callable[..., Any] | None, str]:
    """Return the constructor of ModelOpt's fake-quantization module and its version.

    If not importable: None and the reason.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            import modelopt
            from modelopt.torch.quantization.config import QuantizerAttributeConfig
            from modelopt.torch.quantization.nn import TensorQuantizer
    except Exception as error:  # it imports many optional packages
        return None, f"absent: {type(error).__name__}: {error}"
    return lambda **given: TensorQuantizer(QuantizerAttributeConfig(**given)), modelopt.__version__


def _ways(case: ExpertsCase, amax: Tensor, placement: Placement) -> Mapping[str, Way]:
    ways: dict[str, Way] = {OURS: partial(_ours, amax, case.bits)}
    one_call = partial(_formula, amax, case.bits)
    if placement == "scattered":
        ways[OURS_STACKED] = partial(_stacked, lambda whole: fake_quantize(whole, amax, case.bits))
    ways[LOOP] = partial(_loop, amax, case.bits)
    ways[STACK] = partial(_stacked, one_call)
    make_quantizer, _ = import_modelopt()
    if make_quantizer is not None:
        num_bits = (4, 3) if case.bits == "e4m3" else case.bits
        quantizer = make_quantizer(num_bits=num_bits, axis=0, pass_through_bwd=False)
        quantizer.amax = amax
        ways[MODELOPT] = partial(_stacked, quantizer.to(case.device))
    return ways


def _ours(amax: Tensor, bits: Bits, experts: Experts) -> Sequence[Tensor]:
    if experts[0].dim() == 3:
        return [fake_quantize(experts[0], amax, bits)]
    return fake_quantize(experts, amax, bits)


def _loop(amax: Tensor, bits: Bits, experts: Experts) -> Sequence[Tensor]:
    parts = experts[0].unbind(0) if experts[0].dim() == 3 else experts
    results = [_formula(own, bits, part) for own, part in zip(amax, parts, strict=True)]
    return [torch.stack(results)] if experts[0].dim() == 3 else results


def _stacked(call: Callable[[Tensor], Tensor], experts: Experts) -> Sequence[Tensor]:
    if experts[0].dim() == 3:
        return [call(experts[0])]
    return call(torch.stack(experts)).unbind(0)


def _formula(amax: Tensor, bits: Bits, values: Tensor) -> Tensor:
    result: Tensor = _Formula.apply(values, amax, None if bits == "e4m3" else bits)
    return result


class _Formula(torch.autograd.Function):
    """Reference definition in plain torch."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, amax: Tensor, bits: int | None) -> Tensor:
        ctx.save_for_backward(values, amax)
        return formula.fake_quantize(values, amax, bits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return formula.clip_gradient(*ctx.saved_tensors, *gradients), None, None


def _lay_out(case: ExpertsCase, placement: Placement) -> tuple[Experts, list[Tensor]]:
    """Return experts and output gradients, in the same placement."""
    generator = torch.Generator(case.device).manual_seed(0)
    return (
        [one.requires_grad_() for one in _place(case, placement, generator)],
        _place(case, placement, generator),
    )


def _place(case: ExpertsCase, placement: Placement, generator: torch.Generator) -> list[Tensor]:
    """Return one tensor, or tensors in random order with gaps in between, of the same values."""
    values = torch.empty(
        (case.experts, case.rows, case.cols), dtype=torch.bfloat16, device=case.device
    ).normal_(std=0.02, generator=generator)
    if placement == "contiguous":
        return [values]
    numel = case.rows * case.cols
    memory = values.new_empty(case.experts, numel + _GAP)
    order = torch.randperm(
        case.experts, generator=torch.Generator().manual_seed(0), device="cpu"
    ).tolist()
    places = [memory[place, :numel].view(case.rows, case.cols) for place in order]
    return [place.copy_(one) for place, one in zip(places, values, strict=True)]


def _find_amax(experts: Experts) -> Tensor:
    parts = experts[0].detach() if experts[0].dim() == 3 else torch.stack(experts).detach()
    return parts.abs().amax((1, 2), keepdim=True).float()


def _measure(
    case: ExpertsCase, experts: Experts, gradients: list[Tensor], way: Way, speed: float
) -> Row:
    """Compare with the definition, then time."""
    kept: dict[str, Sequence[Tensor]] = {}

    def forward() -> None:
        kept["results"] = way(experts)

    def backward() -> None:
        torch.autograd.grad(kept["results"], experts, gradients)

    differing = _count_differences(case, experts, gradients, way)
    (forward_ms,) = median_ms([forward], case.device)
    (backward_ms,) = median_ms([backward], case.device, forward)
    floors = [passes * 2 * case.numel / speed for passes in (2, 3)]  # bf16: 2 bytes
    return {
        "experts": case.experts,
        "shape": f"{case.rows}x{case.cols}",
        "bits": case.bits,
        "forward_ms": round(forward_ms, 4),
        "backward_ms": round(backward_ms, 4),
        "forward_fraction_of_floor": round(floors[0] / forward_ms, 3),
        "backward_fraction_of_floor": round(floors[1] / backward_ms, 3),
        "forward_host_us": round(host_us(forward, case.device, repeats=REPEATS), 1),
        "backward_host_us": round(host_us(backward, case.device, forward, REPEATS), 1),
        "temporary_bytes": temporary_bytes(lambda: way(experts), case.device),
        "differing_elements": differing,
    }


def _count_differences(
    case: ExpertsCase, experts: Experts, gradients: list[Tensor], way: Way
) -> int:
    """Return the number of values and gradients that differ bitwise from the definition."""
    results = way(experts)
    found = [*results, *torch.autograd.grad(results, experts, gradients)]
    amax = _find_amax(experts) * _PART
    bits = None if case.bits == "e4m3" else case.bits
    wanted = []
    own = [amax] if experts[0].dim() == 3 else list(amax)
    for one, limit in zip(experts, own, strict=True):
        wanted.append(formula.fake_quantize(one.detach(), limit, bits))
    for one, limit, gradient in zip(experts, own, gradients, strict=True):
        wanted.append(formula.clip_gradient(one.detach(), limit, gradient))
    pairs = zip(found, wanted, strict=True)
    return sum(
        int((mine.view(torch.int16) != theirs.view(torch.int16)).sum()) for mine, theirs in pairs
    )


def _time_step(experts: Experts, gradients: list[Tensor], device: str) -> float:
    """Return the time of a fused torch AdamW step over bf16 experts in place, in ms."""
    copies = [one.detach().clone().requires_grad_() for one in experts]
    for copy, gradient in zip(copies, gradients, strict=True):
        copy.grad = gradient
    optimizer = torch.optim.AdamW(copies, lr=0.0, fused=True)
    (ms,) = median_ms([optimizer.step], device)
    return round(ms, 4)


def _ratios(row: Row, contiguous: Row | None, rows: Sequence[Row]) -> Row:
    """Return a row relative to contiguous experts, and to the best alternative."""
    others = [other for other in rows if other["way"] in (LOOP, STACK, MODELOPT)]
    ratios = {}
    for part in ("forward", "backward"):
        key = f"{part}_ms"
        best = min(other[key] for other in others)
        ratios[f"{part}_of_contiguous"] = contiguous and round(row[key] / contiguous[key], 3)
        ratios[f"{part}_of_best_other"] = round(row[key] / best, 3) if row["way"] == OURS else None
    return ratios
