"""One process, plain torch: what the optimizer steps of all ranks of a run have to have done.

AdamW with Megatron's clipping, elementwise on the shards of a :class:`Trace`, then the definition
of the weights' format on the masters of all ranks put together. Of what is tested, only that
definition is used.
"""

import math
from collections.abc import Sequence

import torch

from moe_optim.formats import BlockScaledFormat, reference
from tests.support.steps.step_trace import Tensors, Trace
from tests.support.training import assert_same_tensors

BETA1, BETA2, EPS, CLIP_GRAD = 0.9, 0.95, 1e-8, 1.0
FLAGS = (
    f"--adam-beta1 {BETA1} --adam-beta2 {BETA2} --adam-eps {EPS} --clip-grad {CLIP_GRAD}".split()
)
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Master, exp_avg and exp_avg_sq of a shard."""


def assert_steps_are_adams(traces: Sequence[Trace], format: BlockScaledFormat) -> None:
    """Masters, moments and weights of every step follow from the first masters, to the bit.

    Args:
        traces: of all data-parallel ranks, rank 0 first.
        format: of the experts; everything else is bf16.
    """
    states: list[dict[str, State]] = [
        {
            name: (master, torch.zeros_like(master), torch.zeros_like(master))
            for name, master in trace.masters.items()
        }
        for trace in traces
    ]
    for number in range(1, len(traces[0].steps) + 1):
        expected = _weights(traces, states, format)
        for rank, (trace, state) in enumerate(zip(traces, states, strict=True)):
            what, step = f"step {number}, rank {rank}:", trace.steps[number - 1]
            assert_same_tensors(step.weights, expected, what=f"{what} weight before")
            for name, grad in step.grads.items():
                state[name] = _adamw(
                    state[name],
                    _clip(grad, step.grad_norm),
                    number,
                    step.lr[name],
                    step.weight_decay[name],
                )
            for index, kind in enumerate(("masters", "exp_avg", "exp_avg_sq")):
                expected_shards = {name: shard[index] for name, shard in state.items()}
                assert_same_tensors(getattr(step, kind), expected_shards, what=f"{what} {kind}")
    expected = _weights(traces, states, format)
    for rank, trace in enumerate(traces):
        assert_same_tensors(trace.weights, expected, what=f"rank {rank}: weight at the end")


def norm_of(traces: Sequence[Trace], number: int) -> float:
    """Return the norm of all gradients that go into a step (1-based), summed in fp64."""
    grads = (grad for trace in traces for grad in trace.steps[number - 1].grads.values())
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))


def _clip(grad: torch.Tensor, norm: float) -> torch.Tensor:
    coefficient = CLIP_GRAD / (norm + 1e-6)
    return grad * coefficient if coefficient < 1 else grad


def _adamw(state: State, grad: torch.Tensor, number: int, lr: float, weight_decay: float) -> State:
    """Return the state after step ``number``. lerp, addcmul and addcdiv round as torch's Adam."""
    master, exp_avg, exp_avg_sq = state
    exp_avg = torch.lerp(exp_avg, grad, 1 - BETA1)
    exp_avg_sq = torch.addcmul(exp_avg_sq * BETA2, grad, grad, value=1 - BETA2)
    step_size = lr / (1 - BETA1**number)
    denominator = exp_avg_sq.sqrt() / (1 - BETA2**number) ** 0.5 + EPS
    decayed = master * (1 - lr * weight_decay)
    return torch.addcdiv(decayed, exp_avg, denominator, value=-step_size), exp_avg, exp_avg_sq


def assemble(traces: Sequence[Trace], shards: Sequence[Tensors], name: str) -> torch.Tensor:
    """Return a whole parameter, fp32, of the shards of all ranks, which must cover it."""
    shape = traces[0].shapes[name]
    whole = torch.full((math.prod(shape),), torch.nan)
    for trace, of_rank in zip(traces, shards, strict=True):
        if name in of_rank:
            start = trace.starts[name]
            whole[start : start + of_rank[name].numel()] = of_rank[name]
    assert not whole.isnan().any(), f"{name}: some of it is owned by no rank"
    return whole.view(shape)


def _weights(
    traces: Sequence[Trace], states: Sequence[dict[str, State]], format: BlockScaledFormat
) -> Tensors:
    """Return the bytes of all weights: bf16, and every buffer of the experts."""
    masters = [{name: state[0] for name, state in of_rank.items()} for of_rank in states]
    found = {}
    for name in traces[0].shapes:
        whole = assemble(traces, masters, name)
        if ".experts." in name:
            buffers = reference.quantize(whole, format).buffers()
            found |= {f"{name}.{buffer}": tensor for buffer, tensor in buffers.items()}
        else:
            found[name] = whole.bfloat16()
    return found
