"""The ``quantization_config`` of published models, word for word, is read as what it describes.

DeepSeek-V4's is that of DeepSeek-V4-Flash and -Pro, gpt-oss's that of gpt-oss-20b and -120b.
"""

import json

import pytest

from moe_optim.commands.conversion.published_weights import encodings_of
from moe_optim.commands.export.engine_config import quantization_config
from moe_optim.formats import get_format
from moe_optim.rollout.conventions import find_convention

DEEPSEEK_V3 = """{
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "weight_block_size": [128, 128]
}"""
DEEPSEEK_V4 = """{
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128]
}"""
GPT_OSS = """{
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                               "model.embed_tokens", "lm_head"],
    "quant_method": "mxfp4"
}"""
KIMI_K2_5 = r"""{
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "quantization_status": "compressed", "kv_cache_scheme": null,
    "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": null, "output_activations": null,
        "weights": {"type": "int", "num_bits": 4, "group_size": 32, "strategy": "group",
                    "symmetric": true, "dynamic": false, "observer": "minmax", "actorder": null,
                    "block_structure": null}}},
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*",
               "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
               "re:vision_tower.*", "re:mm_projector.*"]
}"""
KIMI_K3 = r"""{
    "config_groups": {"group_0": {
        "format": "mxfp4-pack-quantized", "input_activations": null, "output_activations": null,
        "targets": ["Linear"],
        "weights": {"actorder": null, "block_structure": null, "dynamic": false, "group_size": 32,
                    "num_bits": 4, "observer": "minmax", "observer_kwargs": {},
                    "scale_dtype": "torch.uint8", "strategy": "group", "symmetric": true,
                    "type": "float", "zp_dtype": null}}},
    "format": "mxfp4-pack-quantized", "global_compression_ratio": null,
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*",
               "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
               "re:.*vision_tower.*", "re:.*mm_projector.*"],
    "kv_cache_scheme": null, "quant_method": "compressed-tensors",
    "quantization_status": "compressed"
}"""
FP8, MXFP4, INT4 = ("mxfp8", (128, 128)), ("mxfp4", (1, 32)), ("int4", (1, 32))
PUBLISHED = {  # text, where it lies, elements and blocks, weights as they are published
    "DeepSeek-V3": (DEEPSEEK_V3, (), {FP8, MXFP4}, None),
    "DeepSeek-V4": (DEEPSEEK_V4, (), {FP8, MXFP4}, "DeepSeek-V4"),
    "gpt-oss": (GPT_OSS, (), {MXFP4}, "gpt-oss"),
    "Kimi K2.5": (KIMI_K2_5, ("text_config",), {INT4}, "Kimi, INT4"),
    "Kimi K3": (KIMI_K3, ("text_config",), {MXFP4}, "Kimi, MXFP4"),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_elements_and_blocks_are_those_of_the_model(model):
    """Experts in MXFP4 are declared by their dtype alone."""
    text, _, wanted, _ = PUBLISHED[model]
    found = encodings_of(json.loads(text), model)
    assert {(one.format.name, block) for one, block in found.items()} == wanted


@pytest.mark.parametrize(
    ("format", "published"), [("int4", KIMI_K2_5), ("mxfp4", KIMI_K3)], ids=["int4", "mxfp4"]
)
def test_what_export_declares_is_what_kimi_publishes(format, published):
    """Apart from modules in bf16, which are listed by name, and settings of the quantizer."""
    theirs = json.loads(published)
    ours = quantization_config(find_convention(get_format(format)), ["lm_head"])
    assert {key: ours[key] for key in ours if key not in ("config_groups", "ignore")} == {
        key: theirs[key] for key in ("quant_method", "quantization_status", "format")
    }
    of_group, of_theirs = ours["config_groups"]["group_0"], theirs["config_groups"]["group_0"]
    assert of_group["weights"].items() <= of_theirs["weights"].items()
    assert of_group | {"weights": 0, "format": 0} == of_theirs | {"weights": 0, "format": 0}


def test_what_export_declares_of_fp8_blocks_is_what_deepseek_publishes():
    ours = quantization_config(find_convention(get_format("fp8_block")), ["lm_head"])
    assert ours.pop("modules_to_not_convert") == ["lm_head"]
    assert ours == json.loads(DEEPSEEK_V3)
