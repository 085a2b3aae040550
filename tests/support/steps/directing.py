"""Weights whose masters move along given directions, in pieces; beside them, what they become."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import numpy as np
import torch
from torch import Tensor

from moe_optim.formats import BlockScaledFormat, QuantizedWeight, reference
from moe_optim.kernels.adam_state import MasterState
from moe_optim.kernels.fields import HYPER_FIELDS
from moe_optim.kernels.member_table import MemberTable, TableEntry
from moe_optim.kernels.update import DirectedRange, Updates
from tests.support.bytes import assert_bytes_equal, assert_values_equal
from tests.support.inputs import poisoned, wide_range_weights, with_specials
from tests.support.ptx import numbers

ROWS = (
    (0.95, 0.05, -0.1 * 0.02, -0.02, 1.75, 0.2),
    (0.9, 0.1, 0.0, -0.375, 0.3, 1.0),
)
"""Momentum, 1 - momentum, -(decay * lr), -lr, scale and extra factor of two groups; the second has
no decay."""
Shape = tuple[int, ...]


def stepped(master: Tensor, direction: Tensor, row: Sequence[float]) -> Tensor:
    """Return masters after a step: two products, each rounded, and one rounding a difference."""
    minus_decay, minus_lr, scale, extra = (np.float32(value) for value in row[2:6])
    p = master.cpu().numpy()
    with np.errstate(all="ignore"):
        o = direction.cpu().float().numpy() * scale * extra
        if minus_decay != 0:
            p = numbers.fma(minus_decay, p, p)
        return torch.from_numpy(numbers.fma(minus_lr, o, p)).to(master.device)


class Directing:
    """Weights of any formats in one or more tables, and steps of them in any pieces."""

    def __init__(
        self,
        weights: Sequence[tuple[Shape, BlockScaledFormat | torch.dtype]],
        *,
        directions: torch.dtype = torch.bfloat16,
        num_tables: int = 2,
        device: str = "cpu",
    ) -> None:
        """Allocate masters with special values among them, and poisoned buffers.

        Args:
            weights: shapes, [E, R, C], and formats, or dtypes of dense weights.
            directions: dtype of the directions.
            num_tables: number of tables, which take the quantized weights in turn.
            device: device of all tensors.
        """
        self.shapes = [shape for shape, _ in weights]
        self.hyper = torch.zeros(len(ROWS), HYPER_FIELDS)
        self.hyper[:, : len(ROWS[0])] = torch.tensor(ROWS)
        self.hyper = self.hyper.to(device)
        self.clips = torch.tensor([1.0, 0.25], device=device)
        self.directions_dtype = directions
        self.targets: list[Tensor | QuantizedWeight] = []
        self.states: list[MasterState] = []
        entries: list[TableEntry] = []
        for index, (shape, format) in enumerate(weights):
            values = with_specials(wide_range_weights(*shape, seed=index))
            master = values.flatten().to(device)
            if isinstance(format, torch.dtype):
                target = torch.full_like(master, torch.nan, dtype=format)
                weight = target
            else:
                target, weight = poisoned(format, shape, device), None
                entries.append(TableEntry(parameter=f"fc{index}", source=master, target=target))
            self.targets.append(target)
            self.states.append(
                MasterState(
                    parameter=f"fc{index}",
                    master=master,
                    group=index % 2,
                    norm=index // 2 % 2,
                    weight=weight,
                )
            )
        parts = [entries[number::num_tables] for number in range(num_tables)]
        self.tables = [MemberTable.build(part) for part in parts if part]
        self.updates = Updates.build(
            self.states, self.hyper, self.clips, rule="direction", members=self.tables
        )
        self.masters = [state.master.clone() for state in self.states]

    def directions(self, seed: int) -> list[Tensor]:
        """Return a direction for each weight, flat, special values among them."""
        device, dtype = self.hyper.device, self.directions_dtype
        values = [
            wide_range_weights(*shape, seed=seed + index, exponents=(-10, 10))
            for index, shape in enumerate(self.shapes)
        ]
        return [with_specials(one, every=61).flatten().to(device, dtype) for one in values]

    def cut(self, directions: Sequence[Tensor], seed: int) -> list[DirectedRange]:
        """Return pieces of some experts each that cover all weights, in no order."""
        random = Random(seed)
        pieces: list[DirectedRange] = []
        for index, (shape, direction) in enumerate(zip(self.shapes, directions, strict=True)):
            inside = range(1, shape[0])
            bounds = random.sample(inside, random.randint(0, len(inside)))
            numel = direction.numel() // shape[0]
            ends = [numel * expert for expert in sorted([0, *bounds, shape[0]])]
            pieces += [
                (index, low, high, direction[low:high].clone()) for low, high in pairwise(ends)
            ]
        random.shuffle(pieces)
        return pieces

    def step(self, directions: Sequence[Tensor], seed: int) -> None:
        """Take a step in pieces, some of them a plan, and the same by the oracle."""
        pieces = self.cut(directions, seed)
        size = Random(seed).randint(1, len(pieces))
        for first in range(0, len(pieces), size):
            self.updates.plan_along(pieces[first : first + size]).launch()
        self.updates.finish.launch()
        for index, (state, direction) in enumerate(zip(self.states, directions, strict=True)):
            if self.clips[state.norm] >= 0:
                row = self.hyper[state.group].tolist()
                self.masters[index] = stepped(self.masters[index], direction, row)

    def assert_equal_to_the_oracle(self) -> None:
        """Fail unless masters are the oracle's, and all weights those of these masters."""
        for table in self.tables:
            table.finish.launch()
        for index, (state, want) in enumerate(zip(self.states, self.masters, strict=True)):
            assert_values_equal(state.master, want, what=f"fc{index} master")
            target = self.targets[index]
            if isinstance(target, Tensor):
                assert_values_equal(target, want.to(target.dtype), what=f"fc{index}")
                continue
            expected = reference.quantize(want.view(self.shapes[index]), target.format)
            for name, buffer in target.buffers().items():
                what = f"fc{index} {target.format.name} {target.shape} {name}"
                assert_bytes_equal(buffer, expected.buffers()[name], what=what)
