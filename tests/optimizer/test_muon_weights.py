"""Matrices of a parameter, as Muon sees them."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from moe_optim.kernels.fields import HYPER_FIELDS
from moe_optim.kernels.matrices import MatrixRows, split_rows
from moe_optim.optimizer.muon import MatrixWeight, MuonSettings, describe_weight
from moe_optim.optimizer.muon_step import MuonTable, chunk_numel, needed_bytes
from tests.support.bytes import assert_bytes_equal
from tests.support.matrix_rows import gate_and_up, whole_rows
from tests.support.steps.muon_steps import DEFAULTS, make_states, step, weight_of

GROUPS = SimpleNamespace(
    tp=SimpleNamespace(size=lambda: 2), expt_tp=SimpleNamespace(size=lambda: 2)
)
CUT = "decoder.layers.0.self_attention.linear_q_up_proj.weight"
COPIED = "decoder.layers.0.self_attention.linear_q_down_proj.weight"


def _describe(name: str, mode: Any, *, is_cut: bool) -> MatrixWeight:
    param: Any = torch.nn.Parameter(torch.empty(64, 32, device="meta"))
    # Transformer Engine marks every weight so, and Megatron corrects it for copies
    set_tensor_model_parallel_attributes(param, True, 0, 1)
    if not is_cut:
        param.tensor_model_parallel = False
    settings = replace(DEFAULTS, tp_mode=mode)
    return describe_weight(param, name, SimpleNamespace(gated_linear_unit=True), settings, GROUPS)


@pytest.mark.parametrize("mode", ["duplicated", "distributed"])
def test_a_weight_that_every_tensor_parallel_rank_holds_whole_is_one_matrix(
    mode: Any,
):
    """A down projection of latent attention is not stacked with its copies, which would divide its
    update by the square root of their number."""
    copied, cut = _describe(COPIED, mode, is_cut=False), _describe(CUT, mode, is_cut=True)
    (rows,) = copied.rows
    assert copied.partition_dim is None
    assert copied.whole_shape(rows) == (64, 32)
    assert cut.partition_dim == 0
    assert cut.whole_shape(rows) == (128, 32)


# Several matrices in one weight

GLU = SimpleNamespace(gated_linear_unit=True, moe_mlp_glu_interleave_size=8)
APART = replace(DEFAULTS, splits_gate_up=True)


def _rows_of(name: str, settings: MuonSettings, **attributes: Any) -> tuple[MatrixRows, ...]:
    param: Any = torch.nn.Parameter(torch.empty(64, 32, device="meta"))
    for attribute, value in attributes.items():
        setattr(param, attribute, value)
    return describe_weight(param, name, GLU, settings, GROUPS).rows


@pytest.mark.parametrize(
    ("name", "interleave"),
    [
        ("decoder.layers.0.mlp.experts.linear_fc1.weight", 8),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight3", 8),
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", None),
        ("decoder.layers.0.mlp.linear_fc1.weight", None),
    ],
)
def test_gate_and_up_of_routed_experts_alone_alternate_in_blocks(name: str, interleave: int | None):
    """And only where they are to be apart: Megatron interleaves neither dense nor shared ones."""
    assert _rows_of(name, APART) == gate_and_up(64, interleave)
    assert _rows_of(name, DEFAULTS) == whole_rows(64)
    assert _rows_of(name.replace("fc1", "fc2"), APART) == whole_rows(64)


def test_query_key_and_value_are_apart_unless_the_flag_keeps_them_together():
    """In the order of Megatron's split; --muon-no-split-qkv makes them one matrix."""
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    qkv = {"is_qkv": True, "qkv_split_shapes": [16, 12, 4]}
    assert _rows_of(name, DEFAULTS, **qkv) == split_rows(64, [16, 12, 4])
    assert _rows_of(name, replace(DEFAULTS, splits_qkv=False), **qkv) == whole_rows(64)
    assert _rows_of(name, DEFAULTS) == whole_rows(64)


# Tensor parallelism


@dataclass(frozen=True)
class Ranks:
    """Process group, of which a plan reads the size and this rank."""

    count: int
    name: str = "tp"

    def size(self) -> int:
        """Return the number of ranks."""
        return self.count

    def rank(self) -> int:
        """Return this rank."""
        return 0


