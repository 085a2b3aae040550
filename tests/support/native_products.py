"""Transformer Engine's own expert modules on machines whose kernels it lacks: kernels in torch.

Weights, modules, autograd functions, recipes and hooks stay Transformer Engine's. Replaced are what
launches a kernel that wants a Blackwell: products (operands are read from the very fields that the
hardware would read), casts of weights, and casts of activations, which stay bf16.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_optim.formats import BlockScaledFormat
from moe_optim.megatron.te.fields import te_formats_of
from moe_optim.megatron.te.storage import TransformerEngineStorage

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def replace_kernels(format: BlockScaledFormat) -> None:
    """Put torch in the place of kernels, for the rest of this process.

    Args:
        format: of the weights; casts of weights give it.
    """
    from transformer_engine.pytorch import quantization
    from transformer_engine.pytorch.module import fp8_padding, fp8_unpadding, grouped_linear
    from transformer_engine.pytorch.tensor import float8_blockwise_tensor as fp8_block_tensor
    from transformer_engine.pytorch.tensor import mxfp8_tensor, nvfp4_tensor

    for check in ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling"):
        setattr(quantization, f"check_{check}_support", lambda: (True, ""))
    grouped_linear.is_module_grouped_tensor_path_supported = lambda *_: True
    grouped_linear._split_quantization = SimpleNamespace(_split_quantize=_split)
    grouped_linear.general_grouped_gemm = _multiply_experts
    grouped_linear.general_grouped_gemm_for_grouped_tensor = _multiply_groups
    grouped_linear.clear_tensor_data = lambda *_: None  # of views of what others read
    _keep_splits_beside_tokens(grouped_linear.GroupedLinear)
    for module in (fp8_padding, fp8_unpadding, grouped_linear):
        module.tex = _Extension(grouped_linear.tex, grouped_linear._GroupedLinear)
    for quantizer in (
        mxfp8_tensor.MXFP8Quantizer,
        nvfp4_tensor.NVFP4Quantizer,
        fp8_block_tensor.Float8BlockQuantizer,
    ):
        quantizer.quantize_impl = _caster(format)
        quantizer.update_quantized = _updater(format)
    for cls in (
        mxfp8_tensor.MXFP8Tensor,
        nvfp4_tensor.NVFP4Tensor,
        fp8_block_tensor.Float8BlockwiseQTensor,
    ):
        cls.dequantize = lambda self, *, dtype=None: read(self, "rowwise").to(dtype or self.dtype)


def read(weight: Any, direction: str) -> Tensor:
    """Return the values [R, C] that a product gets out of the fields of a weight, in bf16."""
    kind = {cls.__name__ for cls in type(weight).__mro__}
    data = getattr(weight, f"_{direction}_data")
    scale = getattr(weight, f"_{direction}_scale_inv")
    rows, cols = weight.shape
    transposed = direction == "columnwise" and "MXFP8Tensor" not in kind
    if transposed:
        rows, cols = cols, rows
    if "NVFP4Tensor" in kind:
        table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=data.device)
        values = torch.stack([table[(data & 15).int()], table[(data >> 4).int()]], -1).flatten(1)
        amax = getattr(weight, f"_amax_{direction}")
        blocks = scale[:rows, : cols // 16].view(torch.float8_e4m3fn).float()
        factors = blocks.repeat_interleave(16, 1) * (amax / (6.0 * 448.0))
    else:
        values = data.view(torch.float8_e4m3fn).float()
        if "MXFP8Tensor" not in kind:
            factors = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
        elif direction == "rowwise":
            factors = _power(scale[:rows, : cols // 32]).repeat_interleave(32, 1)
        else:
            factors = _power(scale[: rows // 32, :cols]).repeat_interleave(32, 0)
    result = (values * factors).bfloat16()
    return result.t() if transposed else result


def _power(code: Tensor) -> Tensor:
    return torch.ldexp(torch.ones((), device=code.device), code.int() - 127)


def _operand(weight: Any, direction: str) -> Tensor:
    return read(weight, direction) if te_formats_of(weight) else weight


def _keep_splits_beside_tokens(linear: Any) -> None:
    """Megatron hands them over as a list, which group products refuse."""
    forward = linear.forward

    def forward_with_splits(
        self: Any, tokens: Tensor, splits: Any, *args: Any, **kwargs: Any
    ) -> Any:
        splits = torch.as_tensor(splits, dtype=torch.int64, device=tokens.device)
        return forward(self, tokens, splits, *args, **kwargs)

    linear.forward = forward_with_splits


def _split(tensor: Tensor, splits: Sequence[int], *_: Any, **__: Any) -> tuple[Any, None]:
    return list(tensor.split(list(splits))), None


def _multiply_experts(  # noqa: PLR0913  # arguments are Transformer Engine's
    a: Sequence[Any],
    b: Sequence[Tensor],
    out: Sequence[Tensor],
    quantization_params: Any = None,
    out_dtype: Any = None,
    layout: str = "TN",
    m_splits: Sequence[int] = (),
    accumulate: bool = False,
    single_output: bool = False,
    bias: Sequence[Tensor] = (),
    use_bias: bool | None = False,
    **_: Any,
) -> tuple[Any, Any, Any]:
    """Compute out = b @ a', as BLAS in columns: weights in TN and NN, tokens in NT.

    With biases, TN adds them and NT returns their gradients.
    """
    outs = out[0].split(list(m_splits)) if single_output else out
    for index, (x, y, target) in enumerate(zip(a, b, outs, strict=True)):
        if layout == "NT":
            product = y.t() @ x
        else:
            weight = _operand(x, "rowwise" if layout == "TN" else "columnwise")
            product = y @ (weight.t() if layout == "TN" else weight)
            if use_bias and layout == "TN":
                product = product + bias[index]
        if accumulate:
            target.add_(product)
        else:
            target.copy_(product)
    grads = [y.sum(0) if use_bias and layout == "NT" else None for y in b]
    return None, grads, None


def _multiply_groups(
    a: Any, b: Any, out: Any, *, layout: str = "TN", accumulate: bool = False, **_: Any
) -> Any:
    """Compute the same of groups: their members, and rows of flat tokens."""
    splits = (b if layout == "NT" else out).first_dims.tolist()
    return _multiply_experts(
        _members(a, splits),
        _members(b, splits),
        out if isinstance(out, list) else _members(out, splits),
        layout=layout,
        accumulate=accumulate,
    )


def _members(group: Any, splits: Sequence[int]) -> Any:
    if isinstance(group, list):
        return group
    if group.quantizer is not None and te_formats_of(group):
        return group.quantized_tensors or group.split_into_quantized_tensors()
    if group.first_dims is None:  # weight gradients: experts of one shape
        return group.rowwise_data.view(group.num_tensors, *group.tensor_shapes[0]).unbind(0)
    tokens = group.rowwise_data.view(sum(splits), -1)
    return tokens.split(list(splits))


class _Extension:
    """The compiled extension, with torch for what group products call on their way."""

    def __init__(self, extension: Any, linear: Any) -> None:
        self._extension, self._linear = extension, linear

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extension, name)

    @staticmethod
    def fused_multi_row_padding(
        rows: Tensor, out: Tensor, splits: Sequence[int], padded: Sequence[int]
    ) -> None:
        out.zero_()
        for part, target in zip(rows.split(splits), out.split(padded), strict=True):
            target[: len(part)] = part

    @staticmethod
    def fused_multi_row_unpadding(
        rows: Tensor, out: Tensor, padded: Sequence[int], splits: Sequence[int]
    ) -> None:
        for part, target in zip(rows.split(padded), out.split(splits), strict=True):
            target.copy_(part[: len(target)])

    def splits_to_offsets_multi(
        self, splits: Tensor, device: Any, *, strides: Sequence[int], **_: Any
    ) -> tuple[Tensor, list[Tensor]]:
        splits = splits.to(device)
        ends = torch.cat([splits.new_zeros(1), splits.cumsum(0)])
        return splits, [ends * stride for stride in strides]

    def group_quantize(
        self, tokens: Tensor, _quantizer: Any, num: int, splits: Tensor, **kwargs: Any
    ) -> Any:
        offsets = torch.cat([splits.new_zeros(1), splits.cumsum(0)]) * tokens.shape[1]
        return self._linear._make_grouped_tensor(
            tokens,
            num_gemms=num,
            split_sizes=splits,
            tensor_offsets=offsets,
            last_dim=tokens.shape[1],
            dtype=tokens.dtype,
        )


def _caster(format: BlockScaledFormat) -> Callable[[Any, Tensor], Any]:
    def quantize_impl(quantizer: Any, tensor: Tensor) -> Any:
        weight = quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return quantizer.update_quantized(tensor, weight)

    return quantize_impl


def _updater(format: BlockScaledFormat) -> Callable[..., Any]:
    def update_quantized(_quantizer: Any, values: Tensor, weight: Any, **_: Any) -> Any:
        rows, cols = weight.shape[-2:]  # checkpoints are loaded into views [1, 1, R, C]
        flat = _Flat()
        flat.shape = (rows, cols)
        for name, tensor in vars(weight).items():
            if name.endswith("_data") and tensor is not None:
                shape = format.data_shape((1, rows, cols), name.split("_")[1])
                tensor = tensor.view(shape[1:])
            setattr(flat, name, tensor)
        TransformerEngineStorage(flat, format).write(values.detach().view(1, rows, cols))
        for direction in ("rowwise", "columnwise") if format.has_global_amax else ():
            own = getattr(weight, f"_amax_{direction}")
            if own is not None:
                own.copy_(getattr(flat, f"_amax_{direction}"))
        return weight

    return update_quantized


class _Flat:
    """A weight [R, C] over the memory of another one."""
