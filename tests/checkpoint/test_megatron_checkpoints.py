"""What stock Megatron saves is converted, and what is converted stock Megatron loads."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.checkpoint.files.pickles import Made
from moe_optim.checkpoint.integrity import checkpoint_defect
from moe_optim.commands.conversion.comparison import compare_checkpoints, find_side
from moe_optim.commands.conversion.conversion import (
    ConversionRequest,
    convert_checkpoint,
    plan_conversion,
)
from moe_optim.commands.conversion.layer_view import LayerView
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.experts.keys.layouts import get_layout
from tests.support.bytes import assert_bytes_equal
from tests.support.checkpoints.stored_checkpoints import (
    EXPERTS,
    FC1,
    FC2,
    LAYERS,
    interleaved,
    stored_tensors,
)
from tests.support.ranks import run_ranks


def sharded_experts(
    values: dict[str, torch.Tensor], rank: int, ranks: int, *, stacked: bool
) -> dict[str, Any]:
    """Return what Megatron's experts give a save: a tensor a layer, linear and local expert.

    Args:
        values: by stored key, [layers, E, R, C]; of them this rank has its share of the experts.
        rank: expert-parallel rank.
        ranks: number of expert-parallel ranks.
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


def save_experts(folder: str, values: dict[str, torch.Tensor], iteration: int) -> None:
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


def load_experts(folder: str, like: dict[str, torch.Tensor], *, stacked: bool) -> dict[str, Any]:
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


ITERATION = 9


@pytest.fixture(scope="module")
def experts():
    return {key: stored_tensors()[key] for key in (FC1, FC2)}


@pytest.fixture(scope="module")
def saved(experts, tmp_path_factory):
    """Two expert-parallel ranks have saved half of the experts each; gate and up rows apart."""
    folder = tmp_path_factory.mktemp("saved") / f"iter_{ITERATION:07d}"
    run_ranks(2, save_experts, str(folder), experts, ITERATION)
    return folder


def view_of(path):
    return LayerView(open_checkpoint(path))


def convert(source, target, to, **request):
    asked = ConversionRequest(to=get_layout(to), **request)
    convert_checkpoint(plan_conversion(view_of(source), asked), target)
    return target


def assert_loaded(state, experts, *, stacked):
    """Every expert of every layer is what was saved, and the iteration came along."""
    for key, value in experts.items():
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                name = key if stacked else key.replace("layers.", f"layers.{layer}.")
                got = state[f"{name}.{layer}.{expert}"]
                assert_bytes_equal(got, value[layer, expert], what=f"{name} {layer} {expert}")
    assert state["iteration"] == ITERATION


def test_what_ranks_saved_is_one_model(saved, experts):
    """Pieces of two ranks, and the halves that Megatron cuts fc1 into, are put together."""
    view = view_of(saved)
    for layer in range(LAYERS):
        for linear, key in (("fc1", FC1), ("fc2", FC2)):
            shown = f"decoder.layers.{layer}.mlp.experts.linear_{linear}.weight"
            assert_bytes_equal(view.read(shown), experts[key][layer], what=shown)
    assert isinstance(view.reader.common_state["args"].state["attention_backend"], Made)
    assert view.recorded.parallel_sizes == {"expert": 2}
    assert view.recorded.glu_interleave == 0


def test_stock_megatron_loads_what_was_converted_there_and_back(saved, experts, tmp_path):
    """Through Hugging Face's layout, one tensor a layer; and from torch_dist to torch_dist, all
    layers in one tensor. With interleaved rows, Megatron gets those rows."""
    convert(saved, tmp_path / "hf", "hf", format="safetensors")
    asked = {"format": "torch_dist", "glu_interleave": 2}
    targets = {
        False: convert(tmp_path / "hf", tmp_path / "apart", "grouped", **asked),
        True: convert(saved, tmp_path / "stacked", "indexed", **asked),
    }
    want = experts | {FC1: interleaved(experts[FC1], 2)}
    for stacked, target in targets.items():
        folder = target / saved.name
        assert checkpoint_defect(folder) is None
        (state,) = run_ranks(1, _load, str(folder), experts, stacked)
        assert_loaded(state, want, stacked=stacked)
        sides = [
            find_side(view_of(path), num_experts=None, weights_only=False)
            for path in (saved, target)
        ]
        assert compare_checkpoints(*sides, lambda _: None).differences == []


def _load(folder, like, stacked):
    return load_experts(folder, like, stacked=stacked)
