"""Quantization-aware training of Transformer Engine's bf16 experts: their GEMMs read a copy.

Transformer Engine's ``GroupedLinear`` asks ``_get_weight_tensors`` for the operands of its GEMMs.
:class:`WeightCopies` answers with fake-quantized values of all experts, made in one launch.
"""

from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from moe_optim.calibration.calibrated_amax import calibrated_amax
from moe_optim.calibration.fake_operations import fake_blocks
from moe_optim.calibration.fake_quantization import PER_EXPERT_GRIDS, PerExpertGrid
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError
from moe_optim.experts.copied_gradients import StraightThrough, clip_delayed, share_attributes
from moe_optim.experts.operands import copies_in, make_copy
from moe_optim.formats import BlockScaledFormat, get_format
from moe_optim.integration import patches
from moe_optim.integration.engine import apply_patches, original
from moe_optim.integration.installation import HOLDER, config_or_bf16, installed_config
from moe_optim.kernels.plan import Backend
from moe_optim.rules import copied_format

_EXPERTS = "megatron.core.transformer.moe.experts:TEGroupedMLP.__init__"
_MICROBATCH = "megatron.core.transformer.module:MegatronModule.set_is_first_microbatch"
_FIRST = 2**64 - 2
"""Sequence number that autograd runs before all others but those of parameters' gradients."""
_found: "MutableMapping[torch.nn.Module, tuple[WeightCopies, ...]]" = WeakKeyDictionary()
"""Model -> copies in it, as of its first step. Linears built later copy in every forward pass."""


class _Kept(NamedTuple):
    copies: Sequence[Tensor]
    amax: Tensor | None  # calibrated amaxes, by identity: others may come to lie where these were
    made_of: tuple[Any, ...]


class WeightCopies:
    """Operands of a grouped linear's GEMMs, in place of its ``_get_weight_tensors``.

    Between the first microbatch of a step and the optimizer step, training reads one copy: Megatron
    tells models of the former, see :func:`set_is_first_microbatch`, and optimizers the latter, see
    :class:`StepEnd`. Otherwise, and with other amaxes or where torch has counted a write, every
    forward pass makes its own copy, since torch cannot detect all writes to bf16 weights.

    A grid takes calibrated amaxes, and clips gradients by them; otherwise those of the current
    weights, of whole experts: ranks of expert tensor parallelism then make their copies together.
    """

    def __init__(
        self, linear: Any, format: BlockScaledFormat | PerExpertGrid, name: str, backend: Backend
    ) -> None:
        """Hand out copies of ``linear`` in ``format``; ``backend`` as of the plug-in."""
        self._linear = ref(linear)  # which holds these copies
        self.format, self.backend = format, backend
        shape = (linear.num_gemms, *linear.weight0.shape)
        self._quantizer = make_copy(format, shape, f"{name}.weight0", backend)
        self.is_in_step = False
        self._is_delayed_wgrad = False
        self._kept: _Kept | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without copies, which are derived from the weights."""
        return vars(self) | {"is_in_step": False, "_kept": None, "_linear": self.linear}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Refer to the copied linear, which holds these copies."""
        vars(self).update(state | {"_linear": ref(state["_linear"])})

    def __call__(self) -> list[Tensor]:
        """Return one tensor [R, C] per expert, with the attributes of its weight."""
        weights, amax = self.weights(), self._calibrated()
        if self._is_delayed_wgrad:
            return list(weights)
        made_of = (
            *((id(one), one.data_ptr(), one._version, one.requires_grad) for one in weights),
            None if amax is None or amax.is_inference() else amax._version,
        )
        keeps, kept = self.is_in_step and self.linear.training, self._kept
        if keeps and kept and kept.made_of == made_of and kept.amax is amax:
            copies = kept.copies
        else:
            copies = self._copy(weights, amax)
        if keeps:
            self._kept = _Kept(copies, amax, made_of)
        return list(copies)

    @property
    def linear(self) -> Any:
        """The linear, which must be alive."""
        return self._linear()

    def weights(self) -> list[torch.nn.Parameter]:
        """Return the weights of the linear, one parameter [R, C] per expert."""
        return type(self.linear)._get_weight_tensors(self.linear)

    def backward_dw(self) -> None:
        """Compute delayed weight gradients, which Transformer Engine stores in the weights."""
        self._is_delayed_wgrad = True
        try:
            type(self.linear).backward_dw(self.linear)
        finally:
            self._is_delayed_wgrad = False

    def clip_delayed(self) -> None:
        """Clip delayed weight gradients, before other hooks of the linear take them."""
        amax = self._calibrated()
        flat = None if amax is None else amax.flatten()
        clip_delayed(self.linear, self.weights(), flat, self.backend)

    def begin_step(self) -> None:
        """Renew the copy with the next forward pass, and keep it."""
        self.is_in_step, self._kept = True, None

    def end_step(self) -> None:
        """Drop the copy, since weights are about to change."""
        self.is_in_step, self._kept = False, None

    def _calibrated(self) -> Tensor | None:
        is_grid = isinstance(self.format, PerExpertGrid)
        return calibrated_amax(self.linear) if is_grid else None

    @torch.inference_mode(False)  # training may use the copies of a pass without gradients
    def _copy(self, weights: Sequence[Tensor], calibrated: Tensor | None) -> Sequence[Tensor]:
        """Return copies whose node passes the gradients of any number of backward passes on."""
        values = self._quantize([one.detach() for one in weights], calibrated)
        flat = None if calibrated is None else calibrated.flatten()
        copies: Sequence[Any] = StraightThrough.apply(
            values, self.linear, flat, self.backend, *weights
        )
        if (node := copies[0].grad_fn) is not None:
            # Autograd runs what is ready latest node first. Of an early microbatch, this one would
            # wait for all layers of a later one.
            node._set_sequence_nr(_FIRST)
        share_attributes(copies, weights, fuses=self.linear.fuse_wgrad_accumulation)
        return copies

    def _quantize(self, weights: Sequence[Tensor], calibrated: Tensor | None) -> Tensor:
        if isinstance(self.format, BlockScaledFormat) and self.format.is_row_only:
            values = fake_blocks(weights, self.format.name, self.backend)  # no bytes beside it
            return values.view(len(weights), *weights[0].shape)
        group = self.linear._pg_collection.expt_tp
        return self._quantizer.dequantize(
            weights, "rowwise", keep=False, amax=calibrated, group=group
        )


