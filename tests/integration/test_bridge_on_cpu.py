"""Megatron-Bridge beside the CPU runtime: what it imports, asks for and walks, restated.

``test_bridge_package.py`` and ``test_bridge_converters.py`` use the package itself.
"""

import importlib
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.errors import ConfigError
from moe_optim.experts import converters
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import MXFP8
from moe_optim.integration import cpu_runtime
from tests.support.ranks import on_ranks

UNGUARDED = """
import transformer_engine.pytorch as te

def fuse() -> te.ops.Sequential:
    return te.ops.Sequential()

def is_fused(module):
    return isinstance(module, (te.Linear, te.LayerNormLinear))
"""
GUARDED = """
try:
    import transformer_engine.pytorch
    HAVE_TE = True
except ImportError:
    HAVE_TE = False
"""


@on_ranks(1)
def test_an_unguarded_import_of_transformer_engine_fails_when_it_is_used(tmp_path: Path):
    """Under ``use_cpu()`` alone, and in that module alone: others learn that it is not there."""
    folder = tmp_path
    sys.modules.pop("transformer_engine", None)  # hidden by the support of tests
    package = folder / "megatron/bridge/peft"
    package.mkdir(parents=True)
    for parent in (package, package.parent):
        (parent / "__init__.py").touch()
    (package / "lora_layers.py").write_text(UNGUARDED)
    (package / "recompute.py").write_text(GUARDED)
    sys.path.insert(0, str(folder))
    cpu_runtime.install()
    from megatron.bridge.peft import lora_layers, recompute

    found: dict[str, Any] = {"guarded": recompute.HAVE_TE}
    found["is fused"] = lora_layers.is_fused(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError) as refusal:
        lora_layers.fuse()
    found["refusal"] = str(refusal.value)
    with pytest.raises(ImportError):
        importlib.import_module("transformer_engine")
    cpu_runtime.uninstall()
    del sys.modules["megatron.bridge.peft.lora_layers"], lora_layers
    with pytest.raises(ImportError):
        importlib.import_module("megatron.bridge.peft.lora_layers")
    assert found["guarded"] is found["is fused"] is False
    assert found["refusal"] == (
        "transformer_engine.pytorch.ops.Sequential: expected Transformer Engine, got a run on the "
        "CPU, which hides it. Turn off the feature that needs it (use_transformer_engine_op_fuser "
        "for LoRA), or train on a GPU."
    )


@on_ranks(1)
def test_multi_token_prediction_on_a_cpu_is_local_whoever_asks():
    """Megatron-Bridge asks for Transformer Engine's, whatever the layers of the model are."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    cpu_runtime.install()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, mtp_num_layers=1, add_bias_linear=False
    )
    layers = gpt_layer_specs.get_gpt_layer_local_spec()
    ask = gpt_layer_specs.get_gpt_mtp_block_spec
    parts = ask(config, layers, use_transformer_engine=True).layer_specs[0].submodules
    assert (parts.eh_proj.__name__, parts.mtp_model_layer.module.__name__) == (
        "ColumnParallelLinear",
        "TransformerLayer",
    )


class Bridge:
    """Walks a model like the converter of mbridge does, and like that of Megatron-Bridge."""

    def _weight_name_mapping_mcore_local_to_global(
        self, model: torch.nn.Module, consider_ep: bool = True
    ) -> list[str]:
        return [f"expert {name.rpartition('weight')[2]}" for name, _ in model.named_parameters()]


@pytest.mark.parametrize("format", [None, MXFP8], ids=["bf16", "mxfp8"])
def test_converters_take_only_weights_that_each_hold_one_expert(format, monkeypatch):
    """They name an expert by the number at the end of ``weight17``; one weight of all has none."""
    name, _, _ = converters.CONVERSIONS[1]
    own = type("Bridge", (Bridge,), dict(vars(Bridge)))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(Bridge=own))
    for _ in range(2):
        converters.guard_converters()
    linear = partial(GroupedLinear, 2, 32, 32, format=format)
    walk = own()._weight_name_mapping_mcore_local_to_global
    with pytest.raises(ConfigError) as refusal:
        walk(torch.nn.ModuleDict({"linear_fc1": linear()}))
    assert str(refusal.value) == (
        "linear_fc1: expected one weight per expert to convert to or from Hugging Face's names, "
        "got one weight of all experts. Set expert_layout to indexed before the model is built, "
        "or export with moe_optim.export_weights."
    )
    indexed = torch.nn.ModuleDict({"linear_fc1": linear(expert_layout="indexed")})
    assert sorted(walk(indexed, consider_ep=False)) == ["expert 0", "expert 1"]


class Mapping:
    """Passes weights on as Megatron-Bridge's mappings do, which know Transformer Engine's."""

    def maybe_dequantize(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_an_exported_weight_is_a_plain_tensor_of_its_dequantized_values(monkeypatch):
    """Of one expert; it is cut, joined and sent afterwards. Others are passed on as they are."""
    ((name, class_name, _),) = converters.DEQUANTIZATIONS
    own = type(class_name, (Mapping,), dict(vars(Mapping)))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{class_name: own}))
    for _ in range(2):
        converters.guard_converters()
    experts = GroupedLinear(2, 32, 64, format=MXFP8, expert_layout="indexed")
    for weight in experts.parameters():
        weight.data.copy_(torch.randn(32, 64))
        exported = own().maybe_dequantize(weight)
        assert type(exported) is torch.Tensor
        assert torch.equal(exported, weight.dequantize())
    plain = torch.ones(2)
    assert own().maybe_dequantize(plain) is plain
