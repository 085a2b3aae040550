"""Layers that predict further tokens are exported under DeepSeek-V3's names, behind all others."""

import pytest
import torch.distributed as dist

from moe_optim import MoEOptimConfig
from moe_optim.errors import ConfigError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.rollout.dense import find_pairs
from moe_optim.rollout.families import FAMILIES, Anatomy
from tests.rollout.test_export_weights import exported
from tests.support.bytes import assert_bytes_equal
from tests.support.checkpoints import hf_models
from tests.support.modules import serving
from tests.support.ranks import on_ranks
from tools.stacks.attention import replace_core_attention

pytest.importorskip("megatron.core")

OF_ONE_LAYER = {
    *("input_layernorm", "post_attention_layernorm", "mlp.gate"),
    *(f"self_attn.{x}_proj" for x in ("q_a", "q_b", "kv_b", "o")),
    *("self_attn.kv_a_proj_with_mqa", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
    *(f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")),
    *("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"),
}
"""What DeepSeek-V3 has on disk of such a layer besides its experts, less ``.weight``."""


def _build():
    import moe_optim

    hf_models.install_runtime()
    moe_optim.install(MoEOptimConfig(format="mxfp8"))
    common = [flag for flag in hf_models.COMMON if flag != "--use-cpu-initialization"]
    flags = [*common, *hf_models.MODELS["deepseek_v3"], "--mtp-num-layers", "2", "--bf16"]
    args = hf_models.start_megatron(flags)
    replace_core_attention()
    return hf_models.build_model(args), args


@on_ranks(1)
def test_layers_of_multi_token_prediction_have_deepseeks_names():
    """Two behind three layers, the first of which is dense: bytes, and no name but these."""
    model, args = _build()
    given = exported([model])
    experts = {
        name: module for name, module in model.named_modules() if isinstance(module, GroupedLinear)
    }
    named = dict(model.named_parameters())
    found = {}
    for number in range(len(model.mtp.layers)):
        stem = f"model.layers.{args.num_layers + number}."
        mine = {name.removeprefix(stem) for name in given if name.startswith(stem)}
        found[stem] = {name for name in mine if ".experts." not in name}
        for linear, rows in {"linear_fc1": ("gate", "up"), "linear_fc2": ("down",)}.items():
            module = experts[f"mtp.layers.{number}.mtp_model_layer.mlp.experts.{linear}"]
            for expert, tensors in enumerate(serving.experts_of(module.storage.quantized)):
                for suffix, tensor in tensors.items():
                    for row, part in zip(rows, tensor.chunk(len(rows)), strict=True):
                        name = f"{stem}mlp.experts.{expert}.{row}_proj.{suffix}"
                        assert_bytes_equal(given[name], part, what=name)
        for theirs, ours in {
            "eh_proj": f"mtp.layers.{number}.eh_proj.weight",
            "shared_head.norm": f"mtp.layers.{number}.final_layernorm.weight",
            "shared_head.head": "output_layer.weight",
            "embed_tokens": "embedding.word_embeddings.weight",
        }.items():
            assert_bytes_equal(given[f"{stem}{theirs}.weight"], named[ours].detach(), what=theirs)
    dist.destroy_process_group()
    experts = len([name for name in given if ".experts." in name])
    want = {f"{name}.weight" for name in OF_ONE_LAYER} | {"mlp.gate.e_score_correction_bias"}
    assert found == {"model.layers.3.": want, "model.layers.4.": want}
    assert experts == 4 * 8 * 6  # layers, experts, and tensors of each


def test_families_without_such_layers_refuse_them_by_name():
    anatomy = Anatomy(num_layers=2, moe_layers=frozenset({0, 1}), traits=frozenset({"untied"}))
    names = {pair.megatron[0] for pair in FAMILIES["qwen3_moe"].pairs(anatomy)}
    assert find_pairs(names).keys() == names
    with pytest.raises(ConfigError, match=r"also mtp\.layers\.0\..*sequential"):
        find_pairs(names | {"mtp.layers.0.eh_proj.weight"})
