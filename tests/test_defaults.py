"""torch's default dtype and default device reach nothing: loaders of large models change both."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moe_optim.formats import FORMATS, NVFP4, reference
from moe_optim.formats.health_figures import NUM_SUMS
from moe_optim.formats.reference.adam import Hyper
from moe_optim.formats.reference.blocks import expert_amax_into
from moe_optim.formats.reference.health import measure_into
from moe_optim.kernels.norm import NormInput, NormTable
from tests.support.bytes import assert_same_tensors
from tests.support.inputs import wide_range_weights
from tests.support.ranks import on_ranks
from tests.support.states import life_cycle

DTYPES = (torch.bfloat16, torch.float16, torch.float64)


@contextmanager
def defaults(dtype: torch.dtype, device: str | None = None) -> Iterator[None]:
    """Set both defaults in a block."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    _drop_tables()
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        _drop_tables()


def _drop_tables() -> None:
    """Have tables of codes made anew: they are kept for good."""
    modules = [module for name, module in sys.modules.items() if name.startswith("moe_optim.")]
    for held in (held for module in modules for held in vars(module).values()):
        if hasattr(held, "cache_clear"):
            held.cache_clear()


def _measured(master: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return everything that is computed of a weight outside of Megatron."""
    found: dict[str, torch.Tensor] = {}
    for name, format in FORMATS.items():
        q = reference.quantize(master, format)
        found |= {f"{name} {buffer}": tensor for buffer, tensor in q.buffers().items()}
        found[f"{name} values"] = reference.dequantize(q)
        sums = torch.zeros(2, NUM_SUMS, dtype=torch.float64, device="cpu")
        amaxes = torch.zeros(2, dtype=torch.float32, device="cpu")
        measure_into(sums, amaxes, master, 0, q)
        found |= {f"{name} sums": sums, f"{name} amaxes": amaxes}
    table = NormTable.build([NormInput(master.view(-1))], count_zeros=True)
    table.launch()
    amax = torch.zeros(1, dtype=torch.float32, device="cpu")
    expert_amax_into(amax, master, 0, master.numel())
    row = Hyper(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=7).row()
    return found | {
        "squares": table.squares,
        "zeros": table.zeros,
        "amax": amax,
        "hyper": torch.tensor(row, dtype=torch.float64, device="cpu"),
    }


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.bfloat16, None), (torch.float16, "meta"), (torch.float64, "meta")]
)
def test_bytes_norms_and_figures_are_the_same_whatever_the_defaults(dtype, device):
    master = wide_range_weights(2, 128, 128, seed=3)
    expected = _measured(master)
    with defaults(dtype, device):
        found = _measured(master)
    assert len(found) > 4 * len(FORMATS)
    assert_same_tensors(found, expected, what="")


STEPS = 2


@pytest.mark.parametrize("step", ["fused", "stock"])
@on_ranks(1)
def test_masters_moments_and_weights_of_a_step_are_the_same_whatever_the_defaults(step):
    """Return how many steps were those of plain torch, whatever the defaults in ``step()``."""
    format = NVFP4.name
    life_cycle.initialize()
    taken = 0
    for dtype in DTYPES:
        cycle = life_cycle.LifeCycle(step=step, format=format)
        take_step = cycle.optimizer.step

        def step_under(take: Any = take_step, dtype: torch.dtype = dtype) -> Any:
            with defaults(dtype):
                return take()

        cycle.optimizer.step = step_under
        for seed in range(STEPS):
            cycle.zero()
            cycle.micro(seed, last=True)
            cycle.step()
            cycle.rollout(seed)
            cycle.check()
            taken += 1
    assert taken == STEPS * len(DTYPES)
