"""Loads exported experts with the code of released engines, as far as it runs on a CPU.

    python -m tools.upstream.engine_loaders [--vllm PATH] [--sglang PATH]

PATH is a folder with the package, such as an unpacked wheel. For each MoE method, the function that
allocates weights and the mapping of checkpoint names are extracted from its file and called; then
every exported tensor must have a parameter of its shape and dtype, and every parameter a tensor.
Kernels are not run. compressed-tensors, which must be installed, parses the configurations and
decompresses, and values are compared with those of training. Exit status: 1 with any difference.
"""

import argparse
import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_optim import ops
from moe_optim.commands.export.engine_config import quantization_config
from moe_optim.formats import get_format
from moe_optim.formats.reference import tensorwise
from moe_optim.rollout.conventions import CONVENTIONS, ONE_SCALE, Convention
from moe_optim.rollout.expert_tensors import (
    RowSplit,
    each_expert,
    export_experts,
    get_export_layout,
    patterns_of,
    stack_experts,
    tensor_name,
)

EXPERTS, HIDDEN, FFN = 2, 256, 384
LAYER = "model.layers.0.mlp."
LINEARS = {"linear_fc1": (2 * FFN, HIDDEN), "linear_fc2": (HIDDEN, FFN)}


@dataclass(frozen=True)
class Method:
    """Location of the code with which an engine allocates the experts of a convention."""

    engine: str
    file: str
    method: str
    settings: tuple[tuple[str, Any], ...] = ()
    """Attributes of the method that its constructor would set, or arguments of a function."""
    function: str = "create_weights"
    helpers: tuple[str, ...] = ()
    """Other methods of the class that the function calls."""
    is_transposed: bool = False
    """Whether the engine transposes data and scales while it loads them."""


_V, _S = "model_executor/layers/quantization", "srt/layers/quantization"
_VC = f"{_V}/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe"
_SC = f"{_S}/compressed_tensors/schemes/compressed_tensors"
_BLOCKS = (("block_quant", True), ("weight_block_size", [128, 128]))
_NATIVE = (*_BLOCKS, ("weight_scale_name", "weight_scale_inv"), ("weight_scale_refine", None))
_DYNAMIC = {"activation_scheme": "dynamic", "is_checkpoint_fp8_serialized": True}
_NATIVE += (
    ("moe_block_shape", [128, 128]),
    ("quant_config", SimpleNamespace(**_DYNAMIC)),
)


def _sglang_fp8(block: list[int]) -> Method:
    """Return SGLang's method for FP8 experts, blockwise or rowwise."""
    arguments = {
        "block_quant": True,
        "quant_config": SimpleNamespace(weight_block_size=block, **_DYNAMIC),
        "use_mxfp8": block == [1, 32],
        "is_checkpoint_fp8_serialized": True,
        "is_fp4_expert": False,
    }
    settings = tuple(arguments.items())
    return Method("sglang", f"{_S}/fp8.py", "Fp8MoEMethod", settings, "create_fp8_moe_weight_")


_SCHEME = (*_BLOCKS, ("static_input_scales", False))
_ROWS = (
    ("block_quant", False),
    ("static_input_scales", False),
    ("weight_quant", SimpleNamespace(strategy=1)),
)
_GROUP = SimpleNamespace(is_checkpoint_nvfp4_serialized=True, group_size=16)


def _int4(group_size: int) -> list[Method]:
    """Return the methods for packed integers with a scale per group."""
    settings = {
        "symmetric": True,
        "sym": True,
        "num_bits": 4,
        "packed_factor": 8,
        "strategy": "group",
        "group_size": group_size,
        "actorder": None,
    }
    given = tuple(settings.items())
    return [
        Method(
            *("vllm", f"{_VC}_wna16.py", "CompressedTensorsWNA16MoEMethod", given),
            helpers=("get_weight_shape",),
        ),
        Method(
            *("sglang", f"{_SC}_wNa16_moe.py", "CompressedTensorsWNA16MoE", given),
            is_transposed=True,
        ),
    ]


