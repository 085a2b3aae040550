"""Transformer Engine's expert modules with torch kernels, for machines that lack its own.

Weights, modules, autograd functions, recipes and hooks stay Transformer Engine's. Replaced are the
launches of Blackwell kernels, in the modules and in the operations of Megatron's op fuser: GEMMs
(on the same operand fields), casts of weights, and casts of activations, which stay bf16.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_optim.formats import BlockScaledFormat
from moe_optim.weights.te.fields import te_formats_of
from moe_optim.weights.te.storage import TransformerEngineStorage

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def leave_to_torch() -> None:
    """Make Megatron use torch for Transformer Engine's GPU-only functions, on a CPU.

    Covers Adam, norms and routers. Call it before anything of Megatron is built.
    """
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer.moe import moe_utils

    from moe_optim.integration import patches
    from moe_optim.integration.engine import apply_patches

    moe_utils.te_general_gemm = None
    clip_grads.multi_tensor_applier = utils.local_multi_tensor_applier
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.multi_tensor_scale_tensor_impl = utils.local_multi_tensor_scale
    optimizer.Adam = torch.optim.AdamW
    apply_patches([replace(patch, not_needed_with=()) for patch in patches.ADAM])


def pretend_a_gpu() -> None:
    """Redirect CUDA calls to the CPU; Transformer Engine must be imported already."""
    from moe_optim.integration import cpu_runtime

    cpu_runtime.install()
    _EveryTensorIsOnTheGpu().__enter__()
    torch.Tensor.backward = _backward  # type: ignore[method-assign]


def _backward(output: Tensor, gradient: Tensor | None = None) -> None:
    """Run backward as Megatron's schedules do; torch's own method would leave every mode."""
    gradient = torch.ones_like(output) if gradient is None else gradient
    torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        (output,), (gradient,), False, False, (), True, True
    )


class _EveryTensorIsOnTheGpu(TorchFunctionMode):
    """Reports every tensor as a CUDA tensor to Transformer Engine's modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:
            return True
        return func(*args, **(kwargs or {}))


