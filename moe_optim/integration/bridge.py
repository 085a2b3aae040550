"""Megatron-Bridge optimizer configuration that installs the plug-in and builds its optimizer."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.core.optimizer import OptimizerConfig
from megatron.training.config.instantiate_utils import target_allowlist

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.keys.layouts import LINEARS
from moe_optim.integration import patches
from moe_optim.integration.arguments import MUON_NAMES, extend_distributed_optimizer
from moe_optim.integration.engine import apply_patches, original
from moe_optim.integration.installation import (
    HOLDER,
    Optimizer,
    install,
    installed_config,
    installed_optimizer,
)
from moe_optim.optimizer.factory import get_megatron_optimizer
from moe_optim.rules import Setup, check_setup


@dataclass
class MoEOptimizerConfig(OptimizerConfig):
    """Megatron's ``OptimizerConfig`` extended by this package's, for ``ConfigContainer``.

    Megatron-Bridge finalizes its configuration before it builds the model, and afterwards calls the
    optimizer configuration to provide the optimizer. No patch is needed for this, and nothing in
    Megatron is replaced before :meth:`finalize`.
    """

    moe_optim: MoEOptimConfig | Mapping[str, Any] = field(default_factory=MoEOptimConfig)
    """Settings of the plug-in, stored as a plain dict: Megatron-Bridge applies overrides
    (``optimizer.moe_optim.format=nvfp4``) field by field, which a frozen dataclass would refuse."""

    def __post_init__(self) -> None:
        """Defer all checks to :meth:`finalize`, since recipes and overrides still change fields."""
        if isinstance(self.moe_optim, MoEOptimConfig):
            self.moe_optim = asdict(self.moe_optim)

    def finalize(self) -> None:
        """Check all fields and install the plug-in.

        Every rank must call it, before the model is built. Muon (``muon``, ``dist_muon``) becomes a
        distributed optimizer; Megatron-Bridge then sets ``ddp.use_distributed_optimizer``, too.

        Raises:
            ConfigError: a setting is unknown or has an invalid value.
            StateError: another configuration is installed.
            PatchError: Megatron's version is not supported.
        """
        moe_optim_config = self._parse()
        extend_distributed_optimizer(self)
        super().__post_init__()
        install(moe_optim_config, optimizer=self._of_matrices())
        apply_patches(patches.BRIDGE, HOLDER)

    def provide(
        self,
        model_chunks: list[Any],
        config_overrides: dict[Any, Any] | None = None,
        use_gloo_process_groups: bool = True,
        pg_collection: Any = None,
    ) -> Any:
        """Build Megatron's optimizer with this package's classes. Every rank must call it.

        Args:
            model_chunks: DDP-wrapped chunks, built after :meth:`finalize`.
            config_overrides: parameter group settings in the format of Megatron's factory.
            use_gloo_process_groups: whether gloo groups exist for checkpoints.
            pg_collection: process groups; None for those of ``parallel_state``.

        Raises:
            StateError: :meth:`finalize` was not called, or settings have changed since.
            ConfigError: a setting of the model or optimizer is not supported.
        """
        moe_optim_config = self._parse()
        optimizer, installed = self._of_matrices(), installed_config()
        if (installed, installed_optimizer()) != (moe_optim_config, optimizer):
            got = None if installed is None else f"{installed} with {installed_optimizer()}"
            raise StateError(
                f"MoEOptimizerConfig.provide: expected {moe_optim_config} with {optimizer} to be "
                f"installed, got {got}. Call finalize() when the configuration is complete, and "
                "build the model after it."
            )
        setup = Setup(config=moe_optim_config, linears=_interleaved(model_chunks))
        check_setup(setup, "MoEOptimizerConfig.provide")
        return get_megatron_optimizer(
            self,
            model_chunks,
            config_overrides=config_overrides,
            use_gloo_process_groups=use_gloo_process_groups,
            pg_collection=pg_collection,
        )

    def _of_matrices(self) -> Optimizer:
        return "muon" if self.optimizer in MUON_NAMES else "adam"

    def _parse(self) -> MoEOptimConfig:
        if isinstance(self.moe_optim, MoEOptimConfig):
            return self.moe_optim
        return MoEOptimConfig.from_mapping(self.moe_optim, "optimizer.moe_optim")


def get_adapter_attributes_from_linear(m: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what Megatron-Bridge asks of a linear before it adapts it, portable experts too.

    Features are those of whole experts. Adapters of experts leave all communication to the token
    dispatcher, which does not suffice where tensor parallelism cuts experts: a warning says so.
    """
    target = patches.BRIDGE[0].target
    size = getattr(getattr(m, "config", None), "expert_tensor_parallel_size", None) or 1
    if kwargs.get("is_expert", args[0] if args else False) and size > 1:
        warnings.warn(
            "Megatron-Bridge: adapters of experts: expected --expert-tensor-parallel-size 1, got "
            f"{size}, with which those of linear_fc2 do not compute linear_out @ linear_in, and "
            "gradients of linear_in lack those of the other ranks. Give 1.",
            stacklevel=2,
        )
    if not isinstance(m, GroupedLinear):
        return original(target)(m, *args, **kwargs)
    from megatron.bridge.peft.utils import AdapterAttributes

    _, rows, cols = m.shape
    is_row_parallel = m.name.endswith(LINEARS[1])
    return AdapterAttributes(
        input_is_parallel=is_row_parallel,
        in_features=cols * (size if is_row_parallel else 1),
        out_features=rows * (1 if is_row_parallel else size),
        disable_tensor_parallel_comm=False,
        disable_sequence_parallel_comm=not m.config.sequence_parallel,
        base_linear_is_parallel=True,
    )


def _interleaved(model_chunks: list[Any]) -> dict[str, GroupedLinear]:
    """Return portable linears, by name, whose rows Megatron-Bridge would permute for checkpoints.

    It permutes the first axis of every ``linear_fc1.weight...``, which it assumes to be rows as in
    Transformer Engine's experts [rows, columns].
    """
    return {
        name: module
        for chunk in model_chunks
        if chunk.config.moe_mlp_glu_interleave_size is not None
        for name, module in chunk.named_modules()
        if isinstance(module, GroupedLinear)
    }


# configurations saved as YAML name their class, which must be on this list to be read back
target_allowlist.add_exact(f"{MoEOptimizerConfig.__module__}.{MoEOptimizerConfig.__qualname__}")
