"""Fused steps of a run as each rank saw them, and what one process makes of them in plain torch.

Norms are those of every gradient counted once, wherever copies of it lie; masters and moments are
the reference's of them, which ``tests/formats/reference/test_adam.py`` holds against fractions.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.formats.reference.adam import Hyper, step_into
from tests.support import training
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.states.masters import assert_weights_come_from_masters
from tests.support.training import named_parameters, pretrain

STATES = ("master", "exp_avg", "exp_avg_sq")
CUT_OVER_TENSOR_RANKS = ("linear_qkv", "linear_proj", "word_embeddings", "output_layer", "eh_proj")
CUT_OVER_TENSOR_RANKS += (".mlp.linear_fc",)
"""Parts of the names of weights that tensor-parallel ranks divide; others are copies."""
Key = tuple[str, str, int]
"""Name of a parameter, which of several parameters of that name, and the first element."""


@dataclass
class Shard:
    """What one rank owns of a parameter. Tensors are copies."""

    gradient: torch.Tensor
    before: dict[str, torch.Tensor]
    hyper: dict[str, Any]
    after: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Step:
    """One step on one rank, and what Megatron's own code says of the same gradients."""

    shards: dict[Key, Shard]
    stock_norm: float
    stock_zeros: int
    moved: bool = False
    norm: float = math.nan
    norms_by_group: dict[str, float] = field(default_factory=dict)
    zeros: int | None = None


@dataclass
class Run:
    """All steps on one rank, and how many quantized weights were compared with their masters."""

    steps: list[Step]
    compared: int
    is_fused: bool
    parts: list[bool]
    """Of every optimizer of the chain, whether it has something to step."""
    dtypes: set[torch.dtype]
    """Of the parameters of which this rank owns some."""


def watch_run(
    flags: Sequence[str],
    config: MoEOptimConfig,
    without: Sequence[str] = (),
    prepare: Callable[[], None] | None = None,
) -> Run:
    """Train and return every step, on a rank of its own.

    Args:
        flags: added to those of the small model.
        config: what is installed.
        without: flags of the small model that are taken away, with their values.
        prepare: called before, to change what no flag does.
    """
    for flag in without:  # in this rank alone
        start = training.MODEL.index(flag)
        rest = (i for i, word in enumerate(training.MODEL) if i > start and word.startswith("--"))
        del training.MODEL[start : next(rest)]
    if prepare is not None:
        prepare()
    from moe_optim.weights.managed import is_managed

    steps: list[Step] = []

    def check(model: list[Any], optimizer: Any) -> Run:
        compared = assert_weights_come_from_masters(model, optimizer)
        for param, master, _, part in owned(optimizer):
            if not is_managed(param):
                weight = param.detach().view(-1)[owned_range(part, param)]
                assert_bytes_equal(weight, master.detach().to(param.dtype), what="weight")
        parts = [not part.is_stub_optimizer for part in optimizer.chained_optimizers]
        dtypes = {param.dtype for param, *_ in owned(optimizer) if not is_managed(param)}
        return Run(steps, compared, optimizer.is_fused, parts, dtypes)

    def watch(model: list[Any], optimizer: Any) -> None:
        _watch_steps(model, optimizer, steps)

    return pretrain(flags, config, after_setup=watch, observe=check).extra


