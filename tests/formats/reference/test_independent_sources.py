"""The reference held against what others published: torchao, Transformer Engine, NVIDIA ModelOpt.

Where the rules are the same the bytes are; where they are not, the inputs that show it are counted.
torchao is a development dependency; without it these tests fail. The files of the other two are
plain torch, but ModelOpt brings many dependencies and Transformer Engine a CUDA library, without
which its package breaks Megatron's import. So single files are imported past the packages'
``__init__`` where they lie on the path, and skipped where not. For this file alone, on any CPU::

    pip install --no-deps --target DIR transformer-engine==2.20.2 nvidia-modelopt==0.47.0
    PYTHONPATH=DIR python -m pytest tests/formats/reference/test_independent_sources.py
"""

from importlib import import_module

import pytest
import torch

from moe_optim.formats import FP8_BLOCK, MXFP8, MXFP8_2D, NVFP4, NVFP4_ROWS
from moe_optim.formats.reference import quantize
from moe_optim.formats.reference.codes import E2M1_VALUES, decode_e4m3, unpack_nibbles
from moe_optim.formats.reference.scales import encode_scale
from tests.support.bytes import assert_bytes_equal
from tests.support.number_formats.bit_weights import (
    INFINITY,
    amax_sweep,
    bf16,
    every_element,
    random_weights,
    with_random_signs,
)
from tests.support.number_formats.independent_sources import modelopt_tensor, te_recipe

E4M3 = torch.float8_e4m3fn


def torchao_mxfp8(blocks, mode="RCEIL"):
    """Return scale and data codes of blocks [n, length] of any length."""
    to_mx = import_module("torchao.prototype.mx_formats.mx_tensor").to_mx
    modes = import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode
    scale, data = to_mx(blocks, E4M3, blocks.shape[-1], modes[mode])
    return scale.view(torch.uint8).flatten(), data.view(torch.uint8)


def modelopt_mxfp8(blocks):
    """Return scale and data codes of blocks [n, length] of any length."""

    class Blocks(modelopt_tensor("mxfp8_tensor").MXFP8QTensor):
        BLOCK_SIZE = blocks.shape[-1]

    tensor, scale = Blocks.quantize(blocks)
    return scale.flatten(), tensor._quantized_data.view(torch.uint8)


def torchao_nvfp4(weight, format):
    """Return scale codes [E, ...] and [E, R, C] codes; rows of a 2-D block share their amax."""
    nvfp4 = import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    per_expert = nvfp4.per_tensor_amax_to_scale(weight.abs().amax((1, 2), keepdim=True))
    scale, data = nvfp4.nvfp4_quantize(weight, 16, per_expert)
    scale = scale.view(torch.uint8).view(
        len(weight), -1, format.rowwise_block[0], weight.shape[2] // 16
    )
    assert (scale == scale[:, :, :1]).all(), "the rows of a block do not share their amax"
    return scale[:, :, 0], unpack_nibbles(data)