def replace_kernels(*formats: BlockScaledFormat) -> None:
    """Replace kernels by torch, for the rest of this process.

    Args:
        formats: output formats of weight casts where a tensor class supports several; by default
            each class's first.
    """
    from transformer_engine.pytorch import quantization
    from transformer_engine.pytorch.module import fp8_padding, fp8_unpadding, grouped_linear
    from transformer_engine.pytorch.ops.basic import grouped_linear as operation
    from transformer_engine.pytorch.ops.basic import swiglu
    from transformer_engine.pytorch.tensor import float8_blockwise_tensor as fp8_block_tensor
    from transformer_engine.pytorch.tensor import float8_tensor, mxfp8_tensor, nvfp4_tensor

    # for Megatron's op fuser; Transformer Engine has already checked for Blackwell
    os.environ["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"
    for check in ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling"):
        setattr(quantization, f"check_{check}_support", lambda: (True, ""))
    grouped_linear.is_module_grouped_tensor_path_supported = lambda *_: True
    grouped_linear._split_quantization = SimpleNamespace(_split_quantize=_split)
    grouped_linear.general_grouped_gemm = _multiply_experts
    grouped_linear.general_grouped_gemm_for_grouped_tensor = _multiply_groups
    grouped_linear.clear_tensor_data = lambda *_: None  # they are views that others read
    _keep_splits_beside_tokens(grouped_linear.GroupedLinear)
    operation.is_op_fuser_grouped_tensor_path_supported = lambda *_: True
    operation.general_grouped_gemm_for_grouped_tensor = _multiply_groups
    for module in (grouped_linear, operation):  # a Triton kernel, which needs libcuda
        module.compute_grouped_dbias = _sum_rows_of_groups
    operation.compute_grouped_dbias_dscales = _differentiate_scaled_biases
    for module in (fp8_padding, fp8_unpadding, grouped_linear, operation, swiglu):
        module.tex = _Extension(grouped_linear.tex, grouped_linear._GroupedLinear)
    _replace_tensorwise(float8_tensor)
    for quantizer in (
        mxfp8_tensor.MXFP8Quantizer,
        nvfp4_tensor.NVFP4Quantizer,
        fp8_block_tensor.Float8BlockQuantizer,
    ):
        quantizer.quantize_impl = _quantize
        quantizer.update_quantized = _updater(formats)
    for cls in (
        mxfp8_tensor.MXFP8Tensor,
        nvfp4_tensor.NVFP4Tensor,
        fp8_block_tensor.Float8BlockwiseQTensor,
    ):
        cls.dequantize = lambda self, *, dtype=None: read(self, "rowwise").to(dtype or self.dtype)


def _replace_tensorwise(module: Any) -> None:
    def update_quantized(_quantizer: Any, values: Tensor, weight: Any, **_: Any) -> Any:
        values = values.detach().bfloat16().float()
        scale = _quotient(448.0, values.abs().max())
        weight._data.copy_((values * scale).to(torch.float8_e4m3fn).view(torch.uint8))
        weight._scale_inv.copy_(1.0 / scale)
        weight._transpose_invalid = True
        return weight

    def create_transpose(weight: Any) -> None:
        weight._transpose = weight._data.reshape(-1, weight._data.shape[-1]).t().contiguous()
        weight._transpose_invalid = False

    def make_empty(quantizer: Any, shape: Any, *, dtype: Any, device: Any, **_: Any) -> Any:
        return module.Float8Tensor(
            shape=tuple(shape),
            dtype=dtype,
            data=torch.empty(tuple(shape), dtype=torch.uint8, device=device),
            fp8_scale_inv=torch.empty(1, device=device),
            fp8_dtype=quantizer.dtype,
            quantizer=quantizer,
        )

    module.Float8CurrentScalingQuantizer.make_empty = make_empty
    module.Float8CurrentScalingQuantizer.quantize_impl = _quantize
    module.Float8CurrentScalingQuantizer.update_quantized = update_quantized
    module.Float8Tensor._create_transpose = create_transpose


def cast_whole_masters() -> None:
    """Make stock cast masters in torch, in any format: whole weights on every rank.

    Megatron casts each rank's shard and gathers bytes; if ranks own whole weights, the gather
    changes nothing.
    """
    import torch.distributed as dist
    from megatron.core import fp8_utils
    from transformer_engine.pytorch.tensor import utils

    def cast(weights: Any, masters: Any, starts: Any, group: Any, *_: Any, **__: Any) -> None:
        for weight, master, start in zip(weights, masters, starts, strict=True):
            whole = torch.zeros(weight.shape.numel(), device=weight.device)
            if master is not None:
                whole[start : start + master.numel()] = master.view(-1).bfloat16().float()
            dist.all_reduce(whole, group=group)
            weight._quantizer.update_quantized(whole.view(weight.shape), weight)

    utils.quantize_master_weights = cast
    fp8_utils.te_post_all_gather_processing = lambda *_: None


def replace_master_casts() -> list[int]:
    """Replace the kernels that cast masters to weights with per-tensor scaling by torch.

    Transformer Engine's surrounding functions stay: ranks agree on amaxes, each casts only its
    shard, and weights are transposed after the gather, as Hopper's GEMMs need. A skipped gather or
    a stale transpose therefore shows.

    Returns:
        Number of weights of each cast, appended as casts occur.
    """
    from transformer_engine.pytorch.tensor import float8_tensor, utils
    from transformer_engine.pytorch.tensor.storage import float8_tensor_storage

    utils.tex = _CastExtension(utils.tex)
    utils.multi_tensor_applier = _compute_scales
    float8_tensor.Float8Quantizer.update_quantized = _cast_shard
    for module in (utils, float8_tensor, float8_tensor_storage):
        module.is_non_tn_fp8_gemm_supported = lambda: False
    cast, seen = utils.quantize_master_weights, []

    def count(weights: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(len(weights))
        cast(weights, *args, **kwargs)

    utils.quantize_master_weights = count
    return seen


class _CastExtension:
    """The compiled extension, with torch for the amax of a master."""

    def __init__(self, extension: Any) -> None:
        self._extension = extension

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extension, name)

    @staticmethod
    def compute_amax(master: Tensor, amax: Tensor) -> None:
        amax.copy_(master.float().abs().max())


def _compute_scales(  # noqa: PLR0913  # arguments are Transformer Engine's
    _kernel: Any,
    _overflow: Tensor,
    tensors: Sequence[Sequence[Tensor]],
    largest: float,
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> None:
    """Write scales and their inverses for amaxes; all-zero weights keep a scale of 1."""
    assert not force_pow_2_scales and not amax_epsilon, "no recipe of these tests asks for it"
    for amax, scale, scale_inv in zip(*tensors, strict=True):
        scale.copy_(torch.where(amax > 0, _quotient(largest, amax), 1.0))
        scale_inv.copy_(1.0 / scale)


def _quotient(number: float, values: Tensor) -> Tensor:
    """Return quotients rounded once; torch multiplies a scalar by rounded reciprocals."""
    return torch.full_like(values, number) / values


def _cast_shard(quantizer: Any, master: Tensor, weight: Any, **_: Any) -> Any:
    """Cast a rank's shard of a weight into its bytes, with the scale of the whole weight."""
    assert weight._data.untyped_storage().nbytes(), "weights are cast while they are offloaded"
    data = (master.float() * quantizer.scale).to(torch.float8_e4m3fn).view(torch.uint8)
    weight._data.copy_(data.view(weight._data.shape))
    return weight


def read(weight: Any, direction: str) -> Tensor:
    """Return the bf16 values [R, C] that a GEMM reads from the fields of a weight."""
    kind = {cls.__name__.removesuffix("Storage") for cls in type(weight).__mro__}
    if "Float8Tensor" in kind:
        data = weight._data if direction == "rowwise" else weight._transpose.t()
        return (data.view(torch.float8_e4m3fn).float() * weight._scale_inv).bfloat16()
    data = getattr(weight, f"_{direction}_data")
    scale = getattr(weight, f"_{direction}_scale_inv")
    rows, cols = weight.size()[-2:]  # checkpoints are loaded into views [1, 1, R, C]
    transposed = direction == "columnwise" and "MXFP8Tensor" not in kind
    if transposed:
        rows, cols = cols, rows
    data = data.view(rows, -1)
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
    return result.t() if transposed else result.view(weight.size())


def _power(code: Tensor) -> Tensor:
    return torch.ldexp(torch.ones((), device=code.device), code.int() - 127)


def _operand(weight: Any, direction: str) -> Tensor:
    is_quantized = hasattr(weight, "_rowwise_data") or hasattr(weight, "_transpose")
    return read(weight, direction) if is_quantized else weight


class _SplitsOnTheGpu(Tensor):
    """Splits that name a GPU as their device, which grouped GEMMs ask them for."""

    device = torch.device("cuda")  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _keep_splits_beside_tokens(linear: Any) -> None:
    """Keep splits on the device: Megatron passes a list, which grouped GEMMs refuse."""
    forward = linear.forward

    def forward_with_splits(
        self: Any, tokens: Tensor, splits: Any, *args: Any, **kwargs: Any
    ) -> Any:
        splits = torch.as_tensor(splits, dtype=torch.int64, device=tokens.device)
        if splits.device.type == "cpu":
            splits = splits.as_subclass(_SplitsOnTheGpu)
        return forward(self, tokens, splits, *args, **kwargs)

    linear.forward = forward_with_splits


def _split(tensor: Tensor, splits: Sequence[int], *_: Any, **__: Any) -> tuple[Any, None]:
    return list(tensor.split(list(splits))), None


@torch.no_grad()
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
    """Compute out = b @ a', column-major as in BLAS: weights in TN and NN, tokens in NT.

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


@torch.no_grad()
def _multiply_groups(  # noqa: PLR0913  # arguments are Transformer Engine's
    a: Any,
    b: Any,
    out: Any,
    *,
    layout: str = "TN",
    accumulate: bool = False,
    bias: Any = None,
    bias_scale: Tensor | None = None,
    **_: Any,
) -> Any:
    splits = (b if layout == "NT" else out).first_dims.tolist()
    outs = out if isinstance(out, list) else _members(out, splits)
    result = _multiply_experts(
        _members(a, splits), _members(b, splits), outs, layout=layout, accumulate=accumulate
    )
    if bias is not None:  # [experts, columns], scaled by a factor a token
        biases = bias.rowwise_data.view(len(outs), -1)
        scales = [1.0] * len(outs) if bias_scale is None else bias_scale.view(-1, 1).split(splits)
        for rows, of_expert, scale in zip(outs, biases, scales, strict=True):
            rows.add_(of_expert * scale)
    return result


def _sum_rows_of_groups(rows: Tensor, offsets: Tensor, _num_groups: int) -> Tensor:
    """Return the sums of rows [N, C] between consecutive offsets, fp32 [groups, C]."""
    parts = rows.float().split(offsets.diff().tolist())
    return torch.stack([part.sum(0) for part in parts])


def _differentiate_scaled_biases(
    grad: Tensor, scales: Tensor, bias: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradients of biases [groups, C] and of scales [N], which multiply them by token."""
    of_tokens = bias.float().repeat_interleave(offsets.diff(), 0)
    grad = grad.float()
    of_biases = _sum_rows_of_groups(grad * scales.view(-1, 1), offsets, len(bias))
    return of_biases, (grad * of_tokens).sum(1)


def _members(group: Any, splits: Sequence[int]) -> Any:
    if isinstance(group, list):
        return group
    if group.quantizer is not None:
        return group.quantized_tensors or group.split_into_quantized_tensors()
    if group.first_dims is None:  # weight gradients: experts of one shape
        return group.rowwise_data.view(group.num_tensors, *group.tensor_shapes[0]).unbind(0)
    tokens = group.rowwise_data.view(sum(splits), -1)
    return tokens.split(list(splits))


class _Extension:
    """The compiled extension, with torch for the helpers of grouped GEMMs."""

    def __init__(self, extension: Any, linear: Any) -> None:
        self._extension, self._linear = extension, linear

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extension, name)

    @staticmethod
    def split_quantize(tensor: Tensor, splits: Sequence[int], *_: Any, **__: Any) -> list[Tensor]:
        return list(
            tensor.split(list(splits))
        )  # called by 2.18; later versions have a module for it

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

    @staticmethod
    def scaled_swiglu(rows: Tensor, scales: Tensor, _quantizer: Any, interleaved: int) -> Tensor:
        return _scale_glu(_swiglu, rows, scales, interleaved).to(rows.dtype)

    @staticmethod
    def scaled_dswiglu(
        grad: Tensor, rows: Tensor, scales: Tensor, _quantizer: Any, interleaved: int, _scaled: bool
    ) -> tuple[Tensor, Tensor]:
        return _differentiate_glu(_swiglu, grad, rows, scales, interleaved)

    @staticmethod
    def scaled_clamped_swiglu(
        rows: Tensor, scales: Tensor, _quantizer: Any, *constants: float
    ) -> Tensor:
        *constants, interleaved = constants
        glu = partial(_clamped_glu, *constants)
        return _scale_glu(glu, rows, scales, interleaved).to(rows.dtype)

    @staticmethod
    def scaled_clamped_dswiglu(
        grad: Tensor, rows: Tensor, scales: Tensor, _quantizer: Any, *constants: float
    ) -> tuple[Tensor, Tensor]:
        *constants, interleaved, _scaled = constants
        return _differentiate_glu(
            partial(_clamped_glu, *constants), grad, rows, scales, interleaved
        )

    def bgrad_group_quantize(
        self, grad: Tensor, quantizer: Any, num: int, splits: Tensor, **kwargs: Any
    ) -> tuple[Any, Tensor]:
        offsets = torch.cat([splits.new_zeros(1), splits.cumsum(0)])
        quantized = self.group_quantize(grad, quantizer, num, splits, **kwargs)
        return quantized, _sum_rows_of_groups(grad, offsets, num)

    def group_quantize(
        self, tokens: Tensor, quantizer: Any, num: int, splits: Tensor | None, **kwargs: Any
    ) -> Any:
        if splits is None:  # experts of one shape: weights
            return _cast_experts(tokens.view(num, -1, tokens.shape[-1]), quantizer)
        offsets = torch.cat([splits.new_zeros(1), splits.cumsum(0)]) * tokens.shape[1]
        return self._linear._make_grouped_tensor(
            tokens,
            num_gemms=num,
            split_sizes=splits,
            tensor_offsets=offsets,
            last_dim=tokens.shape[1],
            dtype=tokens.dtype,
        )


def _swiglu(gate: Tensor, linear: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * linear


def _clamped_glu(limit: float, alpha: float, offset: float, gate: Tensor, linear: Tensor) -> Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (linear.clamp(-limit, limit) + offset)


def _scale_glu(
    glu: Callable[[Tensor, Tensor], Tensor], rows: Tensor, scales: Tensor, interleaved: int
) -> Tensor:
    """Return glu(gate, linear) * scale [N, F] in fp32, for rows [N, 2F].

    Gates come first, or alternate with linear units in runs of ``interleaved``.
    """
    runs = rows.float().view(len(rows), -1, 2, interleaved or rows.shape[1] // 2)
    gate, linear = (part.reshape(len(rows), -1) for part in runs.unbind(2))
    return glu(gate, linear) * scales.float().view(-1, 1)


def _differentiate_glu(
    glu: Callable[[Tensor, Tensor], Tensor],
    grad: Tensor,
    rows: Tensor,
    scales: Tensor,
    interleaved: int,
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (rows, scales)]
        out = _scale_glu(glu, *inputs, interleaved)
    return torch.autograd.grad(out, inputs, grad.float())


def _cast_experts(values: Tensor, quantizer: Any) -> Any:
    from transformer_engine.pytorch.tensor import GroupedTensor

    group = GroupedTensor.make_grouped_tensor_with_shapes(
        num_tensors=len(values),
        shapes=[tuple(values.shape[1:])] * len(values),
        quantizer=quantizer,
        dtype=values.dtype,
        device=values.device,
    )
    group._with_gemm_swizzled_scales = False  # as in _quantize
    for expert, weight in zip(values, group.quantized_tensors, strict=True):
        weight._with_gemm_swizzled_scales = False
        quantizer.update_quantized(expert, weight)
    return group


def _quantize(quantizer: Any, tensor: Tensor) -> Any:
    weight = quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if hasattr(weight, "_with_gemm_swizzled_scales"):  # for Blackwell GEMMs; ours read plain ones
        weight._with_gemm_swizzled_scales = False
    return quantizer.update_quantized(tensor, weight)


def _updater(formats: Collection[BlockScaledFormat]) -> Callable[..., Any]:
    def update_quantized(quantizer: Any, values: Tensor, weight: Any, **_: Any) -> Any:
        possible = te_formats_of(quantizer)
        format = next((one for one in possible if one in formats), possible[0])
        rows, cols = weight.size()[-2:]  # checkpoints are loaded into views [1, 1, R, C]
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
    """A weight [R, C] that aliases the memory of another one."""
