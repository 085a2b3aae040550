"""torch's default dtype and default device reach nothing: loaders of large models change both."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moe_optim.formats import NVFP4
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
