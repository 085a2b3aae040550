"""A small Qwen3-MoE as Megatron stores it, and what becomes of it for engines."""

import json

import torch
from safetensors.torch import load_file

from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.commands.export.export import ExportRequest, plan_export
from moe_optim.formats import get_format
from moe_optim.rollout.conventions import find_convention
from tests.support.checkpoints.hf_checkpoints import write_megatron

MASTERS = "optimizer.state.param."
LAYERS, EXPERTS, HIDDEN, FFN = 2, 3, 128, 256
FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
FC2 = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
SHAPES = {
    "embedding.word_embeddings.weight": (16, HIDDEN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "output_layer.weight": (16, HIDDEN),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (LAYERS, HIDDEN),
    "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, 48, HIDDEN),
    "decoder.layers.self_attention.q_layernorm.weight": (LAYERS, 6),
    "decoder.layers.self_attention.k_layernorm.weight": (LAYERS, 6),
    "decoder.layers.self_attention.linear_proj.weight": (LAYERS, HIDDEN, 24),
    "decoder.layers.pre_mlp_layernorm.weight": (LAYERS, HIDDEN),
    "decoder.layers.mlp.router.weight": (LAYERS, EXPERTS, HIDDEN),
}


def masters(ffn=FFN):
    """Return fp32 masters of all experts, magnitudes that differ from run to run."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for key, shape in ((FC1, (2 * ffn, HIDDEN)), (FC2, (HIDDEN, ffn))):
        values = torch.randn((LAYERS, EXPERTS, *shape), generator=generator)
        exponents = torch.randint(-8, 0, values.shape[:-1], generator=generator)
        found[key] = torch.ldexp(values, exponents.unsqueeze(-1))
    return found


def stored(ffn=FFN, *, with_masters=True):
    """Return what Megatron stores of a small Qwen3-MoE; weights are not what masters round to."""
    generator = torch.Generator().manual_seed(4)
    of_experts = masters(ffn)
    shapes = SHAPES | {key: values.shape for key, values in of_experts.items()}
    tensors = {k: torch.randn(s, generator=generator).bfloat16() for k, s in shapes.items()}
    if with_masters:
        tensors |= {MASTERS + key: values for key, values in of_experts.items()}
    return tensors


def write(folder, tensors, ffn=FFN, **arguments):
    sizes = {"hidden_size": HIDDEN, "moe_ffn_hidden_size": ffn}
    return write_megatron(folder, "qwen3_moe", tensors, **sizes, **arguments)


def request_of(format, convention=None, **more):
    found = get_format(format)
    return ExportRequest(format=found, convention=find_convention(found, convention), **more)


def export(source, target, format, convention=None, **more):
    plan = plan_export(open_checkpoint(source), request_of(format, convention, **more))
    plan.write(target)
    return target


def in_files(folder):
    """Return all tensors as the index has them, each file read by the library."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(weight_map.values())}
    assert sum(map(len, files.values())) == len(weight_map)
    return {key: files[name][key] for key, name in weight_map.items()}
