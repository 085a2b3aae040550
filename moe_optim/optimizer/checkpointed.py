"""Optimizer states: saved with a manifest, loaded into any expert layout."""

import gc
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from moe_optim import checkpoint
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.integration import patches
from moe_optim.integration.agreement import agree
from moe_optim.integration.engine import apply_patches, patch_state
from moe_optim.integration.installation import OPTIMIZERS, config_or_bf16
from moe_optim.optimizer.adam import MOMENTS, keeping_moments
from moe_optim.optimizer.nonfinite import check_states

NOT_SAVED = (
    "Nothing has been saved. Load an earlier checkpoint, or set moe_optim.save_nonfinite=true to "
    "save them as they are."
)


class CheckpointedOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer, with a manifest in every saved state.

    Flat states are read by the manifest they were saved with. States keyed by parameter name
    support any number of buckets, and one parameter for all experts.

    Attributes:
        moe_optim_config: plug-in configuration at construction.
        optimizer_state_keys: names of the states of a master besides itself.
        requester: owner of the pending manifest request, while a checkpoint is loaded.
        saved_names: kinds of states that are saved by name under another one.
    """

    saved_names: Mapping[str, str] = MappingProxyType({})
    optimizer_state_keys: tuple[str, ...] = MOMENTS  # as Megatron's property, which some lack

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.moe_optim_config = config_or_bf16()
        self.requester: checkpoint.flat_states.ManifestRequester | None = None
        # Applied until uninstall(): only the replacement finds the entries that this requests.
        apply_patches(patches.CHECKPOINTS, holder=OPTIMIZERS)
        if not self.is_stub_optimizer and not self.ddp_config.use_megatron_fsdp:
            self._order_group_indices()

    def _order_group_indices(self) -> None:
        # Megatron numbers a group's parameters in order, but installs fp32 ones before bf16 ones,
        # so states of a mixed group would be saved and loaded under swapped names.
        for index, groups in enumerate(
            zip(self.model_fp32_groups, self.model_float16_groups, strict=True)
        ):
            for order, param in enumerate([*groups[0], *groups[1]]):
                self.model_param_group_index_map[param] = (index, order)

    def _get_main_param_and_optimizer_states(self, model_param: torch.nn.Parameter) -> Any:
        """Return master and moments, with fp16 and fp8 moments as unscaled fp32 copies.

        Megatron returns them scaled.
        """
        states = super()._get_main_param_and_optimizer_states(model_param)
        for name in self._scaled_moments & states.keys():
            states[name] = self.optimizer.get_unscaled_state(states["param"], name)
        return states

    @torch.no_grad()  # fp32 parameters are their own masters: views of leaves
    def _set_main_param_and_optimizer_states(
        self, model_param: torch.nn.Parameter, tensors: dict[str, Any]
    ) -> None:
        # Megatron copies into the getter's results, where scaled moments are copies
        super()._set_main_param_and_optimizer_states(model_param, tensors)
        group, order = self.model_param_group_index_map[model_param]
        master = self.optimizer.param_groups[group]["params"][order]
        for name in self._scaled_moments & tensors.keys():
            self.optimizer.set_scaled_state(master, name, tensors[name].float())

    @property
    def _scaled_moments(self) -> set[str]:
        if not self.config.use_precision_aware_optimizer or (
            self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8  # Adam holds the masters
        ):
            return set()
        dtypes = {"exp_avg": self.config.exp_avg_dtype, "exp_avg_sq": self.config.exp_avg_sq_dtype}
        return {name for name, dtype in dtypes.items() if dtype in (torch.float16, torch.uint8)}

    @property
    def copied_states(self) -> set[str]:
        """Kinds of states that Megatron's getter copies."""
        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            return {checkpoint.state_manifest.MASTER, *self.optimizer_state_keys}
        return self._scaled_moments

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any = MappingProxyType({}),
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return states to save or load, with their manifest. Every rank must call it.

        The chain of optimizers has checked that states to save are finite.

        Raises:
            ConfigError: no sharding type is given, or Megatron's default
                ``fully_sharded_model_space``, which Megatron can no longer save.
            StateError: a load after ``uninstall()``.
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
        # Megatron collects garbage of a gather, which is not made here, and of earlier saves
        spares = chosen == "fully_reshardable" and gc.isenabled()
        uncollected = checkpoint.staging.replaced(gc, "collect", lambda *_: 0)
        with uncollected if spares else nullcontext():
            state = super().sharded_state_dict(
                model_sharded_state_dict, is_loading, sharding_type, metadata
            )
        is_flat = chosen == "dp_reshardable"
        has_params = any(buffer.param_index_map for buffer in self.buffers)
        if not (is_flat or is_loading or has_params):
            return state  # keys of manifests without parameters are alike
        manifest = checkpoint.flat_states.manifest_object(
            self, model_sharded_state_dict, is_loading=is_loading, is_flat=is_flat
        )
        return state | {checkpoint.state_manifest.MANIFEST: manifest}

    def sharded_param_state_dp_reshardable(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Return flat states in bucket order."""
        if not is_loading:
            return checkpoint.flat_states.flat_states_to_save(self)
        manifest = checkpoint.flat_states.manifest_of(self)
        key = checkpoint.flat_states.manifest_key(self, manifest)
        return checkpoint.flat_states.flat_states_to_load(self, manifest, key)

    def load_parameter_state_from_dp_reshardable(self, state_dict: Any) -> None:
        """Load the states requested by :meth:`sharded_param_state_dp_reshardable`."""
        checkpoint.flat_states.load_flat_states(self, state_dict)

    def sharded_param_state_fully_reshardable(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Return states keyed by parameter name, of the elements that this rank owns."""
        if is_loading:
            return checkpoint.owned_boxes.states_to_load(self, model_sharded_state_dict)
        return checkpoint.owned_boxes.states_to_save(self, model_sharded_state_dict)

    def load_parameter_state_from_fully_reshardable(self, state_dict: Any) -> None:
        """Load states by name, or flat ones that lay beside the names of other parameters."""
        if checkpoint.flat_states.are_flat(state_dict):
            checkpoint.flat_states.load_flat_states(self, state_dict)
        else:
            checkpoint.owned_boxes.load_states(self, state_dict)

    def get_parameter_state_dp_zero(self, *args: Any, **kwargs: Any) -> Any:
        """Gather all states on the first rank, with their manifest."""
        state = super().get_parameter_state_dp_zero(*args, **kwargs)
        if state is None:
            return None
        manifest = checkpoint.flat_states.manifest_of(self).to_dict()
        return state | {checkpoint.state_manifest.MANIFEST: manifest}

    def save_parameter_state(self, filename: str) -> None:
        """Save all states to one file, as ``--ckpt-format torch`` does. Every rank must call it.

        Raises:
            NonFiniteError: a master or moment is Inf or NaN, and ``save_nonfinite`` is not set.
        """
        if not self.moe_optim_config.save_nonfinite:
            check_states([self], NOT_SAVED)
        super().save_parameter_state(filename)

    def load_parameter_state_from_dp_zero(
        self, state_dict: Any, *, update_legacy_format: bool = False
    ) -> None:
        """Scatter states from the first rank.

        Raises:
            LayoutError: the states have other experts or an unknown order; on every rank.
        """
        first = self.data_parallel_group_gloo.rank() == 0
        states = agree(
            lambda: self._in_own_order(state_dict, update_legacy_format) if first else None,
            self.data_parallel_group_gloo,
        )
        super().load_parameter_state_from_dp_zero(states, update_legacy_format=update_legacy_format)

    def _in_own_order(self, states: dict[Any, Any], is_old: bool) -> dict[Any, Any]:
        where = "optimizer states of a data-parallel group"
        saved = states.get(checkpoint.state_manifest.MANIFEST)
        if is_old and not checkpoint.flat_states.manifest_of(self).holds_several_experts():
            return states  # saved before February 2024: Megatron splits them
        if saved is not None:
            source = checkpoint.state_manifest.StateManifest.from_dict(saved, where)
        else:
            source = checkpoint.states_without_manifest.manifest_of_file_states(self, states, where)
        return checkpoint.flat_states.rearranged_states(states, source, self, where)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load masters and moments.

        Raises:
            LayoutError: flat states of another expert layout were not loaded by
                ``dist_checkpointing.load``, or ``--ckpt-format torch`` saved the states without
                ``--use-distributed-optimizer``.
        """
        if "fp32_from_fp16_params" in state_dict:
            raise LayoutError(
                "optimizer.load_state_dict: expected states of a distributed optimizer, got whole "
                "ones, as --ckpt-format torch saves them without --use-distributed-optimizer, and "
                "for Megatron's own Muon. Convert the checkpoint to torch_dist in a run without "
                "the plug-in (--ckpt-convert-format torch_dist --ckpt-convert-save DIR), and load "
                "DIR/torch_dist; or give --no-load-optim."
            )
        state_dict = dict(state_dict)
        saved = state_dict.pop(checkpoint.state_manifest.MANIFEST, None)
        if saved is not None:
            checkpoint.flat_states.require_same_order(self, saved)
        with keeping_moments(self.optimizer):
            super().load_state_dict(state_dict)
