"""Names of families against those of the released Megatron-Bridge, read from its own mappings.

``MEGATRON_BRIDGE_PATH`` lists folders with its package. Its mappings are called; what they import
besides is a stand-in.
"""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optim.rollout.families import FAMILIES, Anatomy, NamePair, expert_prefixes
from tools.upstream.stand_in_imports import StandIn, find_bridge, standing_in

FOLDER = find_bridge()
MODELS = "megatron.bridge.models"
CLASSES = {
    "qwen3_moe": (f"{MODELS}.qwen.qwen3_moe_bridge", "Qwen3MoEBridge"),
    "deepseek_v3": (f"{MODELS}.deepseek.deepseek_v3_bridge", "DeepSeekV3Bridge"),
}
ANATOMIES = {
    "qwen3_moe": Anatomy(num_layers=1, moe_layers=frozenset({0}), traits=frozenset({"untied"})),
    "deepseek_v3": Anatomy(
        num_layers=2,
        moe_layers=frozenset({1}),
        traits=frozenset({"untied", "query_lora", "expert_bias", "shared_experts"}),
        mtp_layers=1,
    ),
}
FORMS = {"QKVMapping": "qkv", "GatedMLPMapping": "gate_up"}

pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="MEGATRON_BRIDGE_PATH names no Megatron-Bridge"
)


class Registry(StandIn):
    """Keeps the mappings that a model of Bridge's gives it."""

    def __init__(self, *mappings: Any) -> None:
        super().__init__(mappings=mappings)


class ModelBridge(StandIn):
    """A base class whose decorator leaves classes as they are."""

    register_bridge = staticmethod(lambda **_: lambda cls: cls)


def mappings_of(family: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield Megatron's name, form and Hugging Face's names, ``*`` for numbers of layers."""
    path, name = CLASSES[family]
    bases = {"MegatronMappingRegistry": Registry, "MegatronModelBridge": ModelBridge}
    real = (path, f"{MODELS}.deepseek.common")
    importlib.import_module("megatron.core.models.gpt.gpt_model")  # stays, unlike what follows
    with standing_in(FOLDER, "megatron.bridge", real, bases, hidden=("transformers",)):
        bridge = getattr(importlib.import_module(path), name)()
        bridge.hf_config = SimpleNamespace(num_hidden_layers=2, num_nextn_predict_layers=1)
        for mapping in bridge.mapping_registry().mappings:
            fields = dict(vars(mapping))
            megatron, hf = fields.pop("megatron_param"), fields.values()
            yield megatron, FORMS.get(type(mapping).__name__, "same"), tuple(hf)


def in_a_layer(names: tuple[str, ...], layer: int) -> tuple[str, ...]:
    return tuple(name.replace(".layers.*.", f".layers.{layer}.") for name in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_called_as_in_megatron_bridge(family):
    """Both names and the form of each pair, of weights that no expert has.

    As saved by Transformer Engine's layers: Megatron's own have names that Bridge does not know of,
    nor does it write copies. It names modules, of which sharded state dicts call one otherwise.
    """
    theirs = {}
    for megatron, form, hf in mappings_of(family):
        for layer in range(ANATOMIES[family].num_layers):
            (name,) = in_a_layer((megatron,), layer)
            theirs[name] = NamePair(megatron=(name,), hf=in_a_layer(hf, layer), form=form)
    for pair in FAMILIES[family].pairs(ANATOMIES[family]):
        name = pair.megatron[0].replace(".transformer_layer.", ".mtp_model_layer.")
        hf = pair.hf[:1] if pair.form == "same" else pair.hf
        assert (pair.form, hf) == (theirs[name].form, theirs[name].hf), name


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_called_as_in_megatron_bridge(family):
    """Gate, up and down of expert N, below the same prefix of a layer."""
    of_experts = {
        megatron: in_a_layer(hf, 1)
        for megatron, _, hf in mappings_of(family)
        if megatron.startswith("decoder.layers.*.mlp.experts.linear_fc")
    }
    _, prefix = expert_prefixes(1)
    assert sorted(of_experts.values()) == [
        (f"{prefix}*.down_proj.weight",),
        (f"{prefix}*.gate_proj.weight", f"{prefix}*.up_proj.weight"),
    ]
