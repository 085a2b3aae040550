"""Saving and loading experts through stock Megatron's ``dist_checkpointing``, on gloo ranks."""

import argparse
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints.stored_checkpoints import FC1, FC2

NAMES = {FC1: "linear_fc1", FC2: "linear_fc2"}


def sharded_experts(
    values: dict[str, torch.Tensor], rank: int, ranks: int, *, stacked: bool
) -> dict[str, Any]:
    """Return what Megatron's experts give a save: a tensor a layer, linear and local expert.

    Args:
        values: by stored key, [layers, E, R, C]; of them this rank has its share of the experts.
        rank: of expert parallelism.
        ranks: of expert parallelism.
        stacked: whether all layers share a key, as where they are alike.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    state = {}
    for key, value in values.items():
        layers, experts = value.shape[:2]
        local = experts // ranks
        for layer in range(layers):
            name = key if stacked else key.replace("layers.", f"layers.{layer}.")
            before = [(0, layer, layers)] if stacked else []
            for expert in range(rank * local, (rank + 1) * local):
                offsets = [*before, (len(before), expert, experts)]
                entry: Any = ShardedTensor.from_rank_offsets(
                    name,
                    value[layer, expert].clone(),
                    *offsets,
                    replica_id=(0, 0, 0),
                    prepend_axis_num=len(offsets),
                )
                if key.endswith("fc1.weight"):
                    entry = apply_swiglu_sharded_factory(entry, tuple(offsets))
                state[f"{name}.{layer}.{expert}"] = entry
    return state


def save(folder: str, values: dict[str, torch.Tensor], iteration: int) -> None:
    """Save the experts of a rank, and arguments with an enumeration of Megatron's. All ranks."""
    from megatron.core import dist_checkpointing
    from megatron.core.transformer.enums import AttnBackend

    rank, ranks = _join()
    args = argparse.Namespace(
        attention_backend=AttnBackend.flash,
        moe_mlp_glu_interleave_size=None,
        expert_model_parallel_size=ranks,
    )
    if rank == 0:
        Path(folder).mkdir(parents=True)
    torch.distributed.barrier()
    state = sharded_experts(values, rank, ranks, stacked=True)
    common = {"args": args, "iteration": iteration, "checkpoint_version": 3.0}
    dist_checkpointing.save(state | common, folder)


def load(folder: str, like: dict[str, torch.Tensor], *, stacked: bool) -> dict[str, Any]:
    """Return what ``load`` gives for experts of these shapes, and the common state. All ranks."""
    from megatron.core import dist_checkpointing

    rank, ranks = _join()
    empty = {key: torch.empty_like(value) for key, value in like.items()}
    return dist_checkpointing.load(sharded_experts(empty, rank, ranks, stacked=stacked), folder)


def _join() -> tuple[int, int]:
    from moe_optim.integration import cpu_runtime

    cpu_runtime.install()
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
