"""The rules whose errors a document compares are those of the packages it names."""

from importlib import import_module

import pytest
import torch

from moe_optim.formats import INT4, MXFP4
from moe_optim.formats.reference import dequantize_bf16, quantize
from moe_optim.formats.reference.codes import unpack_nibbles
from tests.support.bytes import assert_bytes_equal
from tools.documents import scale_rules

MXFP4_RULES = [rule for rule in scale_rules.RULES if rule.format == "mxfp4"]
UP, EVEN, FLOOR, CEIL = MXFP4_RULES
WEIGHT = scale_rules.weights()[1]
"""The heavy-tailed blocks [n, 32], bf16 values in fp32."""


@pytest.mark.parametrize(
    ("format", "rule"), [(MXFP4, UP.quantize), (INT4, scale_rules.int4_of_seven)]
)
def test_the_first_rule_of_a_format_is_the_reference(format, rule):
    q = quantize(WEIGHT.unsqueeze(0), format)
    scale, codes, values = rule(WEIGHT)
    ours = q.rowwise_scale[0]
    ours = torch.exp2(ours.float() - 127) if format is MXFP4 else ours.float()
    assert_bytes_equal(scale, ours, what="scale")
    assert_bytes_equal(codes, unpack_nibbles(q.rowwise_data[0]), what="codes")
    expected = dequantize_bf16(q.rowwise_data, q.rowwise_scale, format)[0].float()
    assert_bytes_equal(values, expected, what="values")


@pytest.mark.parametrize(
    ("mode", "rule"), [("RCEIL", UP), ("EVEN", EVEN), ("FLOOR", FLOOR), ("CEIL", CEIL)]
)
def test_rules_of_mxfp4_are_the_modes_of_torchao(mode, rule):
    to_mx = import_module("torchao.prototype.mx_formats.mx_tensor").to_mx
    modes = import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode
    theirs, data = to_mx(WEIGHT, torch.float4_e2m1fn_x2, 32, modes[mode])
    scale, codes, _ = rule.quantize(WEIGHT)
    assert_bytes_equal(theirs.float(), scale, what="scale")
    assert_bytes_equal(unpack_nibbles(data.view(torch.uint8)), codes, what="codes")


def own_scale(**arguments):
    """Return the scales [n, 1] that compressed-tensors finds for bf16 weights."""
    quantization = import_module("compressed_tensors.quantization")
    args = quantization.QuantizationArgs(
        strategy="group", group_size=32, symmetric=True, num_bits=4, **arguments
    )
    amax = WEIGHT.bfloat16().abs().amax(1, keepdim=True)
    calculate = import_module("compressed_tensors.quantization.utils.helpers").calculate_qparams
    return calculate(-amax, amax, args)[0].float()


def test_compressed_tensors_rounds_mxfp4_scales_to_even_and_takes_int4_scales_from_15_codes():
    theirs = own_scale(type="float", scale_dtype=torch.uint8, zp_dtype=torch.uint8)
    assert_bytes_equal(theirs, EVEN.quantize(WEIGHT).scale)
    theirs = own_scale(type="int")
    assert_bytes_equal(theirs, scale_rules.int4_of_half_the_range(WEIGHT).scale)
