"""Row-only formats and fp32 scales held against the packages that define or read them.

torchao, compressed-tensors and transformers are development dependencies; without them these tests
fail. How Transformer Engine is found is in ``test_independent_sources.py``. What needs packages
that are not installed is in ``test_golden_bytes.py``.
"""

from functools import cache
from importlib import import_module

import numpy as np
import pytest
import torch

from moe_optim.formats import (
    FP8_BLOCK_FP32,
    INT4,
    INT4_G128,
    MXFP4,
    MXFP8,
    MXFP8_ROWS,
    NVFP4_ROWS,
    QuantizedWeight,
)
from moe_optim.formats.reference import dequantize, dequantize_bf16, quantize
from moe_optim.formats.reference.codes import (
    pack_nibbles,
    unpack_nibbles,
)
from moe_optim.formats.reference.scales import encode_scale
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import with_specials
from tests.support.number_formats import float32_oracle
from tests.support.number_formats.bit_weights import (
    INFINITY,
    amax_sweep,
    bf16,
    every_element,
    random_weights,
)
from tests.support.number_formats.independent_sources import te_recipe

ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.float4_e2m1fn_x2}
WEIGHTS = {
    "every amax": cache(lambda: amax_sweep((1, 32))),
    "random": cache(lambda: random_weights(120, experts=4)),
    "every element": lambda: torch.nn.functional.pad(every_element(6.0), (0, 16)),
}
every_weight = pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())


def torchao_mx(weight, format, mode="RCEIL"):
    """Return scale bytes [E, R, C/32] and one code per byte [E, R, C]."""
    to_mx = import_module("torchao.prototype.mx_formats.mx_tensor").to_mx
    modes = import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode
    scale, data = to_mx(weight, ELEMENTS[format.element], 32, modes[mode])
    return scale.view(torch.uint8), codes_of(data.view(torch.uint8), format)


def codes_of(data, format):
    return unpack_nibbles(data) if format.elements_per_byte == 2 else data


def compressed_tensors(name, **arguments):
    """Return the compressor of that name and its scheme."""
    quantization = import_module("compressed_tensors.quantization")
    args = quantization.QuantizationArgs(symmetric=True, **arguments)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    compressors = import_module("compressed_tensors.compressors").BaseCompressor
    return compressors.get_value_from_registry(name), scheme


# MXFP8 and MXFP4


@every_weight
def test_mxfp8_rows_is_the_rowwise_half_of_mxfp8(weights):
    """And so with zeros of either sign, infinities and NaN among the elements."""
    weight = with_specials(weights())
    rows, both = quantize(weight, MXFP8_ROWS), quantize(weight, MXFP8)
    assert_bytes_equal(rows.rowwise_data, both.rowwise_data)
    assert_bytes_equal(rows.rowwise_scale, both.rowwise_scale)


@every_weight
@pytest.mark.parametrize("format", [MXFP8_ROWS, MXFP4], ids=lambda one: one.name)
def test_powers_of_two_equal_round_up_of_torchao(format, weights):
    """The scale byte is the same for every bf16 amax up to infinity, and so is all data.

    Only where the scale byte is 0 torchao multiplies by 1 and not by 2^127.
    """
    weight = weights()
    ours = quantize(weight, format)
    scale, codes = torchao_mx(weight, format)
    assert_bytes_equal(scale, ours.rowwise_scale, what="scale")
    kept = (scale != 0).repeat_interleave(32, 2)
    assert_bytes_equal(codes[kept], codes_of(ours.rowwise_data, format)[kept], what="codes")


def every_mxfp4_byte():
    """Make [1, 255, 16] data and [1, 255, 1] scales: each code with each scale but NaN."""
    codes = torch.arange(32).remainder(16).to(torch.uint8)
    scale = torch.arange(255).to(torch.uint8).view(1, -1, 1)
    return pack_nibbles(codes.repeat(255, 1)).unsqueeze(0), scale