@pytest.mark.parametrize("mode", ["blockwise", "duplicated", "distributed"])
@pytest.mark.parametrize(
    ("name", "group", "dim"),
    [
        ("decoder.layers.0.mlp.experts.linear_fc1.weight", "expt_tp", 0),
        ("decoder.layers.0.mlp.experts.linear_fc2.weight", "expt_tp", 1),
        ("decoder.layers.0.mlp.experts.linear_fc2.weight3", "expt_tp", 1),
        ("decoder.layers.0.mlp.shared_experts.linear_fc2.weight", "tp", 1),
        ("decoder.layers.0.mlp.linear_fc1.weight", "tp", 0),
    ],
)
def test_ranks_of_experts_cut_routed_experts_and_the_others_all_else(
    mode: Any, name: str, group: str, dim: int
):
    """All experts in one parameter, whose dimension nobody has marked, or each in its own; blocks
    of ``blockwise`` are matrices of their own."""
    groups = SimpleNamespace(tp=Ranks(4, "tp"), expt_tp=Ranks(2, "expt_tp"))
    is_stacked = name.split(".")[-3] == "experts" and name.endswith("weight")
    param: Any = torch.nn.Parameter(torch.empty(*[3] * is_stacked, 64, 32, device="meta"))
    if not is_stacked:
        set_tensor_model_parallel_attributes(param, True, dim, 1)
    weight = describe_weight(param, name, GLU, replace(DEFAULTS, tp_mode=mode), groups)
    assert weight.group == getattr(groups, group)
    assert weight.partition_dim == (None if mode == "blockwise" else dim)


@pytest.mark.parametrize("mode", ["duplicated", "distributed"])
def test_one_tensor_parallel_rank_cuts_nothing(mode: Any):
    """Experts that expert tensor parallelism of size 1 leaves whole take the room and the iteration
    of whole matrices, in either expert layout, without a collective."""
    settings = replace(DEFAULTS, tp_mode=mode)
    whole = weight_of(32, 64)
    alone = replace(whole, partition_dim=0, group=cast(Any, Ranks(1)))
    assert chunk_numel(alone, 3, settings) == chunk_numel(whole, 3, settings)
    expected = make_states([(whole, 3)])
    step(expected, settings)
    states = [replace(state, matrix=alone) for state in make_states([(whole, 3)])]
    step(states, settings)
    assert_bytes_equal(states[0].master, expected[0].master, what="master")


@pytest.mark.parametrize(("split", "cols"), [((4, 4, 6, 4), 129), ((2, 1, 1, 1), 1)])
@pytest.mark.parametrize("partition_dim", [0, 1])
def test_a_workspace_has_room_for_matrices_of_any_size(
    split: tuple[int, ...], cols: int, partition_dim: int
):
    """Of queries, gates, keys and values, gathered from two ranks; each tensor in the workspace
    ends just behind a multiple of its alignment."""
    settings = replace(DEFAULTS, tp_mode="duplicated")
    group = cast(Any, Ranks(2))
    weight = replace(weight_of(sum(split), cols, split), partition_dim=partition_dim, group=group)
    states = make_states([(weight, 1)])
    workspace = torch.empty(needed_bytes([(weight, 1)], settings), dtype=torch.uint8)
    table = MuonTable.build(
        states, settings, torch.zeros(1, HYPER_FIELDS), torch.ones(2), workspace
    )
    assert table.num_batches == len(split)


def test_matrices_that_other_ranks_share_are_gathered_apart():
    """Dense weights and experts of one shape are two batches, each of its own ranks."""
    settings = replace(DEFAULTS, tp_mode="duplicated")
    groups = [cast(Any, Ranks(2, name)) for name in ("tp", "expt_tp")]
    weights = [replace(weight_of(32, 64), partition_dim=0, group=group) for group in groups]
    states = make_states([(weight, 3) for weight in weights])
    nbytes = needed_bytes([(weight, 3) for weight in weights], settings)
    workspace = torch.empty(nbytes, dtype=torch.uint8)
    hyper = torch.zeros(2, HYPER_FIELDS)
    table = MuonTable.build(states, settings, hyper, torch.ones(2), workspace)
    assert [
        cast(Any, call).keywords["group"]
        for chunk in table.chunks
        for call in chunk.calls
        if getattr(call, "func", None) is dist.all_gather_into_tensor
    ] == groups


def test_ranks_exchange_the_norms_of_all_their_matrices_at_once():
    """One sum for each tensor-parallel group, however many weights it cuts and matrices these hold;
    none for whole ones."""
    settings = replace(DEFAULTS, tp_mode="duplicated")
    weights = [weight_of(32, 64)]
    for name in ("tp", "expt_tp", "tp", "expt_tp"):
        split = (4, 2, 2) if name == "tp" else ()
        group = cast(Any, Ranks(2, name))
        weights += [replace(weights[0], split=split, partition_dim=0, group=group)]
    states = make_states([(weight, 3) for weight in weights])
    nbytes = needed_bytes([(weight, 3) for weight in weights], settings)
    hyper = torch.zeros(len(states), HYPER_FIELDS)
    workspace = torch.empty(nbytes, dtype=torch.uint8)
    table = MuonTable.build(states, settings, hyper, torch.ones(2), workspace)
    reductions = [call for call in table.calls if getattr(call, "func", None) is dist.all_reduce]
    squares = table.momentum.squares
    places = {}
    for call in reductions:
        ((summed,), group) = cast(Any, call).args, cast(Any, call).keywords["group"]
        assert summed.untyped_storage().data_ptr() == squares.untyped_storage().data_ptr()
        places[group.name] = summed.storage_offset(), len(summed)
    assert places == {"tp": (3, 18), "expt_tp": (21, 6)}
    assert len(squares) == 27
