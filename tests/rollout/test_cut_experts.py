"""Experts that expert tensor parallelism cuts are exported whole, as if nobody had cut them.

Two ranks hold parts of every expert and step. The oracle is a model of whole experts on each rank,
which is given the values of both parts' masters.
"""

import pytest
import torch
import torch.distributed as dist

from moe_optim.experts.grouped_linear import GroupedLinear
from tests.rollout.test_export_weights import (
    OVERLAP,
    Setup,
    build,
    exported,
    initialize,
    refusal,
    step,
)
from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks
from tests.support.states.masters import full_master

pytest.importorskip("megatron.core")

CUT, WHOLE = {"expert_tensor_parallel_size": 2}, {"expert_tensor_parallel_size": 1}
FFN = {"moe_ffn_hidden_size": 256}  # parts of 128: whole blocks of every format


def linears(chunks):
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, GroupedLinear)]


def whole_masters(chunks, optimizer):
    """Return [E, R, C] in bf16 of every linear, from the parts of all ranks."""
    from megatron.core import parallel_state

    sharing = parallel_state.get_expert_tensor_parallel_group()
    others = parallel_state.get_expert_model_parallel_group()
    wholes = []
    for linear in linears(chunks):
        masters = [
            full_master(optimizer, weight) if linear.storages() else weight.detach()
            for weight in linear.weights()
        ]
        mine = torch.cat(masters).bfloat16().contiguous()
        parts = gathered(mine, sharing)
        if linear.name.endswith("linear_fc1"):
            halves = zip(*(part.chunk(2, 1) for part in parts), strict=True)
            whole = torch.cat([half for of_both in halves for half in of_both], 1)
        else:
            whole = torch.cat(parts, 2)
        wholes.append(torch.cat(gathered(whole, others)))
    return wholes


def gathered(values, group):
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values, group=group)
    return parts


def experts_of(given):
    return {name: tensor for name, tensor in given.items() if ".experts." in name}


def _compare(setups):
    compared = {}
    for name, (cut, whole) in setups.items():
        chunks, optimizer = build(cut)
        step(chunks, optimizer)
        given = {
            layout: experts_of(exported(chunks, layout=layout, **cut.export))
            for layout in ("hf_per_expert", "sequential")
        }
        own = experts_of(exported(chunks, experts="own"))
        masters = whole_masters(chunks, optimizer)
        uncut, _ = build(whole)
        for linear, values in zip(linears(uncut), masters, strict=True):
            linear.load_values(values)
        for layout, tensors in given.items():
            want = experts_of(exported(uncut, layout=layout))
            sort = sorted if "expert_model_parallel_size" in cut.sizes else list
            assert sort(tensors) == sort(want)  # ranks of experts take turns
            assert_same_tensors(tensors, want, what=f"{name} {layout}")
        mine = {key: given["hf_per_expert"][key] for key in own}
        assert_same_tensors(own, mine, what=f"{name} own")
        compared[name] = len(own)
    return compared


def pair(sizes, knobs, **options):
    """Return a setup of cut experts, and one of the same experts, all of them on every rank."""
    both = {"knobs": knobs, "model": FFN}
    whole = sizes | WHOLE | {"expert_model_parallel_size": 1}
    return Setup(sizes | CUT, **both, **options), Setup(whole, **both)


SETUPS = {
    "mxfp8": pair({}, {"format": "mxfp8"}, ddp=OVERLAP, export={"bucket_bytes": 200_000}),
    "a parameter an expert": pair({}, {"format": "mxfp8_2d", "expert_layout": "indexed"}),
    "FP8 blocks, cut like the rest": pair(
        {"tensor_model_parallel_size": 2}, {"format": "fp8_block", "wire": "bf16"}
    ),
    "INT4, with the shape of a whole": pair({}, {"format": "int4"}),
    "bf16": pair({}, {"format": "bf16"}),
}


def _on_two_ranks():
    initialize()
    return _compare(SETUPS), _refuse()


def test_cut_experts_are_exported_as_whole_ones_of_the_same_masters():
    """Names, order, dtypes and bytes, in both layouts: gates of both ranks, then ups of both. Parts
    that no whole expert has are refused by name: NVFP4's have a global scale each; 64 rows of gate
    are no block of 128."""
    tensors = {"bf16": 1, "int4": 3}
    counts = {name: 24 * tensors.get(cut.knobs["format"], 2) for name, (cut, _) in SETUPS.items()}
    for compared, (scales, blocks) in run_ranks(2, _on_two_ranks):
        assert compared == counts
        assert "linear_fc1: expected one global scale per expert" in scales
        assert "--expert-tensor-parallel-size 2" in scales
        assert "in multiples of 128, a block of fp8_block, got 64" in blocks


def _refuse():
    for_nvfp4, _ = build(Setup(CUT, {"format": "nvfp4"}))
    in_blocks, _ = build(Setup(CUT, {"format": "fp8_block"}))
    return [refusal(lambda chunks=chunks: exported(chunks)) for chunks in (for_nvfp4, in_blocks)]