def modelopt_nvfp4(weight, _):
    """Return [E, R/16, C/16] scale codes and [E, R, C] codes, from blocks of 256 elements."""
    quantizer = modelopt_tensor("nvfp4_tensor").NVFP4QTensor
    experts, rows, cols = weight.shape
    scales, codes = [], []
    for blocks in to_blocks(weight, (16, 16)):
        tensor, scale, _ = quantizer.quantize(blocks, 256)
        scales.append(scale.view(torch.uint8).view(rows // 16, cols // 16))
        tiles = unpack_nibbles(tensor._quantized_data).view(rows // 16, cols // 16, 16, 16)
        codes.append(tiles.transpose(1, 2).reshape(rows, cols))
    return torch.stack(scales), torch.stack(codes)


def te_nvfp4(weight, format):
    """Return the buffers of TE's reference by our names, scales repeated for every row."""
    te = te_recipe("reference_nvfp4")
    quantizer = te.NVFP4QuantizerRef(
        te.reference_utils.Fp4Formats.E2M1,
        columnwise=not format.is_row_only,
        quant_tile_shape=format.rowwise_block,
    )
    fields = {
        "rowwise_data": "data",
        "rowwise_scale": "scale",
        "columnwise_data": "data_t",
        "columnwise_scale": "scale_t",
        "global_amax": "global_amax_row",
    }
    experts = [quantizer.quantize(expert) for expert in weight]
    found = {}
    for name in format.buffer_names:
        values = [getattr(expert, fields[name]) for expert in experts]
        amaxes = name == "global_amax"
        found[name] = torch.cat(values) if amaxes else torch.stack(values).view(torch.uint8)
    return found


def to_blocks(buffer, block):
    """Lay out blocks one after another: [E, R, C] -> [E, n, rows * cols of a block]."""
    rows, cols = block
    tiles = buffer.unflatten(2, (-1, cols)).unflatten(1, (-1, rows)).transpose(2, 3)
    return tiles.flatten(3).flatten(1, 2).contiguous()


def scale_ties():
    """Make experts of each mantissa with blocks whose NVFP4 scale is halfway between two codes.

    Returns [128, 16, 256] bf16: a block with the expert's amax, and 15 whose amax is the bf16
    nearest to a tie of E4M3 subnormals, or in the top binade: exactly there for 300 of 2048.
    """
    generator = torch.Generator().manual_seed(0)
    global_amax = bf16(0x3F80 + torch.arange(128)).unsqueeze(1)
    below = torch.cat((torch.arange(7), torch.arange(0x76, 0x7E))).to(torch.uint8)
    ties = (decode_e4m3(below).double() + decode_e4m3(below + 1)) / 2
    amax = torch.cat((global_amax, (global_amax.double() * ties / 448).bfloat16()), 1)
    bits = amax.view(torch.int16).int().repeat_interleave(16, 1).unsqueeze(1)
    smaller = torch.randint(0, 4 << 7, (128, 16, 256), generator=generator)
    smaller[:, 0] = 0
    return with_random_signs(bf16(bits - smaller), generator)


def sharing_amax(weight):
    """Return a copy in which each row of each 16x16 block holds plus or minus its amax."""
    result = weight.clone()
    tiles = result.unflatten(2, (-1, 16)).unflatten(1, (-1, 16))  # a view: [E, R/16, 16, C/16, 16]
    diagonal = tiles.diagonal(dim1=2, dim2=4)
    amax = tiles.abs().amax((2, 4)).unsqueeze(-1)
    diagonal.copy_(torch.where(diagonal < 0, -amax, amax))
    return result


MXFP8_BLOCKS = {  # name -> format, direction
    "rowwise": (MXFP8, "rowwise"),
    "columnwise": (MXFP8, "columnwise"),
    "2-D": (MXFP8_2D, "rowwise"),
}
every_mxfp8_block = pytest.mark.parametrize(
    ("format", "direction"), MXFP8_BLOCKS.values(), ids=MXFP8_BLOCKS.keys()
)


def mxfp8_weights(format, direction):
    """Return weights by name, both of about a million values."""
    block = format.block(direction)
    sweep = amax_sweep((1, 32)) if 1 in block else amax_sweep(block, step=31)
    if direction == "columnwise":
        sweep = sweep.mT.contiguous()
    return {"sweep": sweep, "random": random_weights(120)}


@every_mxfp8_block
@pytest.mark.parametrize("source", [torchao_mxfp8, modelopt_mxfp8])
def test_mxfp8_equals_round_up_of_torchao_and_modelopt(source, format, direction):
    """The scale byte is the same for every bf16 amax up to infinity, and so is all data.

    They divide by 448 and take ceil(log2), we multiply by fl(1/448) and look at the mantissa. Only
    where the scale byte is 0 torchao multiplies by 1 and not by 2^127: the next test.
    """
    block = format.block(direction)
    for name, weight in mxfp8_weights(format, direction).items():
        ours = quantize(weight, format)
        scale, data = source(to_blocks(weight, block).flatten(0, 1))
        assert_bytes_equal(scale, ours.scale(direction).flatten(), what=f"{name} scale")
        kept = slice(None) if source is modelopt_mxfp8 else scale != 0
        our_data = to_blocks(ours.data(direction), block).flatten(0, 1)
        assert_bytes_equal(data[kept], our_data[kept], what=f"{name} data")


def test_fp8_block_equals_the_current_scaling_reference_of_transformer_engine():
    """A 128x128 block is one tensor of TE's current scaling with powers of two, either direction.

    Only an infinite amax, left out here, gives 0 in their reference and 1 in their block kernels.
    """
    te = te_recipe("reference_current_scaling")
    quantizer = te.CurrentScalingQuantizerRef(E4M3, pow_2_scales=True)
    weights = {
        "sweep": amax_sweep((128, 128), step=509)[:, :-128],
        "random": random_weights(120, experts=4, size=512),
    }
    for name, weight in weights.items():
        ours = quantize(weight, FP8_BLOCK)
        blocks = to_blocks(weight, (128, 128)).flatten(0, 1).view(-1, 128, 128)
        theirs = [quantizer.quantize(block) for block in blocks]
        scale = torch.cat([block.scale for block in theirs])
        assert_bytes_equal(scale, ours.rowwise_scale.flatten(), what=f"{name} scale")
        data = torch.stack([block.data for block in theirs]).view(torch.uint8).flatten(1)
        our_data = to_blocks(ours.rowwise_data, (128, 128)).flatten(0, 1)
        assert_bytes_equal(data, our_data, what=f"{name} data")
        assert all(torch.equal(block.data_t, block.data.t()) for block in theirs)
        assert all(torch.equal(block.scale_t, block.scale) for block in theirs)


def test_fp8_block_scale_of_every_amax_equals_transformer_engine():
    """TE's reference has our factor for every finite bf16 amax, zero and subnormals included."""
    scale_of = te_recipe("reference_current_scaling")._scale_from_amax_tensor
    amax = bf16(torch.arange(INFINITY + 1)).float()
    theirs, _, _ = scale_of(torch.bfloat16, amax, E4M3, eps=0.0, pow_2_scales=True)
    assert_bytes_equal(theirs[:-1], encode_scale(amax[:-1], FP8_BLOCK))
    assert theirs[-1] == 0 and encode_scale(amax, FP8_BLOCK)[-1] == 1


NVFP4_WEIGHTS = {
    "random": lambda _: random_weights(12),
    "most blocks far below their expert": lambda _: random_weights(120),
    "scales at ties": lambda _: scale_ties(),
    "every seventh amax": lambda block: amax_sweep(block, step=7, experts=16),
    "every element": lambda _: every_element(6.0),
    "zero": lambda _: torch.zeros(2, 32, 48, dtype=torch.bfloat16),
}
every_nvfp4 = pytest.mark.parametrize("format", [NVFP4, NVFP4_ROWS], ids=lambda one: one.name)


@every_nvfp4
@pytest.mark.parametrize("weights", NVFP4_WEIGHTS.values(), ids=NVFP4_WEIGHTS.keys())
def test_nvfp4_equals_the_reference_of_transformer_engine(weights, format):
    """All buffers are those of NVFP4QuantizerRef with the same tiles, for all but NaN and -0.0.

    They quantize the transpose from scratch, and we move nibbles. The rules agree to the order of
    multiplications, and amaxes go from zero by way of subnormals to infinity.
    """
    weight = weights(format.rowwise_block)
    ours, theirs = quantize(weight, format), te_nvfp4(weight, format)
    for name, buffer in ours.buffers().items():
        if name.endswith("scale"):
            buffer = buffer.repeat_interleave(format.rowwise_block[0], 1)
        assert_bytes_equal(theirs[name], buffer, what=name)


both_nvfp4 = pytest.mark.parametrize("source", [torchao_nvfp4, modelopt_nvfp4])


@both_nvfp4
def test_nvfp4_rounds_every_element_like_torchao_and_modelopt(source):
    """Where all factors are 1, for an expert's amax of 2688 and blocks of 6, only rounding is left.

    All 33153 bf16 values from -6 to 6, without -0.0, which ModelOpt takes for 0.
    """
    weight = every_element(6.0)
    weight = torch.cat((weight, torch.full_like(weight[:, :16], 2688.0)), 1)
    ours = quantize(weight, NVFP4)
    scale, codes = source(weight, NVFP4)
    assert_bytes_equal(scale, ours.rowwise_scale, what="scale")
    assert_bytes_equal(codes, unpack_nibbles(ours.rowwise_data), what="codes")


def spread(scales, format):
    """Return one of the scales [E, ...] for each element."""
    rows, cols = format.rowwise_block
    return scales.repeat_interleave(rows, 1).repeat_interleave(cols, 2)


@every_nvfp4
@pytest.mark.parametrize("exponent", [-60, 0, 60])
def test_nvfp4_equals_torchao_where_the_global_scale_is_a_power_of_two(exponent, format):
    """With an expert's amax of 2688 times a power of two the order of multiplications is nothing.

    A million values, whose scales are at least the 2^-6 below which torchao has none.
    """
    weight = random_weights(6)
    weight = sharing_amax(weight) if format.is_2d else weight
    weight[:, :16, :16] = 2688.0
    weight *= 2.0**exponent
    ours = quantize(weight, format)
    scale, codes = torchao_nvfp4(weight, format)
    kept = ours.rowwise_scale >= 0x08
    assert kept.all() if format.is_2d else kept.float().mean() > 0.9
    assert_bytes_equal(scale[kept], ours.rowwise_scale[kept], what="scale")
    kept = spread(kept, format)
    assert_bytes_equal(codes[kept], unpack_nibbles(ours.rowwise_data)[kept], what="codes")


FAR_BELOW = "most blocks far below their expert"
NVFP4_TIES = {  # -> source, its smallest scale code, format, weights, differing scales and codes
    "torchao": (torchao_nvfp4, 0x08, NVFP4, "random", 9, 60),
    "torchao, far below": (torchao_nvfp4, 0x08, NVFP4, FAR_BELOW, 0, 13),
    "torchao, scales at ties": (torchao_nvfp4, 0x08, NVFP4, "scales at ties", 24, 93),
    "torchao, rows": (torchao_nvfp4, 0x08, NVFP4_ROWS, "random", 53, 91),
    "ModelOpt": (modelopt_nvfp4, 0x01, NVFP4, "random", 9, 179),
    "ModelOpt, far below": (modelopt_nvfp4, 0x01, NVFP4, FAR_BELOW, 0, 30),
    "ModelOpt, scales at ties": (modelopt_nvfp4, 0x01, NVFP4, "scales at ties", 69, 183),
}


@pytest.mark.parametrize(
    ("source", "floor", "format", "weights", "scales", "elements"),
    NVFP4_TIES.values(),
    ids=NVFP4_TIES.keys(),
)
def test_nvfp4_differs_from_torchao_and_modelopt_at_ties_only(
    source, floor, format, weights, scales, elements
):
    """They divide by 6 where TE and we multiply by fl(1/6): a tie may go to the other side.

    Let G be the amax of an expert, A the amax of a block and s its scale. With g = fl(G / 2688)
    torchao has (A / 6) / g and w * ((1 / g) / s), ModelOpt A / (6 * g) and w / (s * g); we with
    S = fl(2688 / G) have A * (S * fl(1/6)) and w * (1 / (s * (1 / S))). Scales and elements that
    differ lie exactly halfway between two codes before rounding, and go to one each. Besides,
    torchao raises scales to 2^-6 and ModelOpt to 2^-9 at least; the elements of such blocks are
    not compared.
    """
    weight = NVFP4_WEIGHTS[weights](format.rowwise_block)
    weight = sharing_amax(weight) if format.is_2d else weight
    q = quantize(weight, format)
    ours = unpack_nibbles(q.rowwise_data)
    scale, codes = source(weight, format)
    amax = to_blocks(weight, format.rowwise_block).abs().amax(2).view(scale.shape).double()
    global_amax = q.global_amax.double().view(-1, 1, 1)

    limited = q.rowwise_scale.clamp(min=floor)
    off = scale != limited
    middle = (decode_e4m3(scale).double() + decode_e4m3(limited)) / 2
    assert off.sum() == scales
    assert ((scale.int() - limited)[off].abs() == 1).all()
    assert torch.equal((amax * 448)[off], (middle * global_amax)[off])

    off = (codes != ours) & spread(scale == q.rowwise_scale, format)
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    middle = (values[codes.int() & 7] + values[ours.int() & 7]) / 2
    decoded = spread(decode_e4m3(scale).double(), format)
    assert off.sum() == elements
    assert ((codes.int() - ours)[off].abs() == 1).all()
    assert torch.equal((weight.abs().double() * 2688)[off], (middle * decoded * global_amax)[off])
