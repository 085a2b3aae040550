"""Writes what other packages make of a few weights, for tests that need none of them.

    python -m tools.upstream.golden_bytes FOLDER

FOLDER holds unpacked wheels, as of ``pip install --no-deps --target FOLDER``: nvidia-modelopt
0.47.0, tile-kernels 2.1.0, transformer-engine-cu12 2.20.2 and vllm 0.33.0, which carries gpt-oss's
triton_kernels; and checkouts: ``Megatron-Bridge`` of NVIDIA-NeMo at 067f987d, ``Megatron-LM`` of
radixark at 2e64d788 and ``slime`` of THUDM at 624b824a. All code is plain torch and runs on a CPU;
functions are taken out of their files, past everything else that the packages import.
"""

import __future__

import argparse
import ast
import json
import math
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

GOLDEN = Path(__file__).parents[2] / "tests" / "support" / "number_formats" / "golden"
COMMAND = "python -m tools.upstream.golden_bytes FOLDER"
Buffers = dict[str, Tensor]


def take(path: Path, names: Iterable[str], **given: Any) -> SimpleNamespace:
    """Return classes, functions and constants of a file, compiled with ``given`` as globals."""

    def name(node: ast.AST) -> str | None:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            return node.targets[0].id
        return getattr(node, "name", None)

    wanted = set(names)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if name(node) in wanted]
    body = [node for node in nodes if isinstance(node, ast.stmt)]
    scope = {"torch": torch, "F": functional, "Enum": Enum, **given}
    without_types = __future__.annotations.compiler_flag
    exec(compile(ast.Module(body, []), str(path), "exec", flags=without_types), scope)
    return SimpleNamespace(**{one: scope[one] for one in wanted})


# Sources: weights [R, C] in, buffers by our names out


def modelopt(folder: Path) -> Callable[[Tensor], Buffers]:
    class Base:
        def __init__(self, _shape: Any, _dtype: Any, data: Tensor) -> None:
            self.data = data

    path = folder / "modelopt/torch/quantization/qtensor/mxfp4_tensor.py"
    quantizer = take(path, ["MXFP4QTensor"], BaseQuantizedTensor=Base).MXFP4QTensor

    def quantize(weight: Tensor) -> Buffers:
        tensor, scale = quantizer.quantize(weight, 32)
        return {"scale": scale.view(len(weight), -1), "data": tensor.data}

    return quantize


