"""What the amaxes of experts have to be, and where they are found."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_optim.experts.grouped_linear import GroupedLinear
from tests.support.checkpoints.stored_checkpoints import read_with_torch
from tests.support.collectives import no_collectives


def amax_of(masters: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each expert [E, R, C] rounded to bf16, in plain torch."""
    magnitudes = masters.bfloat16().float().abs()
    return torch.where(magnitudes.isnan(), 0, magnitudes).amax((1, 2))


def linears_of(module: torch.nn.Module) -> dict[str, GroupedLinear]:
    """Return every grouped linear of a module by name."""
    named = module.named_modules()
    return {name: linear for name, linear in named if isinstance(linear, GroupedLinear)}


def save_module(module: Any, folder: Path, prefix: str) -> None:
    """Save the experts of every rank as Megatron does; only the save itself communicates."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    with no_collectives():
        state = module.sharded_state_dict(prefix=prefix)
    dist_checkpointing.save(state, str(folder))


def load_module(module: Any, folder: Path, prefix: str, *, strict: bool = True) -> Any:
    """Load the experts of every rank as Megatron does, and return their module."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(module.sharded_state_dict(prefix=prefix), str(folder))
    found = {name.removeprefix(prefix): value for name, value in state.items()}
    module.load_state_dict(found, strict=strict)
    return module


def saved_amaxes(checkpoint: Path, ends_with: str = ".weight_amax") -> dict[str, torch.Tensor]:
    """Return every amax of a torch_dist checkpoint by its key."""
    tensors = read_with_torch(checkpoint)
    return {key: amax for key, amax in tensors.items() if key.endswith(ends_with)}
