"""What patterns and ModelOpt's ``quant_cfg`` select, against ModelOpt's own code where it is there.

Tests of ModelOpt itself need it on the path, see ``test_modelopt_exchange``.
"""

from importlib.util import find_spec
from typing import Any

import pytest

from moe_optim.calibration.selection import Selection
from moe_optim.errors import ConfigError

NAMES = [f"decoder.layers.{n}.mlp.experts.linear_fc{i}" for n in (0, 1, 2, 11) for i in (1, 2)]
MTP = "mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc1"
WEIGHTS = {f"{name}.weight_quantizer" for name in (*NAMES, MTP)}
INPUTS = {f"{name}.input_quantizer" for name in (*NAMES, MTP)}
EVERY = WEIGHTS | INPUTS


def among(quantizers: set[str], *parts: str) -> set[str]:
    """Return the quantizers whose names contain one of the parts."""
    return {one for one in quantizers if any(part in one for part in parts)}


def rule(pattern: str, **entry: Any) -> dict[str, Any]:
    return {"quantizer_name": pattern, **entry}


OFF = rule("*", enable=False)
FP8 = {"num_bits": (4, 3), "axis": None}
NVFP4 = {
    "num_bits": (2, 1),
    "effective_bits": 4.5,
    "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)},
}
MXFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}
USUALLY_OFF = [
    rule("*lm_head*", enable=False),
    rule("*router*", enable=False),
    rule("mtp.*", enable=False),
    rule("*", parent_class="nn.Embedding", enable=False),
]

RULES: dict[str, tuple[Any, set[str]]] = {
    # quant_cfg -> what it selects
    "everything but MTP, as FP8_DEFAULT_CFG": (
        [OFF, rule("*weight_quantizer", cfg=FP8), rule("*input_quantizer", cfg=FP8), *USUALLY_OFF],
        among(EVERY, "decoder."),
    ),
    "weights of experts, as NVFP4_EXPERTS_ONLY_CFG": (
        [OFF, rule("*.experts.*weight_quantizer", cfg=NVFP4)],
        WEIGHTS,
    ),
    "the last rule counts": (
        [
            OFF,
            rule("*fc1*", cfg=FP8),
            rule("*layers.1.*", enable=False),
            rule("*layers.1.*fc1.input*", enable=True),
        ],
        among(EVERY, "fc1") - among(WEIGHTS, "layers.1."),
    ),
    "dynamic scales have no amax": (
        [OFF, rule("*weight_quantizer", cfg=MXFP4), rule("*input_quantizer", cfg=FP8)],
        INPUTS,
    ),
    "other amaxes of what is disabled later": (
        [rule("*weight*", cfg={"num_bits": 8, "axis": 0}), rule("*weight*", enable=False)],
        INPUTS,
    ),
    "the older dict": (
        {
            "*weight_quantizer": FP8,
            "*layers.0.*": {"enable": False},
            "nn.Embedding": {"*": {"enable": False}},
            "*input_quantizer": {"enable": False},
            "*layers.2.*input_quantizer": {**FP8, "enable": True},
        },
        among(WEIGHTS, "decoder.layers.1.", "layers.2.", "layers.11.") | among(INPUTS, "layers.2."),
    ),
}

PATTERNS: dict[str, tuple[list[str] | None, set[str]]] = {
    "layers and a linear": (
        ["*layers.[1-9]*.linear_fc1"],
        among(EVERY, "1.mlp.experts.linear_fc1", "2.mlp.experts.linear_fc1"),
    ),
    "one after the other": (
        ["*layers.0.mlp*fc2", "mtp*"],
        among(EVERY, MTP, "decoder.layers.0.mlp.experts.linear_fc2"),
    ),
    "a name": ([NAMES[0]], among(EVERY, NAMES[0])),
    "everything": (["*"], EVERY),
    "no argument": (None, EVERY),
}


def chosen(quant_cfg: Any) -> set[str]:
    found = Selection.of(quant_cfg).choose([*NAMES, MTP])
    assert found.keys() == {*NAMES, MTP}
    return {f"{name}.{kind}" for name, kinds in found.items() for kind in kinds}