def _watch_steps(model: list[Any], optimizer: Any, steps: list[Step]) -> None:
    names = {param: name for name, param in named_parameters(model)}
    take_step = optimizer.step

    def keys() -> Iterator[tuple[Key, torch.nn.Parameter, torch.Tensor, Any, Any]]:
        for param, master, group, part in owned(optimizer):
            place = _place(names[param])
            yield (names[param], place, owned_range(part, param).start), param, master, group, part

    def step() -> Any:
        shards = {
            key: Shard(
                gradient=param.main_grad.view(-1)[owned_range(part, param)].clone(),
                before=_states(part, master),
                hyper={name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
            )
            for key, param, master, group, part in keys()
        }
        now = Step(shards, *_ask_megatron(optimizer))
        result = take_step()
        now.moved, norm, now.zeros = result
        now.norm = float(norm)
        now.norms_by_group = {k: float(of) for k, of in optimizer.grad_norms_by_group.items()}
        for key, param, master, group, part in keys():
            shard = shards[key]
            shard.after = _states(part, master)
            assert group["step"] == len(steps) + 1
            assert master.grad is None, f"{key}: a copy of the gradient"
            assert getattr(master, "decoupled_grad", None) is None
            left = param.main_grad.view(-1)[owned_range(part, param)]
            assert_bytes_equal(left, shard.gradient, what=f"{key}: gradient after the step")
        steps.append(now)
        return result

    optimizer.step = step


def _ask_megatron(optimizer: Any) -> tuple[float, int]:
    """Return norm and zeros by Megatron's code, and leave no copy of a gradient."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    ChainedOptimizer.prepare_grads(optimizer)
    norm = float(ChainedOptimizer.get_grad_norm(optimizer))
    zeros = int(ChainedOptimizer.count_zeros(optimizer))
    for _, master, _, _ in owned(optimizer):
        master.grad = None
    return norm, zeros


def owned(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor, dict[str, Any], Any]]:
    """Yield parameter, master, parameter group and optimizer of everything this rank owns."""
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for params, masters in (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ):
            groups = part.optimizer.param_groups
            for of_params, of_masters, group in zip(params, masters, groups, strict=True):
                for param, master in zip(of_params, of_masters, strict=True):
                    yield param, master, group, part


def owned_range(part: Any, param: Any) -> slice:
    found = part._get_model_param_range_map(param)["param"]
    return slice(found.start, found.end)


def _states(part: Any, master: torch.Tensor) -> dict[str, torch.Tensor]:
    moments = part.optimizer.state[master]
    found = {name: moments[name].clone() for name in STATES[1:] if name in moments}
    return {"master": master.detach().clone(), **found}


def _place(name: str) -> str:
    """Return what tells parameters of one name apart; copies of a parameter have the same."""
    from megatron.core import parallel_state as ranks

    places = []
    if "embedding" not in name.split("."):  # the last stage has it as well
        places.append(f"stage {ranks.get_pipeline_model_parallel_rank()}")
    if ".experts." in name:
        places.append(f"experts {ranks.get_expert_model_parallel_rank()}")
        places.append(f"cut {ranks.get_expert_tensor_parallel_rank()}")
    elif any(part in name for part in CUT_OVER_TENSOR_RANKS):
        places.append(f"cut {ranks.get_tensor_model_parallel_rank()}")
    return ", ".join(places)


def assert_steps_follow(
    runs: Sequence[Run],
    *,
    clip_grad: float,
    decoupled: bool = True,
    own_norm: str | None = None,
) -> None:
    """Norms, zeros, masters and moments of all ranks follow from their gradients, to the bit.

    Args:
        runs: of all ranks.
        clip_grad: the largest norm that stays as it is.
        decoupled: weight decay is added to the update.
        own_norm: the module whose parameters have a norm of their own.
    """
    for number, steps in enumerate(zip(*(run.steps for run in runs), strict=True), 1):
        gradients = _count_once(steps)
        groups: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        for (name, _, _), gradient in gradients.items():
            groups[own_norm in name.split(".")].append(gradient)
        norms = {is_own: _norm(of_group) for is_own, of_group in groups.items()}
        assert norms[False] > clip_grad, "nothing is clipped"
        zeros = sum(int((gradient == 0).sum()) for gradient in gradients.values())
        for rank, step in enumerate(steps):
            what = f"step {number}, rank {rank}"
            assert step.moved, what
            assert step.norm == norms[False].item(), what
            assert step.norm == pytest.approx(step.stock_norm, rel=1e-5), what
            assert step.norms_by_group == ({own_norm: norms[True].item()} if own_norm else {})
            assert step.stock_zeros == zeros, what
            assert step.zeros in (None, zeros), what
            for key, shard in step.shards.items():
                clip = clip_grad / (norms[own_norm in key[0].split(".")] + 1e-6)
                _assert_is_adams(shard, number, clip, decoupled, f"{what}: {key}")


def _count_once(steps: Sequence[Step]) -> dict[Key, torch.Tensor]:
    """Return every gradient once; copies on several ranks have to be the same."""
    found: dict[Key, torch.Tensor] = {}
    for key, shard in (item for step in steps for item in step.shards.items()):
        same = found.setdefault(key, shard.gradient)
        assert torch.equal(same, shard.gradient), f"{key}: copies differ"
    return found


def _norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm, fp32."""
    return torch.tensor(math.sqrt(sum(float(g.double().square().sum()) for g in gradients)))


def _assert_is_adams(
    shard: Shard, number: int, clip: torch.Tensor, decoupled: bool, what: str
) -> None:
    after = shard.after
    want = {name: shard.before.get(name, torch.zeros_like(after[name])).clone() for name in STATES}
    step_into(
        want["master"],
        shard.gradient,
        want["exp_avg"],
        want["exp_avg_sq"],
        hyper=torch.tensor(Hyper(**shard.hyper, step=number).row()),
        clip=torch.tensor(min(clip.item(), 1.0)),
        decoupled=decoupled,
    )
    assert_same_tensors(after, want, what=what)
    assert not torch.equal(after["master"], shard.before["master"]), f"{what}: nothing moved"
