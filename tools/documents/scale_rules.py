"""How much rules for scales differ that others have: a table of MXFP4 and INT4."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_optim.formats.reference.codes import (
    E2M1_VALUES,
    encode_e2m1,
    encode_int4,
)
from tools.documents.code_tables import table

BLOCK = 32
SHAPE = (2**14, BLOCK)


class Quantized(NamedTuple):
    """Blocks [n, 32] by one rule."""

    scale: Tensor
    """Stored scales, [n, 1] fp32."""
    codes: Tensor
    """Codes, [n, 32] uint8."""
    values: Tensor
    """Dequantized values, [n, 32] fp32."""


class Rule(NamedTuple):
    format: str
    scale: str
    used_by: str
    quantize: Callable[[Tensor], Quantized]


def mxfp4(up_from: float, *, included: bool = False) -> Callable[[Tensor], Quantized]:
    """Return the rule that doubles OCP's scale where amax = f * 2^k, f < 2, has f above a limit."""

    def quantize(weight: Tensor) -> Quantized:
        fraction, exponent = torch.frexp(weight.abs().amax(1, keepdim=True))
        is_up = 2 * fraction >= up_from if included else 2 * fraction > up_from
        scale = torch.exp2((exponent - 3 + is_up.int()).float())  # 2^(k - 2), or twice that
        codes = encode_e2m1(weight / scale)
        magnitudes = torch.tensor(E2M1_VALUES)[codes.int() & 7]
        return Quantized(scale, codes, torch.where(codes > 7, -magnitudes, magnitudes) * scale)

    return quantize


def int4_of_seven(weight: Tensor) -> Quantized:
    return _int4(weight, weight.abs().amax(1, keepdim=True) * torch.tensor(1 / 7))


def int4_divided_by_seven(weight: Tensor) -> Quantized:
    return _int4(weight, weight.abs().amax(1, keepdim=True) / 7)


def int4_of_training(weight: Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 7
    codes = _int4(weight, scale).codes
    return Quantized(scale, codes, _times(codes, scale))


def int4_of_half_the_range(weight: Tensor) -> Quantized:
    scale = (weight.abs().amax(1, keepdim=True) / 7.5).bfloat16().float()
    return _int4(weight, scale)


def _int4(weight: Tensor, scale: Tensor) -> Quantized:
    codes, stored = encode_int4(weight / scale), scale.bfloat16().float()
    return Quantized(stored, codes, _times(codes, stored))


def _times(codes: Tensor, scale: Tensor) -> Tensor:
    return ((codes.float() - 8) * scale).bfloat16().float()


OURS = "moe_optim"
RULES = (
    Rule(
        "mxfp4",
        "smallest power of two from amax / 6 up",
        f"{OURS}; gpt-oss's triton_kernels, DeepSeek's tile-kernels, ModelOpt, Megatron-Bridge "
        "(Kimi K3, DeepSeek-V4), torchao's inference and QAT (RCEIL)",
        mxfp4(1.5),
    ),
    Rule(
        "mxfp4",
        "2^(k - 2), doubled from amax = 1.75 * 2^k up",
        "compressed-tensors and llm-compressor; torchao EVEN",
        mxfp4(1.75, included=True),
    ),
    Rule(
        "mxfp4",
        "2^(k - 2), for amax from 2^k to 2^(k + 1)",
        "OCP's specification; torchao's `to_mx` (FLOOR)",
        mxfp4(2.0),
    ),
    Rule("mxfp4", "2^(k - 2), doubled unless amax = 2^k", "torchao CEIL", mxfp4(1.0)),
    Rule("int4", "amax * fl(1/7), then bf16", f"{OURS}; exports of slime and miles", int4_of_seven),
    Rule("int4", "amax / 7, then bf16", "Megatron-Bridge (Kimi K2.5)", int4_divided_by_seven),
    Rule(
        "int4",
        "amax / 7 in fp32, never rounded",
        "slime and miles in training",
        int4_of_training,
    ),
    Rule(
        "int4",
        "amax / 7.5 in bf16",
        "compressed-tensors and llm-compressor, on a GPU",
        int4_of_half_the_range,
    ),
)


@cache
def weights() -> tuple[Tensor, ...]:
    """Return Gaussian and heavy-tailed blocks of deviation 0.02, from numpy's frozen generator."""
    random = np.random.RandomState(0)
    draws = random.standard_normal(SHAPE), random.standard_t(3, SHAPE) / 3**0.5
    return tuple(torch.from_numpy(0.02 * draw).bfloat16().float() for draw in draws)


def relative_error(weight: Tensor, values: Tensor) -> float:
    """Return the root of the mean square of errors, relative to that of weights."""
    difference = (values - weight).double()
    return float(difference.norm() / weight.double().norm())


def scale_rules() -> str:
    """Shares of Gaussian weights where rules differ from ours, and errors for both weights."""
    rows, ours = [], {}
    for rule in RULES:
        results = [rule.quantize(weight) for weight in weights()]
        first = ours.setdefault(rule.format, results)
        shares = "" if first is results else _shares(first[0], results[0])
        errors = (relative_error(w, q.values) for w, q in zip(weights(), results, strict=True))
        cells = [shares, ", ".join(f"{one:.4f}" for one in errors)]
        rows.append([f"`{rule.format}`", rule.scale, rule.used_by, *cells])
    return table(["format", "scale", "used by", "other scales, codes", "errors"], rows)


def _shares(ours: Quantized, theirs: Quantized) -> str:
    pairs = ((ours.scale, theirs.scale), (ours.codes, theirs.codes))
    percent = (100 * float((one != other).double().mean()) for one, other in pairs)
    return ", ".join(f"{one:.2g}%" if one < 1 else f"{one:.0f}%" for one in percent)
