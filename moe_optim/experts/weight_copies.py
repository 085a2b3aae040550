"""Quantization-aware training of Transformer Engine's bf16 experts: their GEMMs read a copy.

Transformer Engine's ``GroupedLinear`` asks ``_get_weight_tensors`` for the operands of its GEMMs.
:class:`WeightCopies` answers with fake-quantized values of all experts, made in one launch.
"""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_optim.calibration.fake_operations import fake_blocks
from moe_optim.calibration.linears import grouped_linears
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError
from moe_optim.formats import BlockScaledFormat, get_format
from moe_optim.integration.engine import original
from moe_optim.integration.installation import config_or_bf16
from moe_optim.kernels.plan import Backend
from moe_optim.rules import copied_format

_EXPERTS = "megatron.core.transformer.moe.experts:TEGroupedMLP.__init__"
_MICROBATCH = "megatron.core.transformer.module:MegatronModule.set_is_first_microbatch"
_FIRST = 2**64 - 2
"""Sequence number that autograd runs before all others but those of parameters' gradients."""
_found: "MutableMapping[torch.nn.Module, tuple[WeightCopies, ...]]" = WeakKeyDictionary()
"""Model -> copies in it, as of its first step. Linears built later copy in every forward pass."""


class WeightCopies:
    """Operands of a grouped linear's GEMMs, in place of its ``_get_weight_tensors``.

    Between the first microbatch of a step and the optimizer step, training reads one copy: Megatron
    tells models of the former, see :func:`set_is_first_microbatch`, and optimizers the latter, see
    :class:`StepEnd`. Outside of it, in evaluation, and when torch has counted a write, every
    forward pass makes its own copy, since torch cannot detect all writes to bf16 weights.
    """

    def __init__(self, linear: Any, format: BlockScaledFormat, backend: Backend) -> None:
        """Hand out copies of ``linear`` in ``format``; ``backend`` as of the plug-in."""
        self.linear, self.format, self.backend = linear, format, backend
        self.is_in_step = False
        self._is_delayed_wgrad = False
        self._copies: Sequence[Tensor] = ()
        self._made_of: tuple[tuple[int, int, bool], ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without copies, which are derived from the weights."""
        return vars(self) | {"is_in_step": False, "_copies": (), "_made_of": ()}

    def __call__(self) -> list[Tensor]:
        """Return one tensor [R, C] per expert, with the attributes of its weight."""
        weights = self.weights()
        if self._is_delayed_wgrad:
            return list(weights)
        made_of = tuple((one.data_ptr(), one._version, one.requires_grad) for one in weights)
        is_kept = self.is_in_step and self.linear.training
        if is_kept and made_of == self._made_of:
            return list(self._copies)
        copies = self._copy(weights)
        if is_kept:
            self._copies, self._made_of = copies, made_of
        return list(copies)

    def weights(self) -> list[torch.nn.Parameter]:
        """Return the weights of the linear, one parameter [R, C] per expert."""
        weights: list[torch.nn.Parameter] = type(self.linear)._get_weight_tensors(self.linear)
        return weights

    def backward_dw(self) -> None:
        """Compute delayed weight gradients, which Transformer Engine stores in the weights."""
        self._is_delayed_wgrad = True
        try:
            type(self.linear).backward_dw(self.linear)
        finally:
            self._is_delayed_wgrad = False

    def begin_step(self) -> None:
        """Renew the copy with the next forward pass, and keep it."""
        self.is_in_step, self._copies, self._made_of = True, (), ()

    def end_step(self) -> None:
        """Drop the copy, since weights are about to change."""
        self.is_in_step, self._copies, self._made_of = False, (), ()

    @torch.inference_mode(False)  # training may use the copies of a pass without gradients
    def _copy(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return copies whose node passes the gradients of any number of backward passes on."""
        values = fake_blocks([one.detach() for one in weights], self.format.name, self.backend)
        values = values.view(len(weights), *weights[0].shape)
        copies: Sequence[Any] = _StraightThrough.apply(values, self.linear, *weights)
        for copy, weight in zip(copies, weights, strict=True):
            vars(copy).update(vars(weight))  # main_grad, and flags that Transformer Engine reads
            copy._do_not_offload = True  # with activations, as Megatron does with parameters
        if (node := copies[0].grad_fn) is not None:
            # Autograd runs what is ready latest node first. Of an early microbatch, this one would
            # wait for all layers of a later one.
            node._set_sequence_nr(_FIRST)
        return copies


class _StraightThrough(torch.autograd.Function):
    """Views of a copy, whose gradients are those of the weights."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, linear: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.fused = weights if linear.fuse_wgrad_accumulation else ()
        return values.unbind(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        for weight in ctx.fused:  # Transformer Engine has marked the views, and returns dummies
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = True
        return None, None, *gradients


class StepEnd:
    """Observer of an optimizer that ends the step of all copies in its model."""

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        self._copies = [copies for chunk in chunks for copies in copies_in(chunk)]

    def before_step(self) -> None:
        """Drop copies of weights that the step changes."""
        for copies in self._copies:
            copies.end_step()

    def before_save(self) -> None:
        """Do nothing: copies are not saved."""


def copies_of(module: torch.nn.Module) -> WeightCopies | None:
    """Return what hands out copies of a linear's weights, None if its GEMMs read them."""
    copies = vars(module).get("_get_weight_tensors")
    return copies if isinstance(copies, WeightCopies) else None


def copies_in(model: torch.nn.Module) -> Iterator[WeightCopies]:
    """Yield :func:`copies_of` all linears of a model that have them."""
    yield from filter(None, map(copies_of, model.modules()))


def build_experts(
    self: Any,
    num_local_experts: int,
    config: Any,
    submodules: Any,
    pg_collection: Any = None,
    name: str | None = None,
) -> None:
    """Initialize Megatron's ``TEGroupedMLP``; with a row-only ``compute``, give it copies."""
    original(_EXPERTS)(self, num_local_experts, config, submodules, pg_collection, name)
    copy_weights(self, config_or_bf16(), name or "experts")


def copy_weights(experts: torch.nn.Module, config: MoEOptimConfig, name: str) -> None:
    """Have the GEMMs of Transformer Engine's linears in ``experts`` read copies.

    Does nothing unless ``compute`` is a row-only format.

    Raises:
        ConfigError: one parameter holds all experts.
        LayoutError: a weight does not fit the format.
    """
    if (compute := copied_format(config)) is None:
        return
    format = get_format(compute)
    for path, linear in grouped_linears(experts):
        if linear.single_grouped_weight:
            raise ConfigError(
                f"{name}.{path}: expected one parameter per expert for compute: {compute}, got "
                "one of all. Drop --moe-single-grouped-weight, and unset "
                "NVTE_GROUPED_LINEAR_SINGLE_PARAM."
            )
        format.check_shape((1, *linear.weight0.shape), f"{name}.{path}.weight0")
        copies = WeightCopies(linear, format, config.backend)
        linear._get_weight_tensors, linear.backward_dw = copies, copies.backward_dw


def set_is_first_microbatch(self: Any) -> None:
    """Tell a model, as Megatron does, that the next forward pass is the first of a step."""
    original(_MICROBATCH)(self)
    if self not in _found:  # a walk over thousands of modules takes milliseconds
        _found[self] = tuple(copies_in(self))
    for copies in _found[self]:
        copies.begin_step()
