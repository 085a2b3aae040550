"""All ranks of a run in one process: shards of weights take steps of Adam; beside them, the whole.

What ranks exchange is the maximum of their tables' maxima, and buffers of a weight are written by
all of them, as if they were gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from moe_optim.formats import FORMATS, FP8_BLOCK, BlockScaledFormat, QuantizedWeight, reference
from moe_optim.formats.reference.adam import Hyper, step_into
from moe_optim.kernels.adam_state import AdamState
from moe_optim.kernels.host_memory import HostMemory
from moe_optim.kernels.member_table import MemberTable, TableEntry
from moe_optim.kernels.step_table import StepTable
from tests.support.bytes import assert_bytes_equal, assert_values_equal
from tests.support.inputs import poisoned, wide_range_weights, with_specials

HYPERS = (
    Hyper(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=1),
    Hyper(lr=0.25, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.0, step=7),
)
"""Of two parameter groups."""
STATES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, eq=False)
class Weight:
    """A parameter before its first step, and how ranks share it."""

    master: Tensor
    """[E, R, C] fp32, or [n] of a dense weight."""
    format: BlockScaledFormat | None = None
    """None for a dense weight."""
    bounds: tuple[int, ...] = ()
    """Where the shard of one rank ends and that of the next begins, ascending. Shards are empty
    where two of these are equal, or lie at either end of the weight."""
    dtype: torch.dtype = torch.bfloat16
    """Of a dense weight."""
    group: int = 0
    norm: int = 0

    def shards(self) -> list[tuple[int, int]]:
        """Return the range of every rank."""
        ends = (0, *self.bounds, self.master.numel())
        return list(zip(ends, ends[1:], strict=False))


@st.composite
def sharded_weights(draw):
    """Some weights of any formats, dense ones among them, in the shards of one to four ranks.

    Their values spread far, special ones among them.
    """
    ranks = draw(st.integers(1, 4))
    weights = []
    for seed in range(draw(st.integers(1, 3))):
        format = draw(st.sampled_from([*FORMATS.values(), None]))
        unit = 1 if format is None else format.elements_per_byte
        experts, rows, cols = (draw(st.integers(1, most)) for most in (2, 3, 5))
        shape = (experts, 32 * rows, 32 * cols)
        if format is FP8_BLOCK:
            shape = (experts, *(size + draw(st.integers(0, 70)) for size in shape[1:]))
        if format is not None and format.is_row_only:
            shape = (experts, draw(st.integers(1, 70)), max(format.block_length, 32) * cols)
        if format is None:
            shape = (draw(st.integers(1, 9000)),)
        master = with_specials(wide_range_weights(*shape, seed=seed))
        bounds = st.integers(0, master.numel() // unit)
        weights.append(
            Weight(
                master=master,
                format=format,
                bounds=tuple(sorted(unit * draw(bounds) for _ in range(ranks - 1))),
                dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
                group=draw(st.integers(0, 1)),
                norm=draw(st.integers(0, 1)),
            )
        )
    return weights


def gradients_of(weights: Sequence[Weight], seed: int) -> list[Tensor]:
    """Return a gradient for each weight, fp32, special values among them."""
    return [
        with_specials(wide_range_weights(*one.master.shape, seed=seed + index), every=61)
        for index, one in enumerate(weights)
    ]


class Stepping:
    """Weights in the shards of all ranks, and whole ones that take the same steps."""

    def __init__(
        self,
        weights: Sequence[Weight],
        *,
        gradients: torch.dtype = torch.float32,
        moments: torch.dtype = torch.float32,
        decoupled: bool = True,
        hypers: Sequence[Hyper] = HYPERS,
        clips: Sequence[float] = (1.0,),
        device: str = "cpu",
        on_host: bool = False,
    ) -> None:
        count = 12 * sum(one.master.numel() for one in weights)
        self.memory = HostMemory(torch.device(device), count) if on_host else None
        self.weights = [Weight(**{**vars(one), "master": one.master.to(device)}) for one in weights]
        self.targets: list[Tensor | QuantizedWeight] = [self._target(one) for one in self.weights]
        self.hyper = torch.tensor([hyper.row() for hyper in hypers], device=device)
        self.clips = torch.tensor(clips, device=device)
        self.decoupled = decoupled
        self.tables = [
            self._table(rank, gradients, moments) for rank in range(len(weights[0].bounds) + 1)
        ]
        self.whole = [
            (one.master.flatten().clone(), *self._moments(one.master.numel(), moments))
            for one in self.weights
        ]

    def _target(self, weight: Weight) -> Tensor | QuantizedWeight:
        if weight.format is None:
            return torch.full_like(weight.master.flatten(), torch.nan, dtype=weight.dtype)
        return poisoned(weight.format, tuple(weight.master.shape), weight.master.device)

    def _moments(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(numel, dtype=dtype, device=self.hyper.device) for _ in range(2)]

    def _table(self, rank: int, gradients: torch.dtype, moments: torch.dtype) -> StepTable:
        states, entries = [], []
        for index, (weight, target) in enumerate(zip(self.weights, self.targets, strict=True)):
            start, end = weight.shards()[rank]
            master = weight.master.flatten()[start:end].clone()
            exp_avg, exp_avg_sq = self._moments(end - start, moments)
            on_host = None
            if self.memory is not None:
                held = [
                    self.memory.take(one.shape, one.dtype) for one in (master, exp_avg, exp_avg_sq)
                ]
                master, exp_avg, exp_avg_sq = (
                    one.on_device.copy_(values)
                    for one, values in zip(held, (master, exp_avg, exp_avg_sq), strict=True)
                )
                on_host = tuple(one.on_host for one in held)
            state = AdamState(
                parameter=f"fc{index}",
                master=master,
                gradient=torch.zeros(end - start, dtype=gradients, device=master.device),
                exp_avg=exp_avg,
                exp_avg_sq=exp_avg_sq,
                group=weight.group,
                norm=weight.norm,
                weight=target[start:end] if isinstance(target, Tensor) else None,
                on_host=on_host,
            )
            states.append(state)
            if isinstance(target, QuantizedWeight):
                inside = {cut for cut in weight.bounds if 0 < cut < weight.master.numel()}
                entry = TableEntry(
                    parameter=f"fc{index}",
                    source=master,
                    target=target,
                    start=start,
                    cuts=tuple(sorted(inside)),
                )
                entries.append(entry)
        return StepTable.build(
            states,
            self.hyper,
            self.clips,
            members=MemberTable.build(entries) if entries else None,
            decoupled=self.decoupled,
        )

    def give(self, gradients: Sequence[Tensor]) -> None:
        """Copy gradients, one a weight, to where the shards read them."""
        for index, (weight, gradient) in enumerate(zip(self.weights, gradients, strict=True)):
            for table, (start, end) in zip(self.tables, weight.shards(), strict=True):
                table.states[index].gradient.copy_(gradient.flatten()[start:end])

    def update(self) -> None:
        """Take a step on every rank, exchange maxima, and finish the gather."""
        for table in self.tables:
            table.launch()
        members = [table.members for table in self.tables if table.members is not None]
        if members:
            largest = torch.stack([one.exchange for one in members]).amax(0)
        for one in members:
            one.exchange.copy_(largest)
            one.encode_shared.launch()
        if members:
            members[0].finish.launch()

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take a step on every rank, and the same unsharded by the reference."""
        self.give(gradients)
        self.update()
        dtype = self.tables[0].states[0].gradient.dtype
        for weight, whole, gradient in zip(self.weights, self.whole, gradients, strict=True):
            master, exp_avg, exp_avg_sq = whole
            step_into(
                *(master, gradient.flatten().to(dtype), exp_avg, exp_avg_sq),
                hyper=self.hyper[weight.group],
                clip=self.clips[weight.norm],
                decoupled=self.decoupled,
            )

    def states(self, index: int) -> list[Tensor]:
        """Return master and both moments of a weight, put together of all shards."""
        shards = [table.states[index] for table in self.tables]
        return [torch.cat([getattr(shard, name) for shard in shards]) for name in STATES]

    def assert_equal_to_the_whole(self) -> None:
        """Fail unless states are those of whole weights, and all weights those of the masters."""
        for index, whole in enumerate(self.whole):
            for got, want, name in zip(self.states(index), whole, STATES, strict=True):
                assert_values_equal(got, want, what=f"fc{index} {name}")
        self.assert_weights_follow()

    def assert_weights_follow(self) -> None:
        """Fail unless every byte of every weight is that of the masters, put together."""
        for index, (weight, target) in enumerate(zip(self.weights, self.targets, strict=True)):
            master = self.states(index)[0]
            if isinstance(target, Tensor):
                assert_values_equal(target, master.to(target.dtype), what=f"fc{index}")
                continue
            expected = reference.quantize(master.view(weight.master.shape), target.format)
            for name, buffer in target.buffers().items():
                what = f"fc{index} {target.format.name} {target.shape} {name}"
                assert_bytes_equal(buffer, expected.buffers()[name], what=what)


def assert_a_clip_of_zero_steps_without_gradients(weights: list[Weight]) -> None:
    """Step with a clip factor of 0, of 1 over zeros, and below 0, after a step with gradients.

    The first two are the same step, and the third moves nothing.
    """
    gradients = [wide_range_weights(*one.master.shape, seed=9) for one in weights]
    runs = {clip: Stepping(weights, clips=(clip,)) for clip in (0.0, 1.0, -1.0)}
    for run in runs.values():  # moments of an ordinary step
        run.clips.fill_(1.0)
        run.step(gradients)
    before = [[one.clone() for one in runs[-1.0].states(index)] for index in range(2)]
    for clip, run in runs.items():
        run.clips.fill_(clip)
        run.step(gradients if clip < 1 else [torch.zeros_like(one) for one in gradients])
        run.assert_weights_follow()
    for index in range(2):
        states = [run.states(index) for run in runs.values()]
        for zero, none, below, old in zip(*states, before[index], strict=True):
            assert_values_equal(zero, none)
            assert_bytes_equal(below, old)
            assert not torch.equal(zero, old)
