"""Megatron's experts of Transformer Engine on a CPU: its module, with linears that stand in."""

from functools import partial
from typing import Any

import torch

from moe_optim.calibration.calibrated_amax import calibrated_amax
from moe_optim.calibration.fake_quantization import PerExpertGrid
from moe_optim.formats import BlockScaledFormat
from moe_optim.weights.te.fields import read_values
from tests.support.te import te_stand_ins
from tests.support.te.grouped_gemm import GroupedGemm, by_hand


class GroupedLinear(torch.nn.Module):
    """What Megatron and the plug-in look at of a grouped linear, in plain torch.

    Weights are bf16 parameters, one or one an expert; with a format they are stand-ins of
    Transformer Engine's classes, which are saved and loaded and not trained. Tensor-parallel ranks
    each have a part of every expert, along rows (0) or columns (1). One parameter an expert is
    multiplied as in Transformer Engine, see ``GroupedGemm``; ``by_hand`` is a format or a grid
    whose values take their place, quantized anew at every call.
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        pg_collection: Any,
        cut_along: int,
        single: bool = False,
        format: BlockScaledFormat | None = None,
        fuses: bool = False,
        delays: bool = False,
        by_hand: BlockScaledFormat | PerExpertGrid | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation, self.by_hand = fuses, by_hand
        self.delayed: list[Any] | None = [] if delays else None
        self.wgrad_accumulation_and_reduce_hooks: list[Any] = []
        self.num_gemms, self.format, self.cut_along = num_gemms, format, cut_along
        self.single_grouped_weight, self.use_bias = single, False
        self._pg_collection = pg_collection
        shape = [output_size, input_size]
        shape[cut_along] //= pg_collection.expt_tp.size()
        values = torch.empty(num_gemms, *shape, dtype=torch.bfloat16)
        for expert in values:
            init_method(expert)
        named = {"weight": values} if single else {f"weight{e}": v for e, v in enumerate(values)}
        for name, value in named.items():
            if format is None:
                self.register_parameter(name, torch.nn.Parameter(value.clone()))
                getattr(self, name).allreduce = config.expert_model_parallel_size == 1
            else:
                self._parameters[name] = self._stand_in(value)

    def _stand_in(self, value: torch.Tensor) -> Any:
        member = te_stand_ins.NVFP4Tensor if self.format.has_global_amax else None
        member = member or te_stand_ins.MXFP8Tensor
        if self.single_grouped_weight:
            return te_stand_ins.GroupedTensor(member, self.format, value)
        return member(self.format, value)

    def values(self) -> torch.Tensor:
        """Return all experts [E, R, C]."""
        read = (lambda weight: weight) if self.format is None else read_values
        weights = [read(weight) for weight in self._parameters.values()]
        return weights[0] if self.single_grouped_weight else torch.stack(weights)

    def forward(self, tokens: torch.Tensor, splits: list[int]) -> tuple[torch.Tensor, None]:
        if self.format is None and not self.single_grouped_weight:
            weights = self._get_weight_tensors()
            if self.by_hand is not None:
                weights = by_hand(
                    weights,
                    self.by_hand,
                    fuses=self.fuse_wgrad_accumulation,
                    amax=calibrated_amax(self),
                    group=self._pg_collection.expt_tp,
                )
            splits = [int(tokens_of_one) for tokens_of_one in splits]
            options = self.fuse_wgrad_accumulation, self.delayed
            return GroupedGemm.apply(tokens, splits, *options, *weights), None
        parts = zip(tokens.split(splits), self.values(), strict=True)
        return torch.cat([part @ weight.t() for part, weight in parts]), None

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        return [getattr(self, f"weight{expert}") for expert in range(self.num_gemms)]

    def need_backward_dw(self) -> bool:
        return self.delayed is not None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def backward_dw(self) -> None:
        """Compute the oldest delayed gradients of weights, then call the hooks."""
        if self.delayed:
            gradients = self.delayed.pop(0)()
            for weight, gradient in zip(self._get_weight_tensors(), gradients, strict=True):
                if not self.fuse_wgrad_accumulation:
                    weight.grad = gradient
            for hook in self.wgrad_accumulation_and_reduce_hooks:
                hook()

    def _split_grouped_checkpoint_tensor(self, tensor: torch.Tensor, key: str) -> Any:
        return list(tensor.unbind(0))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict[str, Any]:
        """Return the entries of each expert, as ``TEGroupedLinear`` does in either layout."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        from moe_optim.experts.sharding import empty_extra_state

        groups, axis = self._pg_collection, len(sharded_offsets)
        first, count = groups.ep.rank() * self.num_gemms, groups.ep.size() * self.num_gemms
        state: dict[str, Any] = {}
        part = (axis + 1 + self.cut_along, groups.expt_tp.rank(), groups.expt_tp.size())
        trained = self.format is None and not self.single_grouped_weight
        weights = [*self.parameters()] if trained else self.values().detach()
        for expert, values in enumerate(weights):
            place = (axis, first + expert, count)
            state[f"{prefix}weight{expert}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}weight",
                values,  # a parameter, by which the optimizer finds the key of its states
                *sharded_offsets,
                place,
                part,
                replica_id=(0, 0, groups.expt_dp.rank()),
                prepend_axis_num=axis + 1,
            )
            state[f"{prefix}_extra_state{expert or ''}"] = empty_extra_state(
                f"{prefix}_extra_state", place, sharded_offsets, groups
            )
        return state

    @torch.no_grad()
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take experts in either layout; stand-ins get other bytes, which they tell nobody."""
        for key in [key for key in state_dict if key.startswith(f"{prefix}_extra_state")]:
            del state_dict[key]
        numbered = [f"{prefix}weight{expert}" for expert in range(self.num_gemms)]
        if self.single_grouped_weight and numbered[0] in state_dict:
            state_dict[f"{prefix}weight"] = torch.stack([state_dict.pop(key) for key in numbered])
        elif not self.single_grouped_weight and f"{prefix}weight" in state_dict:
            parts = state_dict.pop(f"{prefix}weight")
            state_dict.update(zip(numbered, parts, strict=True))
        if self.format is None:
            super()._load_from_state_dict(state_dict, prefix, *args)
            return
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *args)
        names = {f"{prefix}{name}": weight for name, weight in self._parameters.items()}
        unexpected, buffers = args[3], {f"{prefix}{name}" for name in self._buffers}
        unexpected.extend(key for key in state_dict if key not in {*names, *buffers})
        for key, weight in names.items():
            loaded = self._stand_in(state_dict[key])
            for field, value in vars(loaded).items():
                if isinstance(value, torch.Tensor) and "scale" not in field:
                    getattr(weight, field).copy_(value.view(getattr(weight, field).shape))


def make_experts(num_local_experts: int, config: Any, *, pg_collection: Any, **options: Any) -> Any:
    """Return Megatron's ``TEGroupedMLP`` with these linears.

    Args:
        num_local_experts: number of experts on this rank.
        config: Megatron's transformer configuration.
        pg_collection: process groups.
        options: keywords of :class:`GroupedLinear` from ``single`` on, then of ``TEGroupedMLP``.
    """
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    own = ("single", "format", "fuses", "delays", "by_hand")
    chosen = {key: options.pop(key) for key in own if key in options}
    linear = partial(GroupedLinear, **chosen)
    submodules = GroupedMLPSubmodules(
        linear_fc1=partial(linear, cut_along=0), linear_fc2=partial(linear, cut_along=1)
    )
    return TEGroupedMLP(
        num_local_experts, config, submodules, pg_collection=pg_collection, **options
    )


def build_with_te_experts(config: Any, **options: Any) -> None:
    """Install, and have Megatron build these experts for the rest of this process.

    Args:
        config: of the plug-in; None leaves Megatron as it is.
        options: as of :func:`make_experts`.
    """
    from megatron.core.models.backends import LocalSpecProvider

    from moe_optim.integration import installation

    if config is not None:
        installation.install(config)
    LocalSpecProvider.grouped_mlp_modules = lambda *_: partial(make_experts, **options)
