"""The portable experts: Megatron's local spec with one grouped product a linear."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling
from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.models import backends
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, StateError
from moe_optim.experts.activation import glu
from moe_optim.experts.amax import sharded_amax
from moe_optim.experts.calibrated_entry import calibrated_entry
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.keys.layouts import CALIBRATED_AMAX, LINEARS
from moe_optim.experts.loading import load_local_experts
from moe_optim.experts.sharding import empty_extra_state, list_shards
from moe_optim.experts.wrapped import adapter_states, grouped_linear_of
from moe_optim.fake_quantization import PER_EXPERT_GRIDS
from moe_optim.formats import BlockScaledFormat, get_format
from moe_optim.integration.engine import original
from moe_optim.integration.installation import installed_config
from moe_optim.library import as_written
from moe_optim.rules import Setup, check_setup
from moe_optim.weights.storage import make_portable_storages
from moe_optim.weights.te.factory import make_te_storages

_STORAGES = {"portable": make_portable_storages, "transformer_engine": make_te_storages}
_ACTIVATIONS = {"silu": F.silu, "quick_gelu": quick_gelu}
_GROUPED_MLP = "megatron.core.models.backends:LocalSpecProvider.grouped_mlp_modules"


def grouped_mlp_modules(
    self: backends.LocalSpecProvider, moe_use_grouped_gemm: bool
) -> Callable[..., torch.nn.Module]:
    """Return what ``LocalSpecProvider`` builds experts with: ours where grouping is asked for."""
    if not moe_use_grouped_gemm:
        return original(_GROUPED_MLP)(self, moe_use_grouped_gemm)
    if (config := installed_config()) is None:
        raise StateError(
            "moe_optim: expected install() to have run, got no configuration. Call "
            "moe_optim.install() before the model is built."
        )
    return partial(GroupedExperts, moe_optim_config=config)


class GroupedExperts(MegatronModule):
    """SwiGLU or quick-GeGLU experts of one layer, bf16 activations, weights in any storage format.

    Initial weights are those of Megatron's ``SequentialMLP``: drawn in bf16 expert by expert, fc1
    then fc2, from the expert-parallel random stream. Biases start at zero.

    Under expert tensor parallelism a rank holds rows of gate and up, and the columns of fc2 that go
    with them. Its outputs are then summands, which the token dispatcher adds up.

    Args:
        num_local_experts: experts on this rank.
        config: Megatron's transformer configuration.
        moe_optim_config: formats of storage and products, parameter layout, and how weight
            gradients accumulate. ``format: auto`` is ``mxfp8`` here.
        pg_collection: process groups; ``ep``, ``expt_tp`` and ``expt_dp`` are used.
        name: path of this module in the model, for errors.

    Raises:
        ConfigError: a feature of Megatron's experts that these do not have.
        LayoutError: this rank's part of a weight does not fit the format.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        moe_optim_config: MoEOptimConfig,
        pg_collection: Any,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        check_setup(Setup(config=moe_optim_config, portable=[config]), name or "experts")
        self.num_local_experts = num_local_experts
        self.pg_collection = pg_collection
        hidden = config.hidden_size
        ffn = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        knobs = moe_optim_config.resolved("mxfp8")
        device = torch.device(torch.cuda.current_device())
        make = partial(
            GroupedLinear,
            num_local_experts,
            format=_find_format(knobs.format),
            compute=PER_EXPERT_GRIDS.get(knobs.compute or "") or _find_format(knobs.compute),
            expert_layout=knobs.expert_layout,
            bias=config.add_bias_linear,
            fuse_wgrad_accumulation=knobs.fuse_wgrad_accumulation,
            delay_wgrad=(
                config.delay_wgrad_compute or config.overlap_dispatch_backward_with_experts_wgrad
            ),
            record_amax=knobs.record_amax,
            make_storages=_STORAGES[knobs.storage],
            backend=knobs.backend,
            device=device,
        )
        where = name or "experts"
        self.linear_fc1 = make(2 * ffn, hidden, name=f"{where}.linear_fc1")
        self.linear_fc2 = make(hidden, ffn, name=f"{where}.linear_fc2")
        self._initialize(keep_for_masters=knobs.format != "bf16")
        for shard in list_shards(self):
            shard.describe(config)

    def _initialize(self, *, keep_for_masters: bool) -> None:
        if self.config.init_model_with_meta_device:  # nothing holds values
            return
        if not self.config.perform_initialization:
            draws = [(self.linear_fc1, torch.Tensor.zero_), (self.linear_fc2, torch.Tensor.zero_)]
        else:
            draws = [
                (self.linear_fc1, self.config.init_method),
                (self.linear_fc2, self.config.output_layer_init_method),
            ]
        device = torch.device(torch.cuda.current_device())
        values = {
            linear: torch.empty(linear.shape, dtype=torch.bfloat16, device=device)
            for linear, _ in draws
        }
        for expert in range(self.num_local_experts):
            for linear, draw in draws:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    draw(values[linear][expert])
        for linear, drawn in values.items():
            linear.load_values(drawn, keep_for_masters=keep_for_masters)

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Run all local experts.

        Args:
            permuted_local_hidden_states: [T, hidden] bf16, sorted by expert.
            tokens_per_expert: [E] integers, on any device.
            permuted_probs: [T] routing weight of each token, any float dtype.

        Returns:
            [T, hidden] bf16, and None: biases are added already.
        """
        tokens, probs = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        fc1: Callable[..., Tensor] = self.linear_fc1
        fc2: Callable[..., Tensor] = self.linear_fc2
        if torch.compiler.is_compiling():  # their hooks are called by the products, at every run
            fc1, fc2 = self.linear_fc1.forward, self.linear_fc2.forward
        hidden = fc1(tokens, ends)
        if not self.config.add_bias_linear:
            return fc2(self._activate(hidden, None, probs), ends), None
        counts = tokens_per_expert.cpu()
        biases = grouped_linear_of(self, "linear_fc1").token_biases(counts, hidden)
        hidden = self._activate(hidden, biases, probs)
        output = fc2(hidden, ends)
        biases = grouped_linear_of(self, "linear_fc2").token_biases(counts, output, probs.dtype)
        return _add_scaled(output, biases, probs), None

    def _activate(self, hidden: Tensor, biases: Tensor | None, probs: Tensor) -> Tensor:
        """Apply the activation and the routing weights, fused or not as Megatron's MLP does."""
        config = self.config
        store_fp8 = config.activation_func_fp8_input_store
        offset, clamp_value = config.glu_linear_offset, config.activation_func_clamp_value
        name = "silu" if config.activation_func is F.silu else "quick_gelu"
        if _fuses_activation(config):
            return _fused_gate(hidden, biases, probs, name, store_fp8, offset, clamp_value)
        interleave_size = config.moe_mlp_glu_interleave_size
        return _gate(hidden, biases, probs, name, offset, clamp_value, interleave_size)

    def backward_dw(self) -> None:
        """Compute the weight gradients that the oldest backward pass left, if it left any.

        With ``delay_wgrad_compute`` or ``overlap_dispatch_backward_with_experts_wgrad`` it leaves
        both, and Megatron's schedule calls this once for each. Biases are never delayed.
        """
        for name in reversed(LINEARS):
            grouped_linear_of(self, name).backward_dw()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return all parameters under Megatron's expert keys, exchangeable with ``SequentialMLP``.

        Keys are ``{prefix}experts.linear_fcN.weight`` of global shape [experts, R, C], and
        ``.bias`` of [experts, R]; the values saved are bf16. With each linear goes an empty
        ``_extra_state`` an expert, which Megatron's own linears save and ask for, where amaxes are
        recorded ``.weight_amax`` of [experts, 1, 1], fp32, see :func:`sharded_amax`, and where it
        is calibrated ``.calibrated_amax``, see :func:`calibrated_entry`. What adapters around
        linears save stands behind ``.adapter.``. No rank communicates.

        Raises:
            ConfigError: one key an expert is asked for.
            LayoutError: something that hides a linear stands in its place; or see
                :func:`~moe_optim.experts.wrapped.adapter_states`.
        """
        if (metadata or {}).get("singleton_local_shards", False):
            raise ConfigError(
                "portable experts: singleton_local_shards: expected one key for all experts, got "
                "one key an expert. Save with Megatron's default metadata."
            )
        keys, axis, groups = f"{prefix}experts.", len(sharded_offsets), self.pg_collection
        state: dict[str, Any] = {}
        for shard in list_shards(self):
            place = (axis, *self.place_of(shard.expert))
            state[f"{prefix}{shard.linear}.{shard.name}"] = shard.sharded(
                keys, place, sharded_offsets, groups
            )
        for linear in LINEARS:
            place = (axis, *self.place_of(None))
            module = grouped_linear_of(self, linear)
            amax = sharded_amax(
                module, f"{keys}{linear}.weight_amax", place, sharded_offsets, groups
            )
            if amax is not None:
                state[f"{prefix}{linear}.weight_amax"] = amax
            state[f"{prefix}{linear}.{CALIBRATED_AMAX}"] = calibrated_entry(
                module, f"{keys}{linear}", module.shape[0], place, sharded_offsets, groups
            )
            for index in range(self.num_local_experts):
                place = (axis, *self.place_of(index))
                state[f"{prefix}{linear}._extra_state{index}"] = empty_extra_state(
                    f"{keys}{linear}._extra_state", place, sharded_offsets, groups
                )
        return state | adapter_states(self, prefix, sharded_offsets, metadata)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load this rank's experts, in whatever layout a state dict has them, or all of them."""
        load_local_experts(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def place_of(self, local_expert: int | None) -> tuple[int, int]:
        """Return the place of a local expert, or of all local ones, and how many there are."""
        rank, size = self.pg_collection.ep.rank(), self.pg_collection.ep.size()
        if local_expert is None:
            return rank, size
        return rank * self.num_local_experts + local_expert, size * self.num_local_experts


def _empty_gated(hidden: Tensor, *_: Any) -> Tensor:
    tokens, features = hidden.shape
    return hidden.new_empty(tokens, features // 2)


@partial(as_written, fake=_empty_gated)
def _fused_gate(  # noqa: PLR0917  # operations take no arguments by name
    hidden: Tensor,
    biases: Tensor | None,
    probs: Tensor,
    activation: str,
    store_fp8: bool,
    linear_offset: float,
    clamp_value: float | None,
) -> Tensor:
    """Call what Megatron compiles by itself; as part of another graph it might round otherwise."""
    gated: Tensor
    if activation == "quick_gelu":
        gated = weighted_bias_quick_geglu_impl(
            hidden, biases, probs, store_fp8, linear_offset, clamp_value
        )
    else:
        gated = weighted_bias_swiglu_impl(hidden, biases, probs, store_fp8)
    return gated


@partial(as_written, fake=_empty_gated)
def _gate(  # noqa: PLR0917  # operations take no arguments by name
    hidden: Tensor,
    biases: Tensor | None,
    probs: Tensor,
    activation: str,
    linear_offset: float,
    clamp_value: float | None,
    interleave_size: int | None,
) -> Tensor:
    if biases is not None:
        hidden = hidden + biases
    gated = glu(
        hidden,
        _ACTIVATIONS[activation],
        linear_offset=linear_offset,
        clamp_value=clamp_value,
        interleave_size=interleave_size,
    )
    return (gated * probs).to(gated.dtype)


@as_written
def _add_scaled(output: Tensor, biases: Tensor, probs: Tensor) -> Tensor:
    return (output + biases * probs).to(output.dtype)


def _find_format(name: str | None) -> BlockScaledFormat | None:
    return None if name in (None, "bf16") else get_format(name)


def _fuses_activation(config: TransformerConfig) -> bool:
    """Return whether Megatron would call its fused activation; it has none for interleaving."""
    return config.bias_activation_fusion and config.moe_mlp_glu_interleave_size is None


def first_experts(model_chunks: Iterable[torch.nn.Module]) -> dict[torch.nn.Parameter, int]:
    """Return of each weight of portable experts which of all experts its first one is."""
    return {
        shard.parameter: module.place_of(shard.expert or 0)[0]
        for chunk in model_chunks
        for module in chunk.modules()
        if isinstance(module, GroupedExperts)
        for shard in list_shards(module)
        if shard.kind == "weight"
    }
