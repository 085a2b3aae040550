"""Every property of Transformer Engine's quantizers, weights and recipes has a known effect here.

The table is that of 2.20. With Transformer Engine at hand, installed or in
``TRANSFORMER_ENGINE_PATH``, a property that the table lacks fails: it may change bytes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from moe_optim import rules
from moe_optim.errors import StateError
from moe_optim.weights.te.fields import is_quantized, is_tensorwise, quantizer_of, te_formats_of
from moe_optim.weights.te.recipe import import_error
from moe_optim.weights.te.storage import TransformerEngineStorage
from tests.support.te.te_stand_ins import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
)
from tests.weights.te.test_storage import (
    EVERY_KIND,
    FOREIGN,
    KINDS,
    Kind,
    assert_all_hold,
    requantize,
)

PATH = os.environ.get("TRANSFORMER_ENGINE_PATH", "")
FORMAT, REFUSED, MEGATRON, NONE = "format", "refused", "Megatron", "none"
"""What a property does here: it is honoured, by format or layout; values other than the default
are refused by name; Megatron's code casts such weights; or it changes no byte of a weight."""

QUANTIZERS: Mapping[str, Mapping[str, str]] = {
    "Quantizer": {
        **dict.fromkeys(("rowwise", "columnwise", "rowwise_usage", "columnwise_usage"), FORMAT),
        "optimize_for_gemm": FORMAT,  # order of scales
        "internal": NONE,  # a parameter is never without its tensor class
    },
    "Float8CurrentScalingQuantizer": {
        **dict.fromkeys(("fp8_dtype", "dtype", "force_pow_2_scales", "amax_epsilon"), MEGATRON),
        # casts of masters reduce over the group that they are given
        **dict.fromkeys(("with_amax_reduction", "amax_reduction_group"), NONE),
        **dict.fromkeys(("device", "use_existing_amax", "scale", "amax"), NONE),
    },
    "Float8BlockQuantizer": {
        "force_pow_2_scales": FORMAT,
        **dict.fromkeys(("fp8_dtype", "dtype", "block_len", "amax_epsilon"), REFUSED),
        "block_scaling_dim": REFUSED,
    },
    "MXFP8Quantizer": {
        "with_2d_quantization": FORMAT,
        **dict.fromkeys(("fp8_dtype", "dtype"), REFUSED),
    },
    "NVFP4Quantizer": {
        **dict.fromkeys(("fp4_dtype", "dtype"), FORMAT),  # there is one
        **dict.fromkeys(("with_amax_reduction", "amax_reduction_group"), REFUSED),
        **dict.fromkeys(("with_2d_quantization", "with_rht", "stochastic_rounding"), REFUSED),
        **dict.fromkeys(("row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max"), REFUSED),
        # of the Hadamard transform, and of four-over-six blocks
        **dict.fromkeys(("with_random_sign_mask", "rht_matrix_random_sign_mask_t"), NONE),
        **dict.fromkeys(("with_post_rht_amax", "nvfp4_4over6_err_mode"), NONE),
    },
}
BUFFERS = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
WEIGHTS: Mapping[str, Mapping[str, str]] = {
    "QuantizedTensorStorage": {"_dtype": REFUSED, "_quantizer": FORMAT, "_INNER_TENSORS": NONE},
    "Float8BlockwiseQTensorStorage": {"_fp8_dtype": REFUSED, "_is_2D_scaled": REFUSED},
    "MXFP8TensorStorage": {"_fp8_dtype": REFUSED, "_with_gemm_swizzled_scales": FORMAT},
    "NVFP4TensorStorage": {
        "_fp4_dtype": FORMAT,
        "_with_gemm_swizzled_scales": FORMAT,
        **dict.fromkeys(("_row_scaled_nvfp4", "_nvfp4_use_4over6", "_nvfp4_e4m3_max"), REFUSED),
        **dict.fromkeys(("_amax_rowwise", "_amax_columnwise"), FORMAT),
    },
}
PRODUCTS = dict.fromkeys(
    ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad", "fp8_dpa", "fp8_mha", "margin"), NONE
)
RECIPES: Mapping[str, Mapping[str, str]] = {
    "Float8CurrentScaling": {"use_power_2_scales": MEGATRON},
    "Float8BlockScaling": {
        "use_f32_scales": FORMAT,
        "w_block_scaling_dim": REFUSED,
        **dict.fromkeys(("x_block_scaling_dim", "grad_block_scaling_dim"), NONE),
    },
    "MXFP8BlockScaling": {"enable_2d_quantization": FORMAT},
    "NVFP4BlockScaling": {
        **dict.fromkeys(("disable_2d_quantization", "nvfp4_4over6"), REFUSED),
        # of activations and gradients alone, and of four-over-six blocks
        **dict.fromkeys(("disable_rht", "disable_stochastic_rounding"), NONE),
        **dict.fromkeys(("row_scaled_activation", "nvfp4_4over6_e4m3_use_256"), NONE),
        "nvfp4_4over6_err_mode": NONE,
        "fp4_format": FORMAT,
    },
}
OF_EVERY_RECIPE = PRODUCTS | {"fp8_format": REFUSED, "backward_override": NONE}
VARIABLES: Mapping[str, str] = {
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": FORMAT,
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": MEGATRON,
    **dict.fromkeys(("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "NVTE_NVFP4_4OVER6"), REFUSED),
    # of four-over-six blocks; of activations and gradients; of products
    **dict.fromkeys(("NVTE_NVFP4_4OVER6_E4M3_USE_256", "NVTE_NVFP4_4OVER6_ERR_MODE"), NONE),
    **dict.fromkeys(("NVTE_NVFP4_DISABLE_RHT", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"), NONE),
    **dict.fromkeys(("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "NVTE_BACKWARD_OVERRIDE"), NONE),
}
"""Environment variables of recipes. ``NVTE_USE_FAST_MATH`` changes casts with 1-D blocks alone."""
KIND_OF = {
    "Float8BlockQuantizer": "fp8_block",
    "MXFP8Quantizer": "mxfp8",
    "NVFP4Quantizer": "nvfp4",
    "Float8BlockwiseQTensorStorage": "fp8_block",
    "MXFP8TensorStorage": "mxfp8",
    "NVFP4TensorStorage": "nvfp4",
}


def _refused(table: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    return [
        (cls, name)
        for cls, properties in table.items()
        for name, effect in properties.items()
        if effect == REFUSED and cls in KIND_OF and name != "fp8_dtype"
    ]


@pytest.mark.parametrize(("cls", "name"), _refused(QUANTIZERS))
def test_what_a_quantizer_may_not_have_is_refused_by_name(cls, name):
    """By ``test_a_quantizer_that_makes_other_bytes_is_refused_by_what_it_does``."""
    assert name in {field for kind, field, *_ in FOREIGN if kind == KIND_OF[cls]}


def test_variables_that_change_the_bytes_of_weights_are_refused_by_name():
    """By ``test_what_is_refused_is_told_by_what_the_user_has_set``."""
    refused = {name for name, effect in VARIABLES.items() if effect == REFUSED}
    assert {variable for _, variable, _ in rules._CHANGED_BYTES} == refused
    assert VARIABLES[rules.FP32_SCALES] == FORMAT


WITHOUT_EFFECT = [
    ("nvfp4", "with_post_rht_amax", True),
    ("nvfp4", "nvfp4_4over6_err_mode", "MSE"),
    ("nvfp4", "rht_matrix_random_sign_mask_t", 1234),
    ("fp8_block", "internal", True),
    ("fp8_block_fp32", "optimize_for_gemm", True),
    ("mxfp8", "optimize_for_gemm", True),
    ("nvfp4", "optimize_for_gemm", True),
]


@pytest.mark.parametrize(("kind", "field", "value"), WITHOUT_EFFECT)
def test_what_changes_no_byte_is_not_refused(kind: str, field: str, value: Any):
    kind = KINDS[kind]
    weight, masters = kind.weight(kind.masters(1)), kind.masters(2)
    setattr(weight._quantizer, field, value)
    requantize(TransformerEngineStorage(weight, kind.format), masters)
    assert_all_hold(weight, masters, kind.format)


LIST = """
import dataclasses, inspect, json, re
import torch  # first: its libraries are those of Transformer Engine
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch import tensor
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

def names_of(cls):
    return [*inspect.signature(cls.__init__).parameters, *cls.__annotations__]

quantizers = {c.__name__: names_of(c) for n, c in vars(te).items() if n.endswith("Quantizer")}
classes = (tensor.Float8BlockwiseQTensor, tensor.MXFP8Tensor, tensor.NVFP4Tensor)
storages = {s for c in classes for s in c.__mro__ if s.__name__.endswith("Storage")}
recipes = {n: c for n, c in vars(recipe).items() if dataclasses.is_dataclass(c)}
print(json.dumps({
    "quantizers": quantizers,
    "variables": re.findall(r"NVTE_\\w+", inspect.getsource(recipe)),
    "weights": {s.__name__: [*s.__annotations__] for s in storages},
    "recipes": {n: [f.name for f in dataclasses.fields(c)] for n, c in recipes.items()},
}))
"""


@pytest.mark.any_device
@pytest.mark.skipif(
    not PATH and import_error() is not None,
    reason="needs Transformer Engine, see TRANSFORMER_ENGINE_PATH",
)
def test_transformer_engine_has_no_property_that_is_not_in_the_table():
    """Names of 2.20.2; an older version may lack some."""
    path = os.pathsep.join([PATH, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", LIST],
        env=dict(os.environ) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    own = QUANTIZERS["Quantizer"].keys() | {"self"}
    for cls, known in QUANTIZERS.items():
        assert {*found["quantizers"][cls]} <= known.keys() | own, cls
    for cls, known in WEIGHTS.items():
        common = {*BUFFERS, *WEIGHTS["QuantizedTensorStorage"]}
        assert {*found["weights"][cls]} <= known.keys() | common, cls
    for cls, known in RECIPES.items():
        assert {*found["recipes"][cls]} <= known.keys() | OF_EVERY_RECIPE.keys(), cls
    assert found["quantizers"].keys() <= QUANTIZERS.keys() | UNMANAGED.keys()
    assert {*found["variables"]} <= VARIABLES.keys()


# Classes around and beside these


class DebugQuantizer:
    """Named as the class it stands for, whose own properties are only the directions."""

    rowwise_usage = columnwise_usage = True

    def __init__(self, parent_quantizer: Any) -> None:
        self.parent_quantizer = parent_quantizer


def wrapped(kind: Kind) -> Any:
    """Return a weight whose quantizer is observed by nvidia-dlfw-inspect."""
    weight = kind.weight(kind.masters(1))
    field = "quantizer" if kind.experts else "_quantizer"
    setattr(weight, field, DebugQuantizer(getattr(weight, field)))
    return weight


@EVERY_KIND
def test_a_quantizer_that_is_wrapped_for_debugging_decides_as_without(kind: Kind):
    weight, masters = wrapped(kind), kind.masters(2)
    assert te_formats_of(weight) == te_formats_of(kind.weight(kind.masters(1)))
    requantize(TransformerEngineStorage(weight, kind.format), masters)
    assert_all_hold(weight, masters, kind.format)


@pytest.mark.parametrize(("kind", "field", "value", "message"), FOREIGN)
def test_what_a_wrapped_quantizer_may_not_have_is_refused_by_name(kind, field, value, message):
    for name in (kind, f"group of {kind}"):
        weight = wrapped(KINDS[name])
        setattr(quantizer_of(weight), field, value)
        with pytest.raises(StateError, match=message):
            TransformerEngineStorage(weight, KINDS[name].format)


def test_per_tensor_scaling_is_seen_through_the_wrapper():
    master = torch.ones(32, 32)
    for quantizer, wanted in ((Float8CurrentScalingQuantizer(), True), (Float8Quantizer(), False)):
        weight = Float8Tensor(master, DebugQuantizer(quantizer))
        assert is_tensorwise(weight) is wanted


UNMANAGED = {
    "Float8Quantizer": "Float8Tensor",
    "HybridQuantizer": "HybridQuantizedTensor",
    "IdentityQuantizer": "IdentityTensor",
}
"""Quantizers of delayed scaling, of another format per direction and of none, and their weights,
which the rule on "quantized weights in no format of this package" refuses by their class."""


@pytest.mark.parametrize("name", UNMANAGED)
def test_weights_of_other_quantizers_are_in_no_format(name: str):
    weight = type(UNMANAGED[name], (), {"_quantizer": type(name, (), {})()})()
    assert not is_quantized(weight)
