"""A parameter of all experts becomes the entries of its own experts, in every model chunk."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from moe_optim.checkpoint.owned_boxes import entries_of

EXPERTS = 2


def make_chunk() -> torch.nn.Module:
    """Return a layer whose experts are one parameter, named as in every other chunk."""
    layer = torch.nn.Module()
    layer.register_parameter("weight", torch.nn.Parameter(torch.zeros(EXPERTS, 4, 3)))
    layer.register_parameter("norm", torch.nn.Parameter(torch.zeros(3)))
    return layer


def state_of(chunk: torch.nn.Module, layer: int, layers: int) -> dict[str, ShardedTensor]:
    """Return what Transformer Engine saves: an entry an expert, of views."""
    place = (0, layer, layers)
    state = {
        f"weight{expert}": ShardedTensor.from_rank_offsets(
            "layers.weight", part, place, (1, expert, EXPERTS), prepend_axis_num=2
        )
        for expert, part in enumerate(chunk.weight.unbind(0))
    }
    norm = ShardedTensor.from_rank_offsets("layers.norm", chunk.norm, place, prepend_axis_num=1)
    return {**state, "norm": norm}


@pytest.mark.parametrize("chunks", [1, 3], ids=["one chunk", "virtual stages"])
def test_entries_are_those_of_the_parameters_own_chunk(chunks):
    """Names of several chunks are alike; their layers are not."""
    model = [make_chunk() for _ in range(chunks)]
    states = [state_of(chunk, layer, chunks) for layer, chunk in enumerate(model)]
    names = ["model"] if chunks == 1 else [f"model{index}" for index in range(chunks)]
    optimizer = SimpleNamespace(
        model_chunks=model,
        buffers=[SimpleNamespace(param_index_map=dict.fromkeys(c.weight for c in model))],
    )
    found = entries_of(optimizer, dict(zip(names, states, strict=True)))
    assert found.keys() == {chunk.weight for chunk in model}
    for layer, chunk in enumerate(model):
        entries = found[chunk.weight].build()
        assert [entry.global_offset[:2] for entry in entries] == [
            (layer, expert) for expert in range(EXPERTS)
        ]