@pytest.mark.parametrize(
    ("quant_cfg", "want"), [*RULES.values(), *PATTERNS.values()], ids=[*RULES, *PATTERNS]
)
def test_quantizers_of_experts_are_selected(quant_cfg, want):
    assert chosen(quant_cfg) == want
    if isinstance(quant_cfg, list):
        assert chosen(tuple(quant_cfg)) == want


REFUSED: dict[str, tuple[Any, str]] = {
    "a configuration": ({"quant_cfg": [OFF], "algorithm": "max"}, "Give its entry 'quant_cfg'"),
    "one expert": (
        [rule("*local_experts.0.*", enable=False)],
        r"for all experts of a linear, got '[*]local",
    ),
    "channels": (
        [rule("*weight*", cfg={"axis": 0})],
        rf"quant_cfg\[0\]: axis: expected None for {NAMES[0]}.weight_quantizer, got 0",
    ),
    "blocks": (
        [rule("*weight*", cfg={"block_sizes": {-1: 128}})],
        "block_sizes: expected none, or 'type': 'dynamic'",
    ),
    "rules that disable all": (
        [OFF, rule("*shared_experts*", enable=True)],
        f"got rules that disable every quantizer. Match some of these names: {NAMES[0]}",
    ),
    "a pattern of nothing": (
        ["*fc1", "*.layers.3.*"],
        f"got '[*].layers.3.[*]'. Match some of these names: {NAMES[0]}",
    ),
}


@pytest.mark.parametrize(("quant_cfg", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_done_is_refused_by_name(quant_cfg, says):
    with pytest.raises(ConfigError, match=says):
        chosen(quant_cfg)


def modelopts(quant_cfg: Any) -> set[str]:
    """Return the quantizers that ModelOpt leaves enabled, and whose scales are not dynamic."""
    import torch
    from modelopt.torch.quantization import conversion, nn

    model = torch.nn.Module()
    for name in (*NAMES, MTP):
        parent = model
        for part in name.split("."):
            if part not in parent._modules:
                parent.add_module(part, torch.nn.Module())
            parent = parent.get_submodule(part)
        parent.weight_quantizer = nn.GroupedQuantizer(nn.TensorQuantizer(), nn.TensorQuantizer())
        parent.input_quantizer = nn.TensorQuantizer()
    conversion.set_quantizer_by_cfg(model, quant_cfg)
    found = set()
    for one in EVERY:
        quantizer = model.get_submodule(one)
        leaf = quantizer[0] if "weight" in one else quantizer
        if leaf.is_enabled and not leaf._dynamic and not leaf.is_mx_format:
            found.add(one)
    return found


NEEDS_MODELOPT = pytest.mark.skipif(
    find_spec("modelopt") is None, reason="needs nvidia-modelopt 0.47 on the path"
)


@NEEDS_MODELOPT
@pytest.mark.filterwarnings("ignore:Passing quant_cfg in the legacy dict format")
@pytest.mark.parametrize(("quant_cfg", "want"), RULES.values(), ids=RULES.keys())
def test_modelopt_selects_the_same(quant_cfg, want, monkeypatch):
    from modelopt.torch.quantization import conversion
    from torch.nn import Embedding

    monkeypatch.setattr(conversion, "QuantModuleRegistry", {"nn.Embedding": Embedding})
    assert modelopts(quant_cfg) == want


PRESETS = {
    "FP8_DEFAULT_CFG": None,
    "NVFP4_EXPERTS_ONLY_CFG": None,
    "W4A8_MXFP4_FP8_CFG": None,
    "INT8_DEFAULT_CFG": "axis: expected None",
    "INT4_AWQ_CFG": "block_sizes: expected none",
    "MXFP8_DEFAULT_CFG": "rules that disable every quantizer",
}
"""ModelOpt's configurations, and why they are refused."""


@NEEDS_MODELOPT
@pytest.mark.parametrize(("preset", "says"), PRESETS.items())
def test_modelopts_own_configurations_are_taken_verbatim_or_refused(preset, says):
    import modelopt.torch.quantization as mtq

    quant_cfg = getattr(mtq, preset)["quant_cfg"]
    if says is None:
        assert chosen(quant_cfg) == modelopts(quant_cfg) != set()
        validated = mtq.config.QuantizeConfig(quant_cfg=quant_cfg).quant_cfg
        assert chosen(validated) == chosen(quant_cfg)
    else:
        with pytest.raises(ConfigError, match=says):
            chosen(quant_cfg)
