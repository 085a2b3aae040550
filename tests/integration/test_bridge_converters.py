"""Exporters of Megatron-Bridge and mbridge on a model of portable experts, and its optimizer.

Both in folders of ``MEGATRON_BRIDGE_PATH``, as in ``test_bridge_package.py``. Seen with
megatron-bridge 0.6.2 and mbridge 0.15.1.
"""

from functools import partial
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError
from tests.integration.test_bridge_package import find_packages_on_a_cpu
from tests.support.ranks import run_ranks
from tools.upstream.stand_in_imports import find_bridge

BRIDGE = find_bridge()
pytestmark = [
    pytest.mark.skipif(BRIDGE is None, reason="MEGATRON_BRIDGE_PATH names no Megatron-Bridge"),
    pytest.mark.slow,
]
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": False,
    "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
OFF = (
    "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion", "persist_layer_norm",
    "gradient_accumulation_fusion", "moe_permute_fusion", "cross_entropy_loss_fusion",
)  # fmt: skip


def _build(layout: Any) -> tuple[Any, list[Any]]:
    """Return Megatron-Bridge's bridge and wrapped model, with portable experts in bf16."""
    find_packages_on_a_cpu()
    import moe_optim

    moe_optim.install(MoEOptimConfig(format="bf16", expert_layout=layout))
    from megatron.bridge import AutoBridge
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from transformers import Qwen3MoeConfig

    hf_config = Qwen3MoeConfig(**SIZES, architectures=["Qwen3MoeForCausalLM"])
    bridge = AutoBridge(hf_config)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.transformer_layer_spec = partial(
        get_gpt_decoder_block_spec, use_transformer_engine=False, normalization="RMSNorm"
    )
    provider.transformer_impl, provider.moe_grouped_gemm = "local", True
    provider.bf16, provider.params_dtype = True, torch.bfloat16
    for name in OFF:
        setattr(provider, name, False)
    torch.distributed.init_process_group("gloo")
    provider.finalize()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    return bridge, provider.provide_distributed_model(ddp_config=ddp)


def _weights(model: list[Any]) -> dict[str, torch.Tensor]:
    """Return what an export must hold, by Hugging Face's names: the parameters themselves."""
    import moe_optim

    exported = moe_optim.export_weights(model, layout="hf_per_expert")
    return {name: weight.clone() for name, weight in exported}


def _convert(layout: str) -> dict[str, Any]:
    bridge, model = _build(layout)
    found: dict[str, Any] = {}
    try:
        exported = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    except ConfigError as error:
        return {"refusal": str(error)}
    expected = _weights(model)
    found["bridge"] = _compare(exported, expected)
    found["mbridge"] = _export_by_mbridge(bridge.hf_pretrained, model, expected)
    found["optimizer"] = _set_up_optimizer(model)
    return found


def _compare(exported: dict[str, Any], expected: dict[str, Any]) -> tuple[bool, list[str]]:
    """Return whether names are equal, and the names of experts with equal values."""
    equal = [name for name, value in expected.items() if torch.equal(exported[name], value)]
    is_whole = exported.keys() == expected.keys() == set(equal)
    return is_whole, [name for name in equal if ".mlp.experts." in name]


def _export_by_mbridge(hf_config: Any, model: list[Any], expected: dict[str, Any]) -> Any:
    """Export a layer's experts by mbridge's own functions, and then ask it for the whole model."""
    from mbridge import AutoBridge

    bridge = AutoBridge.from_config(hf_config)
    inner = model[0].module.module
    named = bridge._weight_name_mapping_mcore_local_to_global(inner)
    exported: dict[str, torch.Tensor] = {}
    for name, parameter in inner.named_parameters():
        if ".experts." in name:
            exported |= zip(*bridge._weight_to_hf_format(named[name], parameter), strict=True)
    with pytest.raises(NotImplementedError) as refusal:
        list(bridge.export_weights(model))
    experts = {name: value for name, value in expected.items() if ".mlp.experts." in name}
    return *_compare(exported, experts), str(refusal.value)


def _set_up_optimizer(model: list[Any]) -> list[str]:
    """Build the optimizer of a plain configuration, as NeMo-RL does, and take a step."""
    from megatron.bridge.training.config import SchedulerConfig
    from megatron.bridge.training.optim import setup_optimizer
    from megatron.core.optimizer import OptimizerConfig

    schedule = SchedulerConfig()
    steps = {"lr_decay_steps": 10, "lr_warmup_steps": 1, "wd_incr_steps": 10}
    for name, value in (steps | {"start_weight_decay": 0.1, "end_weight_decay": 0.1}).items():
        setattr(schedule, name, value)
    plain = OptimizerConfig(
        optimizer="adam", lr=1e-3, min_lr=0.0, bf16=True, use_distributed_optimizer=True
    )
    optimizer, _ = setup_optimizer(plain, schedule, model, use_gloo_process_groups=True)
    optimizer.step()
    return [type(part).__name__ for part in (optimizer, *optimizer.chained_optimizers)]


def test_experts_of_their_own_weights_are_exported_right_and_a_plain_optimizer_is_ours():
    """By Megatron-Bridge with the whole model. mbridge's functions take the experts, and refuse the
    model, whose norms they know under names of Transformer Engine's layers alone."""
    (found,) = run_ranks(1, _convert, "indexed", timeout_s=600)
    is_whole, experts = found["bridge"]
    assert is_whole
    assert len(experts) == 12
    is_whole, experts, refusal = found["mbridge"]
    assert is_whole
    assert len(experts) == 12
    assert refusal == "Unsupported parameter name: decoder.layers.0.input_layernorm.weight"
    whole, *parts = found["optimizer"]
    assert whole == "GroupedChainedOptimizer"
    assert set(parts) == {"GroupedDistributedOptimizer"}


def test_one_weight_of_all_experts_is_not_exported():
    """It would be named ``experts..gate_proj.weight``."""
    (found,) = run_ranks(1, _convert, "grouped", timeout_s=600)
    assert "Set expert_layout to indexed" in found["refusal"]
