"""Portable experts: Megatron's local spec with one grouped GEMM per linear."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models import backends
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moe_optim.calibration.fake_quantization import PER_EXPERT_GRIDS
from moe_optim.calibration.state_entries import AmaxPlace, amax_entries
from moe_optim.config import Compute, MoEOptimConfig
from moe_optim.errors import ConfigError, refuse
from moe_optim.experts.activation import activate, fuses_activation
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.keys.layouts import LINEARS
from moe_optim.experts.loading import load_local_experts
from moe_optim.experts.sharding import (
    adapter_states,
    empty_extra_state,
    grouped_linear_of,
    list_shards,
)
from moe_optim.formats import BlockScaledFormat, get_format
from moe_optim.integration.patching.active import active_config
from moe_optim.integration.patching.engine import original
from moe_optim.library import as_written
from moe_optim.weights.storage import make_portable_storages
from moe_optim.weights.te.storage import make_te_storages

_STORAGES = {"portable": make_portable_storages, "transformer_engine": make_te_storages}
_GROUPED_MLP = "megatron.core.models.backends:LocalSpecProvider.grouped_mlp_modules"


def grouped_mlp_modules(
    self: backends.LocalSpecProvider, moe_use_grouped_gemm: bool
) -> Callable[..., torch.nn.Module]:
    """Return the builder of experts for ``LocalSpecProvider``: ours with grouped GEMMs."""
    if not moe_use_grouped_gemm:
        return original(_GROUPED_MLP)(self, moe_use_grouped_gemm)
    return partial(GroupedExperts, moe_optim_config=active_config())


class GroupedExperts(MegatronModule):
    """SwiGLU or quick-GeGLU experts of one layer, bf16 activations, weights in any storage format.

    Initial weights are those of Megatron's ``SequentialMLP``: drawn in bf16 expert by expert, fc1
    then fc2, from the expert-parallel random stream. Biases start at zero.

    Under expert tensor parallelism a rank holds rows of gate and up, and the columns of fc2 that go
    with them. Its outputs are then summands, which the token dispatcher adds up.

    Args:
        num_local_experts: experts on this rank.
        config: Megatron's transformer configuration.
        moe_optim_config: formats of storage and GEMMs, parameter layout, and accumulation of weight
            gradients. ``format: auto`` is ``mxfp8`` here.
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
        _refuse_unsupported(config, pg_collection, moe_optim_config.compute)
        self.num_local_experts = num_local_experts
        self.pg_collection = pg_collection
        hidden = config.hidden_size
        ffn = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        settings = moe_optim_config.resolved("mxfp8")
        device = torch.device(torch.cuda.current_device())
        make = partial(
            GroupedLinear,
            num_local_experts,
            format=_find_format(settings.format),
            compute=PER_EXPERT_GRIDS.get(settings.compute or "") or _find_format(settings.compute),
            expert_layout=settings.expert_layout,
            bias=config.add_bias_linear,
            fuse_wgrad_accumulation=settings.fuse_wgrad_accumulation,
            delay_wgrad=(
                config.delay_wgrad_compute or config.overlap_dispatch_backward_with_experts_wgrad
            ),
            record_amax=settings.record_amax,
            make_storages=_STORAGES[settings.storage],
            backend=settings.backend,
            device=device,
        )
        where = name or "experts"
        self.linear_fc1 = make(2 * ffn, hidden, name=f"{where}.linear_fc1")
        self.linear_fc2 = make(hidden, ffn, name=f"{where}.linear_fc2")
        self._initialize(keep_for_masters=settings.format != "bf16")
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
        if torch.compiler.is_compiling():  # GEMMs call their hooks, at every run
            fc1, fc2 = self.linear_fc1.forward, self.linear_fc2.forward
        hidden = fc1(tokens, ends)
        if not self.config.add_bias_linear:
            return fc2(activate(hidden, None, probs, self.config), ends), None
        counts = tokens_per_expert.cpu()
        biases = grouped_linear_of(self, "linear_fc1").token_biases(counts, hidden)
        hidden = activate(hidden, biases, probs, self.config)
        output = fc2(hidden, ends)
        biases = grouped_linear_of(self, "linear_fc2").token_biases(counts, output, probs.dtype)
        return _add_scaled(output, biases, probs), None

    def backward_dw(self) -> None:
        """Compute the delayed weight gradients of the oldest backward pass, if there are any.

        With ``delay_wgrad_compute`` or ``overlap_dispatch_backward_with_experts_wgrad`` a backward
        pass delays both, and Megatron's schedule calls this once for each. Biases are never
        delayed.
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
        ``.bias`` of [experts, R]; saved values are bf16. Each linear also has an empty
        ``_extra_state`` per expert, which Megatron's own linears save and load; ``.weight_amax`` of
        [experts, 1, 1], fp32, where amaxes are recorded; ``.calibrated_amax`` where it is
        calibrated; and the states of an adapter around it behind ``.adapter.``. No rank
        communicates.

        Raises:
            ConfigError: ``singleton_local_shards``, one key per expert.
            LayoutError: a wrapper other than an adapter hides a linear; or see
                :func:`~moe_optim.experts.sharding.adapter_states`.
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
            module = grouped_linear_of(self, linear)
            amaxes = amax_entries(
                module,
                f"{keys}{linear}",
                AmaxPlace.of(self.num_local_experts, sharded_offsets, groups),
                are_recorded=module.amax() is not None,
            )
            state |= {f"{prefix}{linear}.{kind}": entry for kind, entry in amaxes.items()}
            for index in range(self.num_local_experts):
                place = (axis, *self.place_of(index))
                state[f"{prefix}{linear}._extra_state{index}"] = empty_extra_state(
                    f"{keys}{linear}._extra_state", place, sharded_offsets, groups
                )
        return state | adapter_states(self, prefix, sharded_offsets, metadata)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load this rank's experts from a state dict of them, or of all, in any layout."""
        load_local_experts(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def place_of(self, local_expert: int | None) -> tuple[int, int]:
        """Return the place of a local expert, or of all local ones, and the number of places."""
        rank, size = self.pg_collection.ep.rank(), self.pg_collection.ep.size()
        if local_expert is None:
            return rank, size
        return rank * self.num_local_experts + local_expert, size * self.num_local_experts


@as_written
def _add_scaled(output: Tensor, biases: Tensor, probs: Tensor) -> Tensor:
    return (output + biases * probs).to(output.dtype)


def _find_format(name: str | None) -> BlockScaledFormat | None:
    return None if name in (None, "bf16") else get_format(name)


def _graphs_experts(config: TransformerConfig) -> bool:
    """Return whether CUDA graphs hold experts: ``moe``, whole layers or whole iterations."""
    modules = config.cuda_graph_modules
    return config.cuda_graph_impl != "none" and (not modules or CudaGraphModule.moe in modules)


def first_experts(model_chunks: Iterable[torch.nn.Module]) -> dict[torch.nn.Parameter, int]:
    """Return weight of portable experts -> global id of its first expert."""
    return {
        shard.parameter: module.place_of(shard.expert or 0)[0]
        for chunk in model_chunks
        for module in chunk.modules()
        if isinstance(module, GroupedExperts)
        for shard in list_shards(module)
        if shard.kind == "weight"
    }


def _refuse_unsupported(
    config: TransformerConfig, pg_collection: Any, compute: Compute | None = None
) -> None:
    size = pg_collection.expt_tp.size()
    refuse(
        unsupported_features(config, tensor_parallel=size, compute=compute),
        expected="portable experts: expected features they have",
        remedy="Change these flags, or drop --moe-grouped-gemm for stock experts.",
    )


def unsupported_features(
    config: TransformerConfig, *, tensor_parallel: int, compute: Compute | None = None
) -> dict[str, bool]:
    """Return every feature that portable experts do not have -> whether ``config`` requests it.

    Args:
        config: Megatron's transformer configuration.
        tensor_parallel: number of ranks that share an expert.
        compute: format of the GEMMs.
    """
    values = vars(config) | {
        "interleave_size": config.moe_mlp_glu_interleave_size or 1,
        "tensor_parallel": tensor_parallel,
        "compute": compute,
    }
    return {
        feature.format_map(values): bool(is_requested(config, tensor_parallel, compute))
        for feature, is_requested in _UNSUPPORTED.items()
    }


def _fuses_swiglu(config: TransformerConfig) -> bool:
    return fuses_activation(config) and config.activation_func is F.silu


_UNSUPPORTED: dict[str, Callable[[TransformerConfig, int, Compute | None], Any]] = {
    "biases with fused SwiGLU (give --disable-bias-linear or --no-bias-swiglu-fusion)": (
        lambda config, *_: _fuses_swiglu(config) and config.add_bias_linear
    ),
    "an activation other than --swiglu or --quick-geglu": lambda config, *_: (
        not (config.gated_linear_unit and config.activation_func in (F.silu, quick_gelu))
    ),
    "--activation-func-clamp-value with fused SwiGLU (give --no-bias-swiglu-fusion)": (
        lambda config, *_: _fuses_swiglu(config) and config.activation_func_clamp_value is not None
    ),
    "--moe-mlp-glu-interleave-size {interleave_size}, which does not divide "
    "--moe-ffn-hidden-size {moe_ffn_hidden_size}": lambda config, *_: (
        config.moe_ffn_hidden_size % (config.moe_mlp_glu_interleave_size or 1)
    ),
    "--use-te-activation-func": lambda config, *_: config.use_te_activation_func,
    "--moe-apply-probs-on-input": lambda config, *_: config.moe_apply_probs_on_input,
    "--moe-latent-size": lambda config, *_: config.moe_latent_size is not None,
    "--expert-tensor-parallel-size {tensor_parallel}, which does not divide "
    "--moe-ffn-hidden-size {moe_ffn_hidden_size}": lambda config, size, _: (
        config.moe_ffn_hidden_size % size
    ),
    "--moe-mlp-glu-interleave-size with --expert-tensor-parallel-size above 1": (
        lambda config, size, _: config.moe_mlp_glu_interleave_size is not None and size > 1
    ),
    "moe_optim.compute {compute} with --expert-tensor-parallel-size above 1 (the amax would be "
    "that of a part of an expert)": (
        lambda _, size, compute: compute in PER_EXPERT_GRIDS and size > 1
    ),
    "--use-cpu-initialization": lambda config, *_: config.use_cpu_initialization,
    "a --params-dtype other than bf16 (give --bf16)": (
        lambda config, *_: config.params_dtype != torch.bfloat16
    ),
    "--fp8-format or --fp4-format": lambda config, *_: config.fp8 or config.fp4,
    "--cuda-graph-impl over experts (a replay skips what finds stale weights or renews copies; "
    "give --cuda-graph-modules without moe)": lambda config, *_: _graphs_experts(config),
    "--recompute-modules moe_act (give moe, which recomputes the whole layer)": lambda config, *_: (
        config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
    ),
    "--offload-modules expert_fc1 or moe_act": lambda config, *_: (
        config.fine_grained_activation_offloading
        and not {"expert_fc1", "moe_act"}.isdisjoint(config.offload_modules)
    ),
    "--moe-paged-stash": lambda config, *_: config.moe_paged_stash,
    "--use-transformer-engine-op-fuser": lambda config, *_: config.use_transformer_engine_op_fuser,
    "--expert-tensor-parallel-num-weight-shards above --expert-tensor-parallel-size": (
        lambda config, *_: config.expert_gtp_weight_remat_size > 1
    ),
}
"""Feature, with values of the configuration -> whether (config, tensor_parallel, compute) is it."""
