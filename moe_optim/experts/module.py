"""Portable experts: Megatron's local spec with one grouped GEMM per linear."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
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
from moe_optim.experts.activation import activate
from moe_optim.experts.converters import guard_converters
from moe_optim.experts.grouped_linear import GroupedLinear, ends_of
from moe_optim.experts.keys.layouts import LINEARS
from moe_optim.experts.sharding import (
    adapter_states,
    empty_extra_state,
    grouped_linear_of,
    list_shards,
)
from moe_optim.formats import BlockScaledFormat, get_format
from moe_optim.integration.engine import original
from moe_optim.integration.installation import installed_config
from moe_optim.library import as_written
from moe_optim.rules import Setup, check_setup
from moe_optim.weights.names import is_wrapper
from moe_optim.weights.storage import MakeStorages, make_portable_storages

if TYPE_CHECKING:
    from moe_optim.calibration.fake_quantization import PerExpertGrid

_GROUPED_MLP = "megatron.core.models.backends:LocalSpecProvider.grouped_mlp_modules"


def grouped_mlp_modules(
    self: backends.LocalSpecProvider, moe_use_grouped_gemm: bool
) -> Callable[..., torch.nn.Module]:
    """Return the builder of experts for ``LocalSpecProvider``: ours with grouped GEMMs."""
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

    Initial weights equal those of Megatron's ``SequentialMLP``: drawn in bf16 expert by expert, fc1
    then fc2, from the expert-parallel random stream. Biases start at zero.

    Under expert tensor parallelism a rank holds rows of gate and up, and the matching columns of
    fc2. Its outputs are then partial sums, which the token dispatcher reduces.

    ``format: auto`` is ``mxfp8`` here. Of ``pg_collection``, ``ep``, ``expt_tp`` and ``expt_dp``
    are used. ``name`` is the path in the model, for errors. ConfigError for an unsupported feature
    of Megatron's experts, or a shard that does not fit the format.
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
        settings = moe_optim_config.resolved("mxfp8")
        device = torch.device(torch.cuda.current_device())
        make = partial(
            GroupedLinear,
            num_local_experts,
            format=_find_format(settings.format),
            compute=_find_compute(settings.compute),
            expert_layout=settings.expert_layout,
            bias=config.add_bias_linear,
            fuse_wgrad_accumulation=settings.fuse_wgrad_accumulation,
            delay_wgrad=(
                config.delay_wgrad_compute or config.overlap_dispatch_backward_with_experts_wgrad
            ),
            record_amax=settings.record_amax,
            make_storages=_make_storages(settings.storage),
            backend=settings.backend,
            device=device,
        )
        where = name or "experts"
        self.linear_fc1 = make(2 * ffn, hidden, name=f"{where}.linear_fc1")
        self.linear_fc2 = make(hidden, ffn, name=f"{where}.linear_fc2")
        linears: list[Any] = [self.linear_fc1, self.linear_fc2]
        for partition_dim, linear in enumerate(linears):
            linear.config = config
            # read by Megatron-Bridge's converter where it does not know a class
            linear.tensor_model_parallel, linear.partition_dim = True, partition_dim
            if pg_collection.expt_tp.size() > 1:
                linear.amax_group = pg_collection.expt_tp
        guard_converters()
        self._initialize(keep_for_masters=settings.format != "bf16")
        for shard in list_shards(self):
            shard.describe(config)

    def _initialize(self, *, keep_for_masters: bool) -> None:
        if self.config.init_model_with_meta_device:  # no values on meta
            return
        methods = self.config.init_method, self.config.output_layer_init_method
        if not self.config.perform_initialization:
            methods = torch.Tensor.zero_, torch.Tensor.zero_
        draws = [*zip((self.linear_fc1, self.linear_fc2), methods, strict=True)]
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
            permuted_local_hidden_states: tokens sorted by expert, [T, hidden] bf16.
            tokens_per_expert: number of tokens per expert, [E] integers, any device.
            permuted_probs: routing weight of each token, [T], any float dtype; with
                ``moe_apply_probs_on_input`` it scales the input, otherwise the hidden states.

        Returns:
            [T, hidden] bf16, and None: biases are added already.
        """
        tokens, probs = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        if self.config.moe_apply_probs_on_input:
            tokens, probs = _scaled(tokens, probs), torch.ones_like(probs)
        ends = ends_of(tokens_per_expert, tokens)
        fc1, fc2 = (self._call_of(name, ends, tokens_per_expert) for name in LINEARS)
        hidden = fc1(tokens)
        if not self.config.add_bias_linear:
            return fc2(activate(hidden, None, probs, self.config)), None
        counts = tokens_per_expert.cpu()
        biases = grouped_linear_of(self, "linear_fc1").token_biases(counts, hidden)
        hidden = activate(hidden, biases, probs, self.config)
        output = fc2(hidden)
        biases = grouped_linear_of(self, "linear_fc2").token_biases(counts, output, probs.dtype)
        return _add_scaled(output, biases, probs), None

    def _call_of(self, name: str, ends: Tensor, counts: Tensor) -> Callable[[Tensor], Tensor]:
        linear: Any = getattr(self, name)
        # compiled GEMMs call the hooks at every run
        call = linear.forward if torch.compiler.is_compiling() else linear
        if not is_wrapper(linear):
            return partial(call, ends=ends)

        def multiply(tokens: Tensor) -> Any:
            output = call(tokens, m_splits=counts)  # which adapters of each expert need, too
            return output[0] if isinstance(output, tuple) else output

        return multiply

    def backward_dw(self) -> None:
        """Compute the delayed weight gradients of the oldest backward pass, if any.

        With ``delay_wgrad_compute`` or ``overlap_dispatch_backward_with_experts_wgrad``, Megatron's
        schedule calls this once per backward pass. Bias gradients are never delayed.
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
        ``.bias`` of [experts, R]; saved values are bf16. Each linear has an empty ``_extra_state``
        per expert, as Megatron's; amaxes, recorded and calibrated; and states of its adapter under
        ``.adapter.``. No rank communicates. ConfigError for ``singleton_local_shards``, one key per
        expert.
        """
        from moe_optim.calibration.state_entries import AmaxPlace, amax_entries

        if (metadata or {}).get("singleton_local_shards", False):
            raise ConfigError(
                "portable experts: singleton_local_shards: expected one key for all experts, got "
                "one key per expert. Save with Megatron's default metadata."
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
        from moe_optim.experts.loading import load_local_experts

        load_local_experts(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def place_of(self, local_expert: int | None) -> tuple[int, int]:
        """Return the index of an expert (None: of all local ones), and the number of indices."""
        rank, size = self.pg_collection.ep.rank(), self.pg_collection.ep.size()
        if local_expert is None:
            return rank, size
        return rank * self.num_local_experts + local_expert, size * self.num_local_experts


@as_written
def _scaled(tokens: Tensor, probs: Tensor) -> Tensor:
    return (probs * tokens).to(tokens.dtype)


@as_written
def _add_scaled(output: Tensor, biases: Tensor, probs: Tensor) -> Tensor:
    return (output + biases * probs).to(output.dtype)


def _make_storages(storage: str) -> MakeStorages:
    if storage == "portable":
        return make_portable_storages
    from moe_optim.weights.te.storage import make_te_storages

    return make_te_storages


def _find_compute(name: str | None) -> "BlockScaledFormat | PerExpertGrid | None":
    if name is None:
        return None
    from moe_optim.calibration.fake_quantization import PER_EXPERT_GRIDS

    return PER_EXPERT_GRIDS.get(name) or _find_format(name)


def _find_format(name: str | None) -> BlockScaledFormat | None:
    return None if name in (None, "bf16") else get_format(name)


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
