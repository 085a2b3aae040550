"""Measures the host time of Muon steps of many matrices, one parameter per expert.

Matrices are small, so that thousands fit, and the workspace is smaller in proportion: chunks are
as many as those of the layer's experts in the default workspace.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.muon.cases import (
    PLUGIN,
    STOCK,
    Experts,
    Iteration,
    Row,
    settings_of,
)
from benchmarks.muon.floors import Machine
from benchmarks.muon.step import FusedStep, States, stock_step
from benchmarks.timing import host_us, release, wait

if TYPE_CHECKING:
    import torch

WORK = "host time of a step"
GRAPH = f"{PLUGIN}, as a graph"
"""Way of a step that one graph replays."""
MATRICES_PER_EXPERT = 3


def measure(
    real: Experts,
    small: Experts,
    sizes: Sequence[int],
    format: str,
    iteration: Iteration,
    on: Machine,
) -> Iterator[Row]:
    """Yield a row of stock and one of ours per number of matrices.

    Args:
        real: experts whose number of chunks a step shall have.
        small: experts whose shapes matrices have.
        sizes: numbers of matrices, of gate, up and fc2, in increasing order.
        format: format of the weights.
        iteration: ``muon_iteration``.
        on: machine.
    """
    for index, size in enumerate(sizes):
        experts = replace(small, count=size // MATRICES_PER_EXPERT)
        states = States.draw(experts, on.device)
        stock_ms = _time_stock(experts, states, on, is_first=index == 0)
        yield _row(STOCK, None, experts, stock_ms, stock_ms)
        fused = _fused_step(real, experts, states, format, iteration)
        ms = host_us(fused.table.launch, on.device, repeats=on.repeats) / 1e3
        row = _row(PLUGIN, format, experts, ms, stock_ms)
        yield replace(row, launches=fused.num_launches, chunks=len(fused.table.chunks))
        if on.device == "cuda":
            ms = host_us(_captured(fused).replay, on.device, repeats=on.repeats) / 1e3
            row = _row(GRAPH, format, experts, ms, stock_ms)
            yield replace(row, launches=1, chunks=len(fused.table.chunks))
        del fused, states
        release(on.device)


def _time_stock(experts: Experts, states: States, on: Machine, *, is_first: bool) -> float:
    """Return the host time of stock's step in ms: the median of several, or that of one.

    A step of thousands of matrices takes seconds, and the first number has warmed it up.
    """
    step = stock_step(experts, states)
    if is_first:
        return host_us(step, on.device, repeats=on.repeats) / 1e3
    wait(on.device)
    began = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - began)


def _captured(fused: FusedStep) -> "torch.cuda.CUDAGraph":
    """Return the step as --optimizer-cuda-graph replays it."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused.table.launch()
    return graph


def _row(way: str, format: str | None, experts: Experts, ms: float, stock_ms: float) -> Row:
    return Row(
        case="host",
        work=WORK,
        way=way,
        format=format,
        matrices=experts.matrices(apart=True),
        parameters=experts.parameters,
        host_ms=round(ms, 4),
        of_stock=None if way == STOCK else round(ms / stock_ms, 5),
    )


def _fused_step(
    real: Experts, experts: Experts, states: States, format: str, iteration: Iteration
) -> FusedStep:
    from moe_optim.formats import FORMATS

    settings = settings_of(iteration, apart=True)
    nbytes = workspace_bytes(real, experts, iteration)
    return FusedStep.build(
        [weight for weight in experts.weights(apart=True) for _ in range(experts.count)],
        States(
            masters=_by_expert(states.masters, experts),
            gradients=_by_expert(states.gradients, experts),
            momenta=_by_expert(states.momenta, experts),
        ),
        replace(settings, workspace_bytes=nbytes),
        FORMATS.get(format),
    )


def _by_expert(tensors: Sequence["torch.Tensor"], experts: Experts) -> "tuple[torch.Tensor, ...]":
    return tuple(one for tensor in tensors for one in tensor.view(experts.count, -1))


def workspace_bytes(real: Experts, small: Experts, iteration: Iteration) -> int:
    """Return the workspace that takes as many of ``small`` as the default one takes of ``real``."""
    from moe_optim.optimizer.muon_step import chunk_numel

    settings = settings_of(iteration, apart=True)
    needed = 0
    for mine, other in zip(real.weights(apart=True), small.weights(apart=True), strict=True):
        room, count = settings.workspace_bytes // settings.dtype.itemsize, 1
        while chunk_numel(mine, count + 1, settings) <= room:
            count += 1
        needed = max(needed, chunk_numel(other, count, settings))
    return needed * settings.dtype.itemsize