METHODS = {
    ("mxfp4", "compressed_tensors"): [
        Method(
            *("vllm", f"{_VC}_w4a4_mxfp4.py", "CompressedTensorsW4A4Mxfp4MoEMethod"),
            (("group_size", 32),),
        )
    ],
    ("int4", "compressed_tensors"): _int4(32),
    ("int4_g128", "compressed_tensors"): _int4(128),
    ("mxfp8", "compressed_tensors"): [
        Method("vllm", f"{_VC}_w8a8_mxfp8.py", "CompressedTensorsW8A8Mxfp8MoEMethod")
    ],
    ("mxfp8", "deepseek"): [_sglang_fp8([1, 32])],
    ("mxfp8", "modelopt"): [Method("vllm", f"{_V}/modelopt.py", "ModelOptMxFp8FusedMoE")],
    ("nvfp4", "modelopt"): [
        Method(
            *("vllm", f"{_V}/modelopt.py", "ModelOptNvFp4FusedMoE"),
            (("quant_config", _GROUP), ("use_global_sf", False)),
        )
    ],
    ("nvfp4", "compressed_tensors"): [
        Method(
            *("vllm", f"{_VC}_w4a4_nvfp4.py", "CompressedTensorsW4A4Nvfp4MoEMethod"),
            (("group_size", 16),),
        ),
        Method(
            *("sglang", f"{_SC}_w4a16_nvfp4_moe.py", "CompressedTensorsW4A16Nvfp4MoE"),
            (("group_size", 16), ("has_input_global_scale", False)),
        ),
    ],
    ("fp8_block", "deepseek"): [
        Method("vllm", f"{_V}/fp8.py", "Fp8MoEMethod", _NATIVE),
        _sglang_fp8([128, 128]),
    ],
    ("fp8_block", "compressed_tensors"): [
        Method("vllm", f"{_VC}_w8a8_fp8.py", "CompressedTensorsW8A8Fp8MoEMethod", _SCHEME),
    ],
    ("fp8", "compressed_tensors"): [
        Method("vllm", f"{_VC}_w8a8_fp8.py", "CompressedTensorsW8A8Fp8MoEMethod", _ROWS),
        Method("sglang", f"{_SC}_w8a8_fp8_moe.py", "CompressedTensorsW8A8Fp8MoE", _ROWS),
    ],
}
MAPPINGS = {
    "vllm": (
        "model_executor/layers/fused_moe/routed_experts.py",
        "RoutedExperts",
        "build_expert_params_mapping",
    ),
    "sglang": (
        "srt/layers/moe/fused_moe_triton/layer.py",
        "FusedMoE",
        "make_expert_params_mapping",
    ),
}


