"""One linear layer of all local experts: a single grouped GEMM forward, dgrad and wgrad."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from moe_optim.calibration.calibrated_amax import (
    calibrated_amax,
    held_amaxes,
    move_amaxes,
    take_calibrated_amaxes,
)
from moe_optim.errors import StateError
from moe_optim.experts import compiled_gemm
from moe_optim.experts.fused_gradients import FusedNote
from moe_optim.experts.grouped_gemm import (
    GradientEnd,
    Version,
    WgradFactors,
    multiply,
    run_delayed_wgrad,
)
from moe_optim.experts.operands import (
    FakeQuantizedCopy,
    QuantizedCopy,
    lie_together,
    make_copy,
    stack_experts,
)
from moe_optim.formats import BlockScaledFormat, Direction
from moe_optim.kernels.member_table import Backend
from moe_optim.library import as_written
from moe_optim.places import has_memory
from moe_optim.weights.grouped_weight import GradientNote, GroupedWeight
from moe_optim.weights.recorded_amax import RecordsAmax
from moe_optim.weights.storage import (
    MakeStorages,
    PortableStorage,
    WeightStorage,
    make_portable_storages,
)
from moe_optim.weights.traced import handle_of

if TYPE_CHECKING:
    from moe_optim.calibration.fake_quantization import PerExpertGrid

ExpertLayout = Literal["grouped", "indexed"]


class GroupedLinear(RecordsAmax, torch.nn.Module):
    """Weights, and optional biases, of all local experts of one linear.

    Parameters are ``weight`` [E, R, C] in ``grouped`` layout, ``weight0 .. weight{E-1}`` [R, C] in
    ``indexed`` layout. Portable quantized experts share one storage [E, R, C] in both, so either
    layout needs one GEMM call. bf16 experts are ordinary parameters in one allocation, first their
    own and then that of Megatron's DDP buffer, which begins with the last parameter; they are
    therefore registered from the last expert to the first. With ``compute`` their GEMMs read a
    quantized copy: the values of that storage format, or of a grid with one amax per expert.

    Biases are bf16 in every format: ``bias`` [E, R], or ``bias0 .. bias{E-1}`` [R]. The GEMM does
    not add them; callers add the result of :meth:`token_biases`, fused or scaled.

    Args:
        num_experts: number of local experts, E.
        out_features: number of output features, R.
        in_features: number of input features, C.
        format: block-scaled storage format, or None for bf16.
        compute: format or grid of the GEMMs of bf16 experts; None for the storage format.
        expert_layout: ``grouped`` for one parameter of all experts, ``indexed`` for one per expert.
        bias: whether there are biases, initially zero.
        fuse_wgrad_accumulation: whether to add weight gradients directly to ``main_grad`` if there
            is one, instead of returning them through autograd.
        delay_wgrad: whether to defer weight gradients to :meth:`backward_dw`.
        record_amax: whether to keep the amax of every quantized expert, see :meth:`amax`.
        make_storages: factory of the storages of quantized weights.
        backend: ``auto`` for kernels where available, ``reference`` for plain torch.
        name: name of the linear, for errors.
        device: device of the weights.

    Raises:
        LayoutError: the shape does not fit the format.
    """

    config: Any = None
    """Megatron's configuration of the layer, which Megatron-Bridge's adapters read."""
    amax_group: Any = None
    """Process group of several ranks that hold parts of these experts; None if they are whole."""

    def __init__(  # noqa: PLR0913  # keyword-only except the shape
        self,
        num_experts: int,
        out_features: int,
        in_features: int,
        *,
        format: BlockScaledFormat | None,
        compute: "BlockScaledFormat | PerExpertGrid | None" = None,
        expert_layout: ExpertLayout = "grouped",
        bias: bool = False,
        fuse_wgrad_accumulation: bool = True,
        delay_wgrad: bool = False,
        record_amax: bool = False,
        make_storages: MakeStorages = make_portable_storages,
        backend: Backend = "auto",
        name: str = "weight",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.shape = (num_experts, out_features, in_features)
        self.expert_layout = expert_layout
        self._names = {
            kind: [kind]
            if expert_layout == "grouped"
            else [f"{kind}{index}" for index in range(num_experts)]
            for kind in ("weight", "bias")
        }
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad = delay_wgrad
        self._delayed: deque[WgradFactors] = deque()
        self.handle = handle_of(self)
        self.quantized_copy: QuantizedCopy | FakeQuantizedCopy | None = None
        if compute is not None and format is None:
            self.quantized_copy = make_copy(compute, self.shape, f"{name}.weight", backend)
        if format is None:
            whole = torch.empty(self.shape, dtype=torch.bfloat16, device=device)
            weights = [part.data for part in self._cut(whole)]  # separate version counters
        else:
            storages = make_storages(
                format,
                self.shape,
                apart=expert_layout == "indexed",
                name=f"{name}.weight",
                device=device,
                record_amax=record_amax,
                backend=backend,
            )
            shape = self.shape if expert_layout == "grouped" else self.shape[1:]
            weights = [GroupedWeight(storage, shape) for storage in storages]
        named = [*zip(self._names["weight"], weights, strict=True)]
        for weight_name, weight in named[::-1] if format is None else named:
            self.register_parameter(weight_name, torch.nn.Parameter(weight))
        if bias:
            zeros = torch.zeros(self.shape[:2], dtype=torch.bfloat16, device=device)
            for bias_name, part in zip(self._names["bias"], self._cut(zeros), strict=True):
                biases: Any = torch.nn.Parameter(part.clone())
                biases.holds_biases = True  # [E, R] is no matrix for Muon
                self.register_parameter(bias_name, biases)

    def extra_repr(self) -> str:
        """Return shape, format and layout of the weights, and the operand of the GEMMs."""
        experts, rows, cols = self.shape
        storages = self.storages()
        format = storages[0].format.name if storages else "bf16"
        parts = [f"experts={experts}, [{rows}, {cols}]", f"format={format}"]
        if self.quantized_copy is not None:
            parts.append(f"compute={self.quantized_copy.format.name}")
        parts += [f"expert_layout={self.expert_layout}", f"bias={bool(self.biases())}"]
        return ", ".join(parts)

    @property
    def num_gemms(self) -> int:
        """Number of local experts, by the name of Transformer Engine's linears."""
        return self.shape[0]

    def storages(self) -> list[WeightStorage]:
        """Return the storage of each parameter; empty for bf16 experts."""
        weights = self.weights()
        return [w.quantized_storage for w in weights if isinstance(w, GroupedWeight)]

    @property
    def storage(self) -> WeightStorage | None:
        """The single storage of all experts; None in bf16, or if buckets store them separately."""
        storages = self.storages()
        return storages[0].whole_of(storages) if storages else None

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle the module without its delayed weight gradients."""
        return self.__dict__ | {"_delayed": deque()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, whose parameters were copied one by one."""
        super().__setstate__(state)
        self._lay_together()
        self.handle = handle_of(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GroupedLinear":
        """Move quantized experts as one storage. Calibrated amaxes move too, and stay fp32."""
        amaxes = held_amaxes(self)
        if self.storages():
            self._move_storages(fn)
            self._move_biases(fn)
        else:
            before = [weight.data_ptr() for weight in self.weights()]
            super()._apply(fn, recurse)
            if before != [weight.data_ptr() for weight in self.weights()]:
                self._lay_together()
        move_amaxes(self, amaxes, fn)
        return self

    @torch.no_grad()
    def _lay_together(self) -> None:
        """Merge bf16 experts that were copied one by one; those in a DDP buffer are contiguous."""
        weights = self.weights()
        if self.expert_layout == "indexed" and not self.storages() and not lie_together(weights):
            for weight, part in zip(weights, stack_experts(weights), strict=True):
                weight.data = part

    def _move_biases(self, fn: Callable[[Tensor], Tensor]) -> None:
        names = self._names["bias"] if self.biases() else ()
        moved = torch.nn.Module()
        moved._parameters = {name: self._parameters[name] for name in names}
        moved._apply(fn)  # replaces parameters that come from meta
        for name, bias in moved._parameters.items():
            vars(bias).update(vars(self._parameters[name]))
        self._parameters |= moved._parameters

    def _move_storages(self, fn: Callable[[Tensor], Tensor]) -> None:
        whole = self.storage
        if whole is None:
            for weight, storage in zip(self.weights(), self.storages(), strict=True):
                weight.quantized_storage = _moved(storage, fn)  # type: ignore[attr-defined]
            return
        moved = _moved(whole, fn)
        if moved is whole:
            return
        assert isinstance(moved, PortableStorage)  # copies are portable
        for index, weight in enumerate(self.weights()):
            old: WeightStorage = weight.quantized_storage  # type: ignore[attr-defined]
            new = moved if self.expert_layout == "grouped" else moved.expert(index)
            if moved.version == whole.version:
                new.set_copy_of(old)
            weight.quantized_storage = new  # type: ignore[attr-defined]

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Load the weights, then recorded and calibrated amaxes.

        Recorded amaxes are those of the masters that the weights were quantized from. They are kept
        until the next requantization, and change no byte: values dequantized from NVFP4 requantize
        to the same bytes with their own amax. Quantized weights keep their format and bucket even
        with ``assign=True``.
        """
        amax: Tensor | None = state_dict.pop(f"{prefix}weight_amax", None)
        take_calibrated_amaxes(self, state_dict, prefix, self.shape[0], self.name)
        if self.storages():
            local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        self.take_amax(amax)

    def weights(self) -> list[torch.nn.Parameter]:
        """Return the weights in expert order: one in ``grouped`` layout, E in ``indexed``."""
        return self._parameters_of("weight")

    def biases(self) -> list[torch.nn.Parameter]:
        """Return the biases in expert order, as many as weights; empty without bias."""
        return self._parameters_of("bias")

    def _parameters_of(self, kind: str) -> list[torch.nn.Parameter]:
        found = map(self._parameters.get, self._names[kind])
        return [parameter for parameter in found if parameter is not None]

    def token_biases(
        self, counts: Tensor, product: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the bias of each token's expert.

        Bias gradients are summed over each expert's tokens in ``dtype``, then rounded to bf16.

        Args:
            counts: number of tokens per expert, [E] integers on the host.
            product: output of the linear for these tokens, [T, R] bf16; a dependency, since its
                forward hooks gather the biases.
            dtype: dtype of the result; bf16 if None.

        Returns:
            [T, R].
        """
        after = product.detach().view(torch.int16)
        return _spread_biases(self.biases(), counts, dtype or product.dtype, after)

    @torch.no_grad()
    def load_values(self, values: Tensor, *, keep_for_masters: bool = False) -> None:
        """Set all experts.

        Args:
            values: values of all experts, [E, R, C] bf16; kept by reference if
                ``keep_for_masters``.
            keep_for_masters: whether to keep the values until the optimizer creates its masters.
        """
        for weight, part in zip(self.weights(), self._cut(values), strict=True):
            weight.copy_(part)
            if keep_for_masters and isinstance(weight, GroupedWeight):
                weight.quantized_storage.initial = part

    def _cut(self, stacked: Tensor) -> Sequence[Tensor]:
        return [stacked] if self.expert_layout == "grouped" else stacked.unbind(0)

    def forward(
        self, tokens: Tensor, ends: Tensor | None = None, *, m_splits: Tensor | None = None
    ) -> Any:
        """Multiply each expert's tokens by its weight.

        Args:
            tokens: tokens sorted by expert, [T, C] bf16; copied if not contiguous.
            ends: end of each expert's tokens, [E] int32 on the device of ``tokens``.
            m_splits: number of tokens of each expert, [E] integers on any device, in place of
                ``ends``. Adapters pass it on, and read it themselves.

        Returns:
            [T, R] bf16; with ``m_splits`` a pair with None, as Megatron's linears return.

        Raises:
            StateError: the weights are stale, or have changed since a delayed weight gradient.
        """
        if m_splits is not None:
            return self.forward(tokens, ends_of(m_splits, tokens)), None
        assert ends is not None
        tokens = tokens.contiguous()  # as GEMMs require of strides
        if torch.compiler.is_compiling():
            return compiled_gemm.multiply(tokens, ends, self)
        if self._delayed and self._delayed[0].version != self.version():
            self.require_wgrads_taken()
        return multiply(tokens, ends, self)

    def operand(self, direction: Direction) -> Tensor:
        """Return the GEMM operand of ``direction``, [E, R, C] bf16; see :meth:`version`.

        Read-only, since it may alias bf16 weights.

        Raises:
            StateError: the weights are stale or offloaded.
        """
        weights, storages = self.weights(), self.storages()
        for storage in storages:
            storage.require_fresh()
        if storages:
            whole = storages[0].whole_of(storages)
            if whole is not None:
                return whole.dequantize(direction)
            return torch.cat([storage.dequantize(direction) for storage in storages])
        self._require_memory(weights)
        if self.quantized_copy is not None:
            return self.quantized_copy.dequantize(
                weights,
                direction,
                keep=self.training,
                amax=calibrated_amax(self),
                group=self.amax_group,
            )
        if self.expert_layout == "grouped":
            return weights[0].detach()
        return stack_experts(weights)

    def _require_memory(self, weights: Sequence[Tensor]) -> None:
        if not has_memory(weights[0]):
            raise StateError(
                f"{self.name}.weight: expected the values of the weight, got none: they are "
                "offloaded. Call reload_from_cpu() on the buffers of the DDP module first."
            )

    def version(self) -> Version:
        """Return a value that changes whenever a weight is written or replaced."""
        storages = self.storages()
        if storages:
            return tuple(storage.version for storage in storages)
        return tuple(entry for w in self.weights() for entry in (w.data_ptr(), w._version))

    def call_pre_hooks(self) -> None:
        """Call the forward pre-hooks, which wait for the weights, without tokens."""
        for hook in self._forward_pre_hooks.values():
            hook(self, ())

    def keep_for_wgrad(self, factors: WgradFactors) -> None:
        """Keep the ``factors`` of a delayed weight gradient for :meth:`backward_dw`."""
        self._delayed.append(factors)

    def backward_dw(self) -> None:
        """Compute the oldest delayed weight gradient, if any, and accumulate it.

        The hooks of the weights run here instead of in the backward pass, so DDP counts a weight as
        ready when its gradient is.
        """
        if self._delayed:
            run_delayed_wgrad(self, self._delayed.popleft())

    def drop_delayed_wgrads(self) -> None:
        """Drop the delayed weight gradients, when gradients are zeroed."""
        self._delayed.clear()

    def require_wgrads_taken(self) -> None:
        """Raise StateError if a weight gradient is still delayed, which a step would lose."""
        if self._delayed:
            raise StateError(
                f"{self.name}.weight: expected the gradients of all backward passes before the "
                f"optimizer steps, got {len(self._delayed)} still delayed. Call backward_dw() "
                "once for each backward pass."
            )

    def clip_wgrad(self, wgrad: Tensor) -> Tensor:
        """Return a weight gradient, zero where GEMMs read a clipped value.

        Args:
            wgrad: weight gradient, [E, R, C] bf16; returned itself if nothing is clipped.

        Returns:
            [E, R, C] bf16.

        Raises:
            StateError: the weights are offloaded.
        """
        if self.quantized_copy is None:
            return wgrad
        weights = self.weights()
        self._require_memory(weights)
        return self.quantized_copy.clip_wgrad(weights, wgrad, calibrated_amax(self))

    def take_wgrad(self, wgrad: Tensor, ends: Sequence[GradientEnd]) -> list[Tensor | None]:
        """Accumulate the weight gradient into ``main_grad``, or return it for autograd.

        Args:
            wgrad: weight gradient, [E, R, C] bf16.
            ends: destination of each parameter's gradient.

        Returns:
            One bf16 gradient per parameter for autograd, of its shape, or None. After accumulation
            into ``main_grad`` it is zeros, see :class:`FusedNote`. Weights with other hooks return
            theirs through autograd, since such hooks may read or change it.

        Raises:
            StateError: weights to be read, or gradient memory, are offloaded.
        """
        wgrad = self.clip_wgrad(wgrad)
        gradients: list[Tensor | None] = []
        for weight, part, end in zip(self.weights(), self._cut(wgrad), ends, strict=True):
            main_grad = getattr(weight, "main_grad", None)
            if end is GradientEnd.NOWHERE:
                gradients.append(None)
            elif end is GradientEnd.LEAF and main_grad is not None and self._fuses_wgrad(weight):
                if isinstance(weight, GroupedWeight):
                    weight.quantized_storage.before_gradient()
                main_grad.add_(part)
                weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
                gradients.append(FusedNote.of(weight, part).zeros)
            else:
                if getattr(weight, "grad_added_to_main_grad", False):  # set by an earlier pass
                    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
                gradients.append(part)
        return gradients

    def _fuses_wgrad(self, weight: torch.nn.Parameter) -> bool:
        """Return whether a gradient may bypass autograd, because no other hook needs it.

        Autograd drops that of a weight frozen since the forward pass.
        """
        hooks: Iterable[Any] = (weight._backward_hooks or {}).values()
        return (
            self.fuse_wgrad_accumulation
            and weight.requires_grad
            and all(isinstance(hook, GradientNote) for hook in hooks)
            and not weight._post_accumulate_grad_hooks
        )


def ends_of(counts: Tensor, tokens: Tensor) -> Tensor:
    """Return the end of each expert's tokens, [E] int32 on the device of ``tokens``."""
    return counts.to(tokens.device).cumsum(0).to(torch.int32)


@partial(
    as_written, fake=lambda biases, _, dtype, after: biases[0].new_empty(after.shape, dtype=dtype)
)
def _spread_biases(
    biases: list[Tensor],
    counts: Tensor,
    dtype: torch.dtype,
    after: Tensor,  # unused; a dependency in a graph
) -> Tensor:
    cast = [bias.to(dtype) for bias in biases]
    rows = cast if cast[0].dim() == 1 else cast[0].unbind(0)
    pairs = zip(rows, counts.tolist(), strict=True)
    return torch.cat([row.expand(count, -1) for row, count in pairs])


def _moved(storage: WeightStorage, fn: Callable[[Tensor], Tensor]) -> WeightStorage:
    """Return ``fn`` of a storage; refuse another dtype, and another device for bucketed weights."""
    with torch.no_grad():
        moved = fn(GroupedWeight(storage))
    if moved.dtype != torch.bfloat16:
        raise StateError(
            f"{storage.name}: {storage.format.name} weights cannot become {moved.dtype} in place. "
            "Build the model with format: bf16 instead."
        )
    if isinstance(moved, GroupedWeight):
        new = moved.quantized_storage
    else:  # new values, as of ``to_empty``
        new = storage.empty_like(moved.device)
        if not moved.is_meta:
            new.write(moved.view(storage.shape))
    if storage.bucket is not None and new is not storage:
        raise StateError(
            f"{storage.name}: expected to stay on {storage.device}, where a bucket gathers it, got "
            f"{new.device}. Move the model before it is wrapped with DDP."
        )
    return new
