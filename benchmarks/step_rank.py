"""One rank of ``python -m benchmarks step``: trains, and measures its iterations in several ways.

Measurements disturb each other, so after the warm-up iterations these kinds alternate:

``plain``  nothing is recorded; only these give the iteration time
``parts``  time stamps are queued where parts begin or end, and read after training
``host``   ranks synchronize and the device is idle before ``optimizer.step()``, so that its host
           time is its launch time, excluding the wait for the gradient norm on both sides

Megatron's own timers stay off: they synchronize, and add barriers.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.step_parts import WEIGHTS, Parts, Recording, instrument
from benchmarks.timing import Mark
from moe_optim.commands.train import pretrain
from moe_optim.integration import cpu_runtime

REPORT = "MOE_OPTIM_BENCH_REPORT"
"""Environment variable: folder for ``rank<N>.json`` of each rank."""
WARM_UP = 3
"""Iterations not counted: caches, compilation, allocation."""
KINDS = ("plain", "parts", "host")


@dataclass(slots=True)
class Iteration:
    """Measurements of one iteration on this rank."""

    kind: str
    began: float
    """Host time in seconds, with an idle device, as after a logged iteration."""
    recording: Recording | None = None
    counted_bytes: dict[str, int] = field(default_factory=dict)
    loss: Any = None
    """fp32 scalar, on ranks that have one."""


def kind_of(number: int) -> str:
    """Return the kind of measurement of an iteration, numbered from 1."""
    return KINDS[(number - WARM_UP - 1) % len(KINDS)] if number > WARM_UP else "warm-up"


class CountedSteps:
    """Megatron's ``train_step``, measured.

    Args:
        train_step: Megatron's function.
        marks: function that returns the current time, for each recorded kind.
    """

    def __init__(
        self, train_step: Callable[..., Any], marks: Mapping[str, Callable[[], Mark]]
    ) -> None:
        self.iterations: list[Iteration] = []
        self._train_step, self._marks = train_step, marks
        self._parts = Parts()
        self._counts = count_bytes(self._parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step, with the arguments of Megatron's training loop."""
        forward_step, data, model, optimizer, scheduler, config, forward_backward, *more = args
        if not self.iterations:
            instrument(self._parts, model, optimizer)
            self._drain_before(optimizer)
        kind = kind_of(len(self.iterations) + 1)
        iteration = Iteration(kind, began=time.perf_counter())
        self.iterations.append(iteration)
        before = dict(self._counts)
        forward_backward = self._parts.within("forward_backward", forward_backward)
        args = (forward_step, data, model, optimizer, scheduler, config, forward_backward, *more)
        if kind in self._marks:
            with self._parts.recorded(self._marks[kind]) as recording:
                result = self._train_step(*args, **kwargs)
            iteration.recording = recording
        else:
            result = self._train_step(*args, **kwargs)
        iteration.loss = result[0].get("lm loss")
        iteration.counted_bytes = {k: n - before[k] for k, n in self._counts.items()}
        if not cpu_runtime.is_installed():
            iteration.counted_bytes["peak"] = torch.cuda.max_memory_allocated()
        return result

    def _drain_before(self, optimizer: Any) -> None:
        step = optimizer.step

        def drain_and_step() -> Any:
            if self.iterations[-1].kind == "host":
                dist.barrier()
                torch.cuda.synchronize()
            return step()

        optimizer.step = drain_and_step

    def report(self) -> list[dict[str, Any]]:
        """Return kind, milliseconds, bytes and loss of every iteration, after training."""
        ends = [one.began for one in self.iterations[1:]]
        return [
            {
                "kind": one.kind,
                "ms": milliseconds(one, end),
                "bytes": one.counted_bytes,
                "loss": None if one.loss is None else f"{float(one.loss):.9g}",
            }
            for one, end in zip(self.iterations, [*ends, None], strict=True)
        ]


def milliseconds(iteration: Iteration, end: float | None) -> dict[str, float]:
    """Return the times measured in an iteration; any next one began at ``end``."""
    if iteration.recording is None:
        return {} if end is None else {"iteration": 1e3 * (end - iteration.began)}
    own = iteration.recording.own_ms()
    whole = iteration.recording.whole_ms("optimizer")
    if iteration.kind == "host":
        return {"optimizer_host": whole - iteration.recording.whole_ms("grad_norm")}
    weights = sum(own.get(part, 0.0) for part in WEIGHTS)
    rest = own.pop("optimizer")
    return {**own, "optimizer_rest": rest, "optimizer": whole, "main_to_model_and_gather": weights}


def count_bytes(parts: Parts) -> dict[str, int]:
    """Count the bytes of collectives between masters and weights; returns the live counts.

    ``gathered``: outputs of all-gathers, including this rank's share. ``reduced``: block maxima
    shared by ranks. Collectives of activations and gradients are not counted.
    """
    from megatron.core.distributed import param_and_grad_buffer as upstream

    counts = {"gathered": 0, "reduced": 0}

    def counting(key: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def count_and_run(*args: Any, **kwargs: Any) -> Any:
            if parts.innermost in WEIGHTS:
                results = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
                counts[key] += sum(one.numel() * one.element_size() for one in results)
            return collective(*args, **kwargs)

        return count_and_run

    upstream.dist_all_gather_func = counting("gathered", upstream.dist_all_gather_func)
    # Counts only our calls: Megatron holds its own reference.
    dist.all_gather_into_tensor = counting("gathered", dist.all_gather_into_tensor)
    dist.all_gather = counting("gathered", dist.all_gather)  # stock Muon's, of uneven shards
    dist.all_reduce = counting("reduced", dist.all_reduce)
    return counts


def main() -> None:
    """Train with the arguments of the command line."""
    if os.environ.get("MOE_OPTIM_CPU") == "1":
        cpu_runtime.install()  # before Megatron is imported
    from megatron.training import training

    device = "cpu" if cpu_runtime.is_installed() else "cuda"
    marks = {kind: partial(Mark, on) for kind, on in (("parts", device), ("host", "cpu"))}
    steps = CountedSteps(training.train_step, marks)
    training.train_step = steps
    pretrain.main()
    path = Path(os.environ[REPORT]) / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(steps.report()))


if __name__ == "__main__":
    main()