def extract(path: Path, cls: str, function: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Return one method of a class, compiled by itself, with ``names`` as its globals."""
    tree = ast.parse(path.read_text())
    (owner,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls]
    (node,) = [n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == function]
    node.decorator_list, node.returns = [], None
    arguments = (*node.args.args, *node.args.kwonlyargs)
    for argument in (*arguments, node.args.vararg, node.args.kwarg):
        if argument is not None:
            argument.annotation = None
    # imports from its own package are among the names already
    node.body = [n for n in node.body if not isinstance(n, ast.ImportFrom)]
    scope = dict(names)
    exec(compile(ast.Module([node], []), str(path), "exec"), scope)
    found: Callable[..., Any] = scope[function]
    return found


class _AnyName:
    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(value=name.lower())


def _parameter(data: Tensor, **_: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=False)


NAMES = {
    "torch": torch,
    "set_weight_attrs": lambda *_: None,
    "FusedMoeWeightScaleSupported": _AnyName(),
    "QuantizationStrategy": SimpleNamespace(TENSOR=0, CHANNEL=1, BLOCK=2),
    "ModelWeightParameter": _parameter,
    "PerTensorScaleParameter": _parameter,
    "GPTQMarlinState": SimpleNamespace(REPACK=None),
    "MXFP8_BLOCK_SIZE": 32,
    "MXFP8_VALUE_DTYPE": torch.float8_e4m3fn,
    "MXFP8_SCALE_DTYPE": torch.uint8,
    "validate_fp8_block_shape_moe": lambda *_: None,
    "get_tensor_model_parallel_world_size": lambda: 1,
    "get_moe_weight_sizes": lambda width, **_: (2 * width, width, False),
    "get_moe_padding_size": lambda _: 0,
    **dict.fromkeys(("_is_hip", "_use_aiter", "_use_hip_int4"), False),
    "EplbState": SimpleNamespace(
        build_initial_global_physical_to_logical_map=lambda experts, _: list(range(experts))
    ),
}


def allocated(method: Method, package: Path) -> dict[str, Tensor]:
    """Return an engine's parameters of the experts, by name, filled with a marker byte."""
    create = extract(package / method.file, method.method, method.function, NAMES)
    moe = SimpleNamespace(is_act_and_mul=True, w13_num_shards=2, has_bias=False)
    helpers = [extract(package / method.file, method.method, one, NAMES) for one in method.helpers]
    weight_quant, input_quant = SimpleNamespace(strategy=2), SimpleNamespace(dynamic=True)
    settings = {"moe": moe, "weight_quant": weight_quant, "input_quant": input_quant}
    layer = torch.nn.Module()
    layer.intermediate_size_per_partition, layer.hidden_size = FFN, HIDDEN
    layer.moe_tp_size = 1
    layer.moe_runner_config = SimpleNamespace(is_gated=True)
    given = dict(method.settings)
    is_static = method.function != "create_weights"
    owner = [] if is_static else [SimpleNamespace(**settings | given)]
    for helper in helpers:
        setattr(owner[0], helper.__name__, MethodType(helper, owner[0]))
    create(
        *owner,
        layer,
        **(given if is_static else {}),
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=FFN,
        params_dtype=torch.bfloat16,
        weight_loader=None,
        global_num_experts=EXPERTS,
    )
    return {name: param.data for name, param in layer.named_parameters()}


Experts = list[list[dict[str, Tensor]]]
"""Tensors of each part of each expert."""


def quantized(
    linear: str, convention: Convention, parts: int, format: str | None = None
) -> tuple[Experts, Tensor]:
    """Return random exported experts of a linear, and their values in training.

    ``format`` None is the training format of the convention's name.
    """
    generator = torch.Generator().manual_seed(1 + len(linear) + LINEARS[linear][0])
    weights = torch.randn((EXPERTS, *LINEARS[linear]), generator=generator)
    if convention is not ONE_SCALE:
        buffers = ops.quantize(weights, get_format(format or convention.format))
        return export_experts(buffers, convention, parts=parts), ops.dequantize(buffers)
    codes = torch.empty(weights.shape, dtype=torch.uint8)
    scales = tensorwise.encode_scale(weights.bfloat16().float().abs().amax((1, 2)).unsqueeze(1))
    for out, weight, scale in zip(codes, weights, scales, strict=True):
        tensorwise.cast_into(out.view(-1), weight.view(-1), scale)
    inverse = scales.reciprocal()
    values = codes.view(torch.float8_e4m3fn).float() * inverse.unsqueeze(2)
    stacked = stack_experts([codes, inverse], "tensorwise", convention, RowSplit(parts=parts))
    return each_expert(stacked), values.bfloat16()


def exported(convention: Convention) -> dict[str, Tensor]:
    layout, found = get_export_layout("hf_per_expert"), {}
    for linear in LINEARS:
        patterns = patterns_of(layout, linear, "weight")
        experts, _ = quantized(linear, convention, len(patterns))
        for expert, parts in enumerate(experts):
            for pattern, part in zip(patterns, parts, strict=True):
                for suffix, tensor in part.items():
                    found[tensor_name(f"{LAYER}experts.", pattern, expert, suffix)] = tensor
    return found


def differences(convention: Convention, method: Method, package: Path) -> Iterator[str]:
    """Yield exported tensors without a matching parameter, and parameters that stay empty."""
    places = allocated(method, package)
    file, cls, function = MAPPINGS[method.engine]
    make = extract(package / file, cls, function, NAMES)
    projections = ("gate_proj", "down_proj", "up_proj", EXPERTS)
    mapping = make(None, *projections) if method.engine == "sglang" else make(*projections)
    unused = ("input", "g_idx")  # scales of activations, and the order of columns
    left = {
        name: place.numel()
        for name, place in places.items()
        if not any(word in name for word in unused)
    }
    for name, tensor in exported(convention).items():
        (row,) = [row for row in mapping if row[1] in name]
        _, _, expert, shard = row
        place_name = f"{'w2' if shard == 'w2' else 'w13'}_{name.rpartition('.')[2]}"
        if place_name not in left:
            yield f"{name}: no {place_name}"
            continue
        place = places[place_name][expert]
        if name.endswith("_shape"):  # read into fp32, and gate's and up's into one place
            left[place_name] -= place.numel() // (1 if shard == "w2" else 2)
            if tensor.shape != place.shape:
                yield f"{name}: {list(tensor.shape)}, place {list(place.shape)}"
            continue
        if method.is_transposed:
            place = place.t()
        if shard != "w2":
            place = place.chunk(2)["w13".index(shard[1]) // 2] if place.dim() else place
        loaded = tensor.reshape(place.shape) if tensor.numel() == place.numel() == 1 else tensor
        if (loaded.shape, loaded.dtype) != (place.shape, place.dtype):
            yield f"{name}: {list(tensor.shape)} {tensor.dtype}, place {list(place.shape)}"
        left[place_name] -= place.numel()
    yield from (f"{name}: {count} elements stay empty" for name, count in left.items() if count)


def decompressed_differences(convention: Convention, format: str | None = None) -> Iterator[str]:
    """Yield values that compressed-tensors decompresses differently than training.

    ``format`` is as in :func:`quantized`.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(quantization_config(convention, ["lm_head"]))
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    for linear in LINEARS:
        experts, wanted = quantized(linear, convention, 1, format)
        for expert, (whole,) in enumerate(experts):
            got = compressor.decompress(whole, scheme)["weight"].bfloat16()
            if not torch.equal(got, wanted[expert]):
                count = int((got != wanted[expert]).sum())
                yield f"{linear}: {count} of {got.numel()} values differ"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--sglang", type=Path)
    packages = vars(parser.parse_args())
    failed = False
    for convention in (*CONVENTIONS, ONE_SCALE):
        checks = [
            (method.engine, differences(convention, method, packages[method.engine]))
            for method in METHODS.get((convention.format, convention.name), [])
            if packages[method.engine]
        ]
        if convention.name == "compressed_tensors":
            checks.append(("compressed-tensors", decompressed_differences(convention)))
        for engine, found in checks:
            faults = list(found)
            failed |= bool(faults)
            print(f"{convention.format} {convention.name}, {engine}: {faults or 'equal'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