def test_mxfp4_values_are_those_of_compressed_tensors():
    data, scale = every_mxfp4_byte()
    settings = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    settings |= {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
    compressor, scheme = compressed_tensors("mxfp4-pack-quantized", **settings)
    tensors = {"weight_packed": data[0], "weight_scale": scale[0]}
    theirs = compressor.decompress(tensors, scheme)["weight"]
    assert_bytes_equal(theirs, dequantize_bf16(data, scale, MXFP4)[0])


def test_mxfp4_values_are_those_of_gpt_oss_in_transformers():
    """It gives the transpose: its experts are [in, out], its blocks and scales [out, in]."""
    data, scale = every_mxfp4_byte()
    convert = import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors
    theirs = convert(data.view(1, 255, 1, 16), scale)
    assert_bytes_equal(theirs.mT.contiguous(), dequantize_bf16(data, scale, MXFP4))
    exact = dequantize(QuantizedWeight.of_buffers(MXFP4, (1, 255, 32), (data, scale)))
    assert_bytes_equal(theirs.mT.contiguous(), exact.bfloat16())


# NVFP4


def test_nvfp4_rows_values_are_those_of_compressed_tensors_where_its_global_scale_is_exact():
    """It divides scales by 2688 / amax, which is a power of two here, and multiplies codes."""
    weight = random_weights(12, experts=1)
    weight[0, 0, 0] = 2688.0
    q = quantize(weight, NVFP4_ROWS)
    settings = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    compressor, scheme = compressed_tensors(
        "nvfp4-pack-quantized", scale_dtype=torch.float8_e4m3fn, **settings
    )
    tensors = {
        "weight_packed": q.rowwise_data[0],
        "weight_scale": q.rowwise_scale[0].view(torch.float8_e4m3fn),
        "weight_global_scale": 2688 / q.global_amax,
    }
    theirs = compressor.decompress(tensors, scheme)["weight"]
    assert_bytes_equal(theirs.bfloat16(), dequantize(q)[0].bfloat16())


# INT4


WEIGHTS_OF_INT4 = {**WEIGHTS, "uniform": lambda: uniform_weights()}
both_int4 = pytest.mark.parametrize("format", [INT4, INT4_G128], ids=lambda one: one.name)


@cache
def uniform_weights():
    """Make [1, 2048, 128] bf16 of all INT4 codes, about equally often, with scales around 0.01."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-255, 256, (2048, 128), generator=generator)
    steps = torch.randint(128, 256, (2048, 1), generator=generator)
    return (values * steps / 2**20).bfloat16().unsqueeze(0)


@both_int4
@pytest.mark.parametrize("weights", WEIGHTS_OF_INT4.values(), ids=WEIGHTS_OF_INT4.keys())
def test_int4_equals_the_exporter_of_slime_and_miles(format, weights):
    """Scales are rounded to bf16 after codes were computed with the fp32 scale."""
    length = format.block_length
    weight = weights().reshape(-1, 32)
    weight = weight[~weight.isinf().any(1)]
    weight = weight[: len(weight) * 32 // length * length // 32].view(1, -1, length)
    ours = quantize(weight, format)
    scale, codes = float32_oracle.int4(weight.float().numpy(), length)
    stored = torch.from_numpy(float32_oracle.to_bf16(scale)).bfloat16()
    assert_bytes_equal(ours.rowwise_scale.flatten(), stored, what="scale")
    assert np.abs(codes).max() == 7
    nibbles = torch.from_numpy(codes + 8).to(torch.uint8).view(weight.shape)
    assert_bytes_equal(unpack_nibbles(ours.rowwise_data), nibbles, what="codes")


def test_int4_survives_the_second_rounding_of_slime_and_miles():
    """They multiply the code by the bf16 scale and divide again, in bf16, before they pack it."""
    scale = bf16(torch.arange(int(torch.tensor(1e-5).bfloat16().view(torch.int16)), INFINITY))
    scale = scale[scale < 2.0**125].unsqueeze(1)
    codes = torch.arange(-8, 8).bfloat16()
    assert torch.equal(((codes * scale) / scale).round(), codes.expand(len(scale), 16))


def pack_quantized(group_size=32):
    settings = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
    return compressed_tensors("pack-quantized", **settings)


def test_int4_values_are_those_of_compressed_tensors():
    """Every code with every scale from zero to the largest finite one: the bytes are int32."""
    scale = bf16(torch.arange(INFINITY)).view(1, -1, 1)
    codes = torch.arange(32).remainder(16).to(torch.uint8)
    data = pack_nibbles(codes.repeat(INFINITY, 1)).unsqueeze(0)
    compressor, scheme = pack_quantized()
    tensors = {"weight_packed": data[0].view(torch.int32), "weight_scale": scale[0]}
    tensors["weight_shape"] = torch.tensor([INFINITY, 32])
    theirs = compressor.decompress(tensors, scheme)["weight"]
    assert_bytes_equal(theirs, dequantize_bf16(data, scale, INT4)[0])
    exact = dequantize(QuantizedWeight.of_buffers(INT4, (1, INFINITY, 32), (data, scale)))
    assert_bytes_equal(theirs, exact[0].bfloat16())


@both_int4
def test_compressed_tensors_finds_other_codes_since_it_divides_in_bf16(format):
    """Given our scales it rounds the quotient to bf16 before it rounds it to an integer.

    Its kernels on GPUs keep the quotient in fp32. They still divide by the rounded scale, where we
    divide by the scale before that, and so differ less often.
    """
    weight = uniform_weights()[0]
    q = quantize(weight.unsqueeze(0), format)
    ours = unpack_nibbles(q.rowwise_data)[0].int() - 8
    compressor, scheme = pack_quantized(format.block_length)
    tensors = {"weight": weight, "weight_scale": q.rowwise_scale[0]}
    packed = compressor.compress(tensors, scheme)["weight_packed"]
    theirs = unpack_nibbles(packed.view(torch.uint8)).int() - 8

    scale = q.rowwise_scale[0].float().repeat_interleave(format.block_length, 1)
    quotient = (weight.float() / scale).numpy()
    in_bf16 = torch.from_numpy(np.rint(float32_oracle.to_bf16(quotient))).int()
    in_fp32 = torch.from_numpy(np.rint(quotient)).int()
    assert torch.equal(theirs, in_bf16.clamp(-8, 7))
    assert ((theirs - ours).abs() <= 1).all()
    assert 0 < (in_fp32 != ours).sum() < (theirs != ours).sum() < 0.02 * ours.numel()


# FP8 blocks with fp32 scales


def test_fp32_block_scale_of_every_amax_equals_transformer_engine():
    """Down to subnormals, whose factor is the largest bf16 value, as in TE's quantizers."""
    scale_of = te_recipe("reference_current_scaling")._scale_from_amax_tensor
    amax = bf16(torch.arange(INFINITY)).float()
    e4m3 = torch.float8_e4m3fn
    theirs, inverse, _ = scale_of(torch.bfloat16, amax, e4m3, eps=0.0, pow_2_scales=False)
    ours = encode_scale(amax, FP8_BLOCK_FP32)
    assert_bytes_equal(theirs, ours)
    assert_bytes_equal(inverse, ours.reciprocal())