class StepEnd:
    """Observer of an optimizer that ends the step of all copies in its model."""

    def __init__(self, copies: Sequence[WeightCopies]) -> None:
        self._copies = copies

    def before_step(self) -> None:
        """Drop copies of weights that the step changes."""
        for copies in self._copies:
            copies.end_step()

    def before_save(self) -> None:
        """Do nothing: copies are not saved."""


def build_experts(
    self: Any,
    num_local_experts: int,
    config: Any,
    submodules: Any,
    pg_collection: Any = None,
    name: str | None = None,
) -> None:
    """Initialize ``TEGroupedMLP``, which then loads amaxes, and with ``compute`` has copies."""
    from moe_optim.calibration.state_entries import listen

    original(_EXPERTS)(self, num_local_experts, config, submodules, pg_collection, name)
    listen(self)
    copy_weights(self, config_or_bf16(), name or "experts")
    if installed_config() is not None and any(copies_in(self)):
        apply_patches(patches.COPIES, HOLDER)


def copy_weights(experts: torch.nn.Module, config: MoEOptimConfig, name: str) -> None:
    """Have the GEMMs of Transformer Engine's linears in ``experts`` read copies.

    Does nothing unless ``compute`` has the same values in GEMMs of both directions. ConfigError if
    one parameter holds all experts, LayoutError if a weight does not fit the format.
    """
    if (compute := copied_format(config)) is None:
        return
    from moe_optim.calibration.linears import grouped_linears

    format = PER_EXPERT_GRIDS.get(compute) or get_format(compute)
    for path, linear in grouped_linears(experts):
        if linear.single_grouped_weight:
            raise ConfigError(
                f"{name}.{path}: expected one parameter per expert for compute: {compute}, got "
                "one of all. Drop --moe-single-grouped-weight, and unset "
                "NVTE_GROUPED_LINEAR_SINGLE_PARAM."
            )
        copies = WeightCopies(linear, format, f"{name}.{path}", config.backend)
        linear._get_weight_tensors, linear.backward_dw = copies, copies.backward_dw
        if linear.need_backward_dw():  # before DDP registers its hooks, which reduce gradients
            linear.register_wgrad_accumulation_and_reduce_hooks(copies.clip_delayed)


def set_is_first_microbatch(self: Any) -> None:
    """Tell a model, as Megatron does, that the next forward pass is the first of a step."""
    original(_MICROBATCH)(self)
    if self not in _found:  # a walk over thousands of modules takes milliseconds
        _found[self] = tuple(copies_in(self))
    for copies in _found[self]:
        copies.begin_step()