def triton_kernels(folder: Path, dtype: torch.dtype) -> Callable[[Tensor], Buffers]:
    path = folder / "vllm/third_party/triton_kernels/numerics_details/mxfp.py"
    names = ["DequantScaleRoundingMode", "right_shift_unsigned", "get_max_quant_val"]
    triton = SimpleNamespace(cdiv=lambda a, b: -(-a // b))
    names.append("downcast_to_mxfp_torch")
    source = take(path, names, triton=triton, MXFP_BLOCK_SIZE=32)

    def quantize(weight: Tensor) -> Buffers:
        data, scale = source.downcast_to_mxfp_torch(weight, dtype, -1)
        return {"scale": scale, "data": data.view(torch.uint8)}

    return quantize


def tile_kernels(folder: Path, element: str) -> Callable[[Tensor], Buffers]:
    smallest = {"e2m1": 6 * 2.0**-126, "e4m3": 1e-4}  # _DEFAULT_CLAMP_MIN_VALUES of its config.py
    source = take(
        folder / "tile_kernels/torch/cast.py",
        ["get_max_quant_val", "cast", "convert_to_e2m1_bits"],
        get_amax_clamp_for_quant=lambda element, _: smallest[element],
        is_ascend=lambda: False,
        align=lambda value, unit: -(-value // unit) * unit,
        get_packed_ue8m0_pack_factor=lambda: 4,
    )

    def quantize(weight: Tensor) -> Buffers:
        data, scale = source.cast(weight, element, (1, 32), round_sf=True)
        exponent = scale.contiguous().view(torch.int32) >> 23
        return {"scale": exponent.to(torch.uint8), "data": data.view(torch.uint8)}

    return quantize


def bridge(folder: Path) -> SimpleNamespace:
    path = folder / "Megatron-Bridge/src/megatron/bridge/models/conversion/quantization_utils.py"
    names = ["quantize_mxfp4_e2m1_like_scale", "quantize_to_int4", "MXFP4_BLOCK_SIZE"]
    return take(path, [*names, "FP4_E2M1_MAX"])


def bridge_mxfp4(folder: Path) -> Callable[[Tensor], Buffers]:
    def quantize(weight: Tensor) -> Buffers:
        like = torch.empty(len(weight), weight.shape[1] // 32, dtype=torch.uint8)
        data, scale = bridge(folder).quantize_mxfp4_e2m1_like_scale(weight, like)
        return {"scale": scale, "data": data.view(torch.uint8)}

    return quantize


def bridge_int4(folder: Path) -> Callable[[Tensor], Buffers]:
    def quantize(weight: Tensor) -> Buffers:
        packed, scale, _ = bridge(folder).quantize_to_int4(weight, 32)
        return {"scale": scale, "data": packed.view(torch.uint8)}

    return quantize


def slime_int4(folder: Path) -> Callable[[Tensor], Buffers]:
    """Export of slime and miles: their kernel needs a GPU, so its two lines are repeated here."""

    def kernel(weight: Tensor, block: tuple[int, int], _: bool) -> tuple[Tensor, Tensor, Tensor]:
        blocks = weight.float().view(len(weight), -1, block[1])
        scale = (blocks.abs().amax(2, keepdim=True) * torch.tensor(1 / 7)).clamp(min=1e-5)
        data, scale = ((blocks / scale).round().bfloat16(), scale.bfloat16())
        return data.view_as(weight), scale.squeeze(2), torch.zeros_like(scale)

    processors = folder / "slime/slime/backends/megatron_utils/megatron_to_hf/processors"
    source = take(
        processors / "quantizer_compressed_tensors.py",
        ["pack_layer", "pack_to_int32", "quantize", "round_to_quantized_type_dtype"],
        math=math,
        fake_int4_quant_cuda=SimpleNamespace(fake_int4_quant_cuda=kernel),
    )

    def quantize(weight: Tensor) -> Buffers:
        packed, scale, _ = source.pack_layer(weight, 32)
        return {"scale": scale, "data": packed.view(torch.uint8)}

    return quantize


def fake_int4(folder: Path) -> Callable[[Tensor], Buffers]:
    path = folder / "Megatron-LM/megatron/core/extensions/transformer_engine.py"
    source = take(path, ["ceil_div", "_FakeInt4QuantizationSTE"])

    def quantize(weight: Tensor) -> Buffers:
        return {"values": source._FakeInt4QuantizationSTE.apply(weight, 32)}

    return quantize


class _Quantizer:
    """Base class of Transformer Engine's reference quantizers, as far as they use it."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


_GEMM = SimpleNamespace(GEMMType=SimpleNamespace(FPROP=None))  # a default argument
TE_RECIPES = "transformer_engine/pytorch/custom_recipes"


def te_nvfp4(folder: Path) -> Callable[[Tensor], Buffers]:
    path = folder / TE_RECIPES / "reference_nvfp4.py"
    names = ["NVFP4QuantizerRef", "cast_to_fp4x2"]
    source = take(path, names, Quantizer=_Quantizer, gemm=_GEMM)
    quantizer = source.NVFP4QuantizerRef(None, columnwise=False, quant_tile_shape=(1, 16))

    def quantize(weight: Tensor) -> Buffers:
        data, scale, _, _, amax, _ = quantizer._quantize(weight)
        return {"scale": scale.view(torch.uint8), "data": data, "global_amax": amax}

    return quantize


def te_fp32_scales(folder: Path) -> Callable[[Tensor], Buffers]:
    path = folder / TE_RECIPES / "reference_current_scaling.py"
    names = ["CurrentScalingQuantizerRef", "_scale_from_amax_tensor"]
    source = take(path, names, Quantizer=_Quantizer, gemm=_GEMM)
    quantizer = source.CurrentScalingQuantizerRef(torch.float8_e4m3fn, columnwise=False)

    def quantize(weight: Tensor) -> Buffers:
        blocks = [quantizer._quantize(block) for block in weight.view(-1, BLOCK_ROWS, 32)]
        data = torch.cat([data for data, *_ in blocks]).view(torch.uint8)
        return {"scale": torch.cat([scale for _, scale, *_ in blocks]).view(-1, 1), "data": data}

    return quantize


# Weights


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def random_rows(amaxes: Tensor, cols: int, binades: int, seed: int) -> Tensor:
    """Return rows of random bits below the given amaxes, [n] bf16, one element being the amax."""
    generator = torch.Generator().manual_seed(seed)
    bits = amaxes.view(torch.int16).long().unsqueeze(1)
    shape = (len(amaxes), cols)
    below = torch.randint(0, binades << 7, shape, generator=generator)
    below[torch.arange(len(amaxes)), torch.arange(len(amaxes)) % cols] = 0
    magnitude = from_bits((bits - below).clamp(min=0))
    negative = torch.randint(0, 2, shape, generator=generator).bool()
    return torch.where(negative, -magnitude, magnitude)


def neighbours(amax: float) -> Tensor:
    """Return a bf16 value between those next to it."""
    bits = torch.tensor(amax).bfloat16().view(torch.int16).long()
    return from_bits(bits + torch.tensor([-1, 0, 1]))


def padded(values: list[float], amax: float, cols: int) -> Tensor:
    row = [amax, *values, *(-value for value in values)]
    return torch.tensor(row + [0.0, -0.0] * cols)[:cols].bfloat16()


def weight_of_powers(largest: float, ties: list[float]) -> Tensor:
    """Return [n, 32]: blocks around amaxes of a scale's edge, of ties, random ones, zeros, tiny."""
    edges = [neighbours(edge * 2.0**power) for edge in (largest, 7.0, 4.0) for power in (-80, 0, 9)]
    exact = [padded(ties, largest, 32) * 2.0**power for power in (-100, 0, 100)]
    generator = torch.Generator().manual_seed(1)
    amaxes = from_bits(torch.randint(90 << 7, 160 << 7, (8,), generator=generator))
    ends = torch.tensor([2.0**-133, 6 * 2.0**-127, 6 * 2.0**-126, 3.3895313892515355e38])
    rows = [random_rows(torch.cat([*edges, amaxes]), 32, 6, 2), torch.stack(exact)]
    return torch.cat([*rows, random_rows(ends.bfloat16(), 32, 2, 3), torch.zeros(1, 32)]).bfloat16()


def weight_of_integers() -> Tensor:
    """Return [n, 32]: blocks of amax 7 * j * 2^k and all ties of INT4, random ones, zeros."""
    ties = [code + 0.5 for code in range(7)]
    exact = [padded(ties, 7.0, 32) * (j * 2.0**-12) for j in range(16, 37)]
    generator = torch.Generator().manual_seed(4)
    amaxes = from_bits(torch.randint(118 << 7, 124 << 7, (16,), generator=generator))
    ends = torch.tensor([2.0**-133, 2.0**-20, 7e-5, 1e30]).bfloat16()
    rows = [random_rows(torch.cat([amaxes, ends]), 32, 5, 5), torch.zeros(1, 32)]
    return torch.cat([torch.stack(exact), *rows]).bfloat16()


def random_weight(rows: int, cols: int, binades: int) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    bits = torch.randint(116 << 7, 124 << 7, (rows * cols // 16,), generator=generator)
    return random_rows(from_bits(bits), 16, binades, 7).view(rows, cols)


BLOCK_ROWS = 4
"""Rows of a block in the weight for FP8 blocks, which may be smaller than 128."""


def weight_of_blocks() -> Tensor:
    """Return [n * BLOCK_ROWS, 32], each so many rows a block of its own."""
    generator = torch.Generator().manual_seed(8)
    amaxes = from_bits(torch.randint(20 << 7, 250 << 7, (9,), generator=generator))
    ends = torch.tensor([448.0, 1.0, 0.02]).bfloat16()
    rows = random_rows(torch.cat([amaxes, ends]).repeat_interleave(BLOCK_ROWS), 32, 12, 9)
    return torch.cat([rows, torch.zeros(BLOCK_ROWS, 32).bfloat16()])


E2M1_TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
E4M3_TIES = [2.0**-10, 3 * 2.0**-10, 2.0**-6 + 2.0**-10, 17.0, 19.0, 232.0, 432.0]


def goldens(folder: Path) -> Iterator[tuple[str, Tensor, dict[str, Buffers]]]:
    """Yield the name of a format, a weight [R, C] and buffers by the name of a source."""
    sources = {
        "NVIDIA ModelOpt 0.47.0": modelopt(folder),
        "gpt-oss triton_kernels of vLLM 0.33.0": triton_kernels(folder, torch.uint8),
        "DeepSeek tile-kernels 2.1.0": tile_kernels(folder, "e2m1"),
        "Megatron-Bridge 067f987d": bridge_mxfp4(folder),
    }
    yield run("mxfp4", weight_of_powers(6.0, E2M1_TIES), sources)
    sources = {
        "gpt-oss triton_kernels of vLLM 0.33.0": triton_kernels(folder, torch.float8_e4m3fn),
        "DeepSeek tile-kernels 2.1.0": tile_kernels(folder, "e4m3"),
    }
    yield run("mxfp8_rows", weight_of_powers(448.0, E4M3_TIES), sources)
    sources = {"Transformer Engine 2.20.2": te_nvfp4(folder)}
    yield run("nvfp4_rows", random_weight(16, 64, 7), sources)
    sources = {
        "slime 624b824a": slime_int4(folder),
        "Megatron-Bridge 067f987d": bridge_int4(folder),
        "radixark's Megatron-LM 2e64d788": fake_int4(folder),
    }
    yield run("int4", weight_of_integers(), sources)
    sources = {"Transformer Engine 2.20.2": te_fp32_scales(folder)}
    yield run("fp8_block_fp32", weight_of_blocks(), sources)


def run(
    format: str, weight: Tensor, sources: dict[str, Callable[[Tensor], Buffers]]
) -> tuple[str, Tensor, dict[str, Buffers]]:
    return format, weight, {name: source(weight.clone()) for name, source in sources.items()}


def in_hex(buffer: Tensor) -> list[str]:
    """Return the little-endian bytes of each row."""
    rows = buffer.detach().contiguous().view(torch.uint8).view(len(buffer), -1)
    return [bytes(row.tolist()).hex() for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path, help="unpacked wheels and checkouts, as the file says")
    for format, weight, sources in goldens(parser.parse_args().folder):
        hexes = {
            name: {field: in_hex(buffer) for field, buffer in buffers.items()}
            for name, buffers in sources.items()
        }
        report = {"command": COMMAND, "weight": in_hex(weight), "sources": hexes}
        path = GOLDEN / f"{format}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
