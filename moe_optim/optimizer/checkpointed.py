"""A distributed optimizer whose states load into another expert layout, or are refused."""

from types import MappingProxyType
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from moe_optim.checkpoint.expert_entries import with_members
from moe_optim.checkpoint.flat_states import (
    Asked,
    flat_states_to_load,
    flat_states_to_save,
    load_flat_states,
    manifest_key,
    manifest_object,
    manifest_of,
    require_same_order,
)
from moe_optim.checkpoint.legacy_states import rearranged_states
from moe_optim.checkpoint.state_manifest import MANIFEST, StateManifest
from moe_optim.checkpoint.unmarked_states import holds_several_experts, manifest_of_unmarked_file
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.integration import patches
from moe_optim.integration.agreement import agree
from moe_optim.integration.engine import apply_patches, patch_state
from moe_optim.integration.installation import OPTIMIZERS, config_or_bf16
from moe_optim.optimizer.chained import check_masters

_NOT_SAVED = (
    "Nothing has been saved. Load an earlier checkpoint, or set moe_optim.save_nonfinite=true to "
    "save them as they are."
)


class CheckpointedOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer, with a manifest in every state that it saves.

    Flat states are read by the manifest they were saved with; states under the names of parameters
    are right with any number of buckets and with one parameter for all experts.

    Attributes:
        knobs: the configuration it was built with.
        asked: what its last request for a manifest needs, when a checkpoint is loaded.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Shard the masters; arguments are Megatron's."""
        super().__init__(*args, **kwargs)
        self.knobs = config_or_bf16()
        self.asked: Asked | None = None
        self._for_model_space = False
        # They stay until uninstall(): this optimizer asks for what only the replacement can find.
        apply_patches(patches.CHECKPOINTS, holder=OPTIMIZERS)
        if not self.is_stub_optimizer and not self.ddp_config.use_megatron_fsdp:
            self._order_group_indices()

    def _order_group_indices(self) -> None:
        """Map every parameter to its place in the installed group.

        Megatron numbers a group's parameters as they come, but installs fp32 ones before bf16
        ones, so states of a mixed group would be saved and loaded under each other's name.
        """
        for index, groups in enumerate(
            zip(self.model_fp32_groups, self.model_float16_groups, strict=True)
        ):
            for order, param in enumerate([*groups[0], *groups[1]]):
                self.model_param_group_index_map[param] = (index, order)

    def _get_main_param_and_optimizer_states(self, model_param: torch.nn.Parameter) -> Any:
        """Return master and moments as values; Megatron forgets what scaled moments stand for.

        Moments in bf16 are themselves; those in fp16 and fp8 are copies in fp32.
        """
        states = super()._get_main_param_and_optimizer_states(model_param)
        for name in self._scaled_moments & states.keys():
            states[name] = self.optimizer.get_unscaled_state(states["param"], name)
        return states

    @torch.no_grad()  # fp32 parameters are their own masters: views of leaves
    def _set_main_param_and_optimizer_states(
        self, model_param: torch.nn.Parameter, tensors: dict[str, Any]
    ) -> None:
        """Take master and moments, as :meth:`_get_main_param_and_optimizer_states` has them."""
        # Megatron copies into what the getter returns, of which scaled moments are copies
        super()._set_main_param_and_optimizer_states(model_param, tensors)
        group, order = self.model_param_group_index_map[model_param]
        master = self.optimizer.param_groups[group]["params"][order]
        for name in self._scaled_moments & tensors.keys():
            self.optimizer.set_scaled_state(master, name, tensors[name].float())

    @property
    def _scaled_moments(self) -> set[str]:
        """Moments that mean something else than their elements do: those in fp16 and fp8."""
        if not self.config.use_precision_aware_optimizer or (
            self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8  # masters are Adam's, too
        ):
            return set()
        dtypes = {"exp_avg": self.config.exp_avg_dtype, "exp_avg_sq": self.config.exp_avg_sq_dtype}
        return {name for name, dtype in dtypes.items() if dtype in (torch.float16, torch.uint8)}

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any = MappingProxyType({}),
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return states to save or load, with a manifest of them; arguments are Megatron's.

        Every rank must call it.

        Raises:
            ConfigError: no sharding type, or the one that Megatron still takes for its default and
                no longer can save.
            NonFiniteError: to save, some master or moment is Inf or NaN, and ``save_nonfinite`` is
                not set.
            StateError: to load, after ``uninstall()``.
        """
        if is_loading and any(patch_state(patch) != "applied" for patch in patches.CHECKPOINTS):
            raise StateError(
                "optimizer.sharded_state_dict: expected the plug-in to be installed, as Megatron "
                "alone does not find what this optimizer asks for, got none. Call "
                "moe_optim.install() before the checkpoint is loaded."
            )
        chosen = sharding_type or (metadata or {}).get("distrib_optim_sharding_type")
        if chosen in (None, "fully_sharded_model_space"):
            raise ConfigError(
                "optimizer.sharded_state_dict: metadata['distrib_optim_sharding_type']: expected "
                f"dp_reshardable or fully_reshardable, got {chosen}. Megatron no longer saves "
                "fully_sharded_model_space; give one of the two, or --no-load-optim where it is a "
                "checkpoint that names none."
            )
        if not is_loading and not self.knobs.save_nonfinite:
            check_masters(self, _NOT_SAVED, with_moments=True)
        state = super().sharded_state_dict(
            model_sharded_state_dict, is_loading, sharding_type, metadata
        )
        state[MANIFEST] = manifest_object(
            self,
            model_sharded_state_dict,
            is_loading=is_loading,
            is_flat=chosen == "dp_reshardable",
        )
        return state

    def sharded_param_state_dp_reshardable(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Return states as they lie in buckets; arguments are Megatron's."""
        if not is_loading:
            return flat_states_to_save(self)
        manifest = manifest_of(self)
        return flat_states_to_load(self, manifest, manifest_key(self, manifest))

    def load_parameter_state_from_dp_reshardable(self, state_dict: Any) -> None:
        """Take states that were asked for by :meth:`sharded_param_state_dp_reshardable`."""
        load_flat_states(self, state_dict)

    def sharded_param_state_fully_reshardable(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Return states under the names of their parameters; arguments are Megatron's.

        Megatron 0.19 takes each parameter's states from where it lies in the buffer, but out of
        tensors without the padding between buckets: after the first bucket all are shifted.
        """
        self._for_model_space = True
        try:
            return super().sharded_param_state_fully_reshardable(
                with_members(self, model_sharded_state_dict), is_loading, metadata
            )
        finally:
            self._for_model_space = False

    def get_parameter_state_dp_zero(self, *args: Any, **kwargs: Any) -> Any:
        """Gather all states, with a manifest of them; arguments and result are Megatron's."""
        state = super().get_parameter_state_dp_zero(*args, **kwargs)
        if state is None:
            return None
        if not self._for_model_space:
            state[MANIFEST] = manifest_of(self).to_dict()
            return state
        if not _cuts_unpadded_states():
            return state
        for index, buffer in enumerate(self.buffers):
            for tensors in state[index].values():
                for key, tensor in tensors.items():
                    if isinstance(tensor, Tensor):
                        tensors[key] = _with_bucket_padding(tensor, buffer)
        return state

    def save_parameter_state(self, filename: str) -> None:
        """Save all states to one file, as ``--ckpt-format torch`` does. Every rank must call it.

        Raises:
            NonFiniteError: some master is Inf or NaN, and ``save_nonfinite`` is not set.
        """
        if not self.knobs.save_nonfinite:
            check_masters(self, _NOT_SAVED, with_moments=True)
        super().save_parameter_state(filename)

    def load_parameter_state_from_dp_zero(
        self, state_dict: Any, *, update_legacy_format: bool = False
    ) -> None:
        """Scatter states that the first rank has; arguments are Megatron's.

        Raises:
            LayoutError: on every rank, if they are of other experts, or of an unknown order.
        """
        first = self.data_parallel_group_gloo.rank() == 0
        states = agree(
            lambda: self._in_own_order(state_dict, update_legacy_format) if first else None,
            self.data_parallel_group_gloo,
        )
        super().load_parameter_state_from_dp_zero(states, update_legacy_format=update_legacy_format)

    def _in_own_order(self, states: dict[Any, Any], is_old: bool) -> dict[Any, Any]:
        where = "optimizer states of a data-parallel group"
        saved = states.get(MANIFEST)
        if is_old and not holds_several_experts(manifest_of(self)):
            return states  # of before February 2024: Megatron's to take apart
        source = (
            manifest_of_unmarked_file(self, states, where)
            if saved is None
            else StateManifest.from_dict(saved, where)
        )
        return rearranged_states(states, source, self, where)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load masters and moments; arguments are Megatron's.

        Raises:
            LayoutError: flat states whose experts lie otherwise than here, which were loaded by
                other means than ``dist_checkpointing.load``; or states that ``--ckpt-format torch``
                has saved without ``--use-distributed-optimizer``.
        """
        if "fp32_from_fp16_params" in state_dict:
            raise LayoutError(
                "optimizer.load_state_dict: expected states of a distributed optimizer, got whole "
                "ones, as --ckpt-format torch saves them without --use-distributed-optimizer. Take "
                "the checkpoint to torch_dist by a run without the plug-in (--ckpt-convert-format "
                "torch_dist --ckpt-convert-save DIR), and load DIR/torch_dist; or give "
                "--no-load-optim."
            )
        state_dict = dict(state_dict)
        saved = state_dict.pop(MANIFEST, None)
        if saved is not None:
            require_same_order(self, saved)
        super().load_state_dict(state_dict)


def _cuts_unpadded_states() -> bool:
    """Return whether this Megatron forgets the padding; later ones count it in this variable."""
    method = DistributedOptimizer.sharded_param_state_fully_reshardable
    return "cumulative_padding_stripped" not in method.__code__.co_varnames


def _with_bucket_padding(states: Tensor, buffer: Any) -> Tensor:
    """Put zeros behind the states of each bucket: [numel_unpadded] -> [numel], one a bucket place.

    Args:
        states: of all buckets of ``buffer``, one after the other.
        buffer: knows how long its buckets are with and without padding.
    """
    parts = states.split([bucket.numel_unpadded for bucket in buffer.buckets])
    return torch.cat(
        [
            torch.nn.functional.pad(part, (0, bucket.grad_data.numel() - part.numel()))
            for part, bucket in zip(parts, buffer.buckets, strict=True)
        ]
    )
