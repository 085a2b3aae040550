"""The optimizer configuration of Megatron-Bridge: it installs the plug-in, and builds with it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.core.optimizer import OptimizerConfig
from megatron.training.config.instantiate_utils import target_allowlist

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import StateError, refuse
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.integration.patching.active import installed_config
from moe_optim.integration.patching.installation import install
from moe_optim.optimizer.factory import get_megatron_optimizer


@dataclass
class MoEOptimizerConfig(OptimizerConfig):
    """Megatron's ``OptimizerConfig`` with the knobs of this package, for ``ConfigContainer``.

    Megatron-Bridge finalizes its configuration before it builds the model, and asks the optimizer's
    part of it to provide the optimizer afterwards. Nothing is patched for that, and nothing of
    Megatron is replaced before :meth:`finalize`.
    """

    moe_optim: MoEOptimConfig | Mapping[str, Any] = field(default_factory=MoEOptimConfig)
    """Every knob. Held as a plain dict, so that overrides (``optimizer.moe_optim.format=nvfp4``)
    reach it: Megatron-Bridge sets fields one by one, and a frozen value would refuse each."""

    def __post_init__(self) -> None:
        """Check nothing yet: recipes and overrides still change fields until :meth:`finalize`."""
        if isinstance(self.moe_optim, MoEOptimConfig):
            self.moe_optim = asdict(self.moe_optim)

    def finalize(self) -> None:
        """Check all fields and install the plug-in. Every rank must call it, before the model.

        Raises:
            ConfigError: a knob that does not exist, or a value it does not take.
            StateError: another configuration is installed already.
            PatchError: Megatron is not the version this package was written for.
        """
        wanted = self._knobs()
        super().__post_init__()
        install(wanted)

    def provide(
        self,
        model_chunks: list[Any],
        config_overrides: dict[Any, Any] | None = None,
        use_gloo_process_groups: bool = True,
        pg_collection: Any = None,
    ) -> Any:
        """Build Megatron's optimizer, with this package's in it. Every rank must call it.

        Args:
            model_chunks: DDP-wrapped chunks, built after :meth:`finalize`.
            config_overrides: settings of parameter groups, as Megatron's factory takes them.
            use_gloo_process_groups: whether gloo groups exist for checkpoints.
            pg_collection: process groups; None takes those of ``parallel_state``.

        Raises:
            StateError: :meth:`finalize` was not called, or the knobs were changed since.
            ConfigError: a setting of the model or the optimizer that is not supported.
        """
        if installed_config() != self._knobs():
            raise StateError(
                f"MoEOptimizerConfig.provide: expected {self._knobs()} to be installed, got "
                f"{installed_config()}. Call finalize() when the configuration is complete, and "
                "build the model after it."
            )
        _check_first_axes(model_chunks)
        return get_megatron_optimizer(
            self,
            model_chunks,
            config_overrides=config_overrides,
            use_gloo_process_groups=use_gloo_process_groups,
            pg_collection=pg_collection,
        )

    def _knobs(self) -> MoEOptimConfig:
        if isinstance(self.moe_optim, MoEOptimConfig):
            return self.moe_optim
        return MoEOptimConfig.from_mapping(self.moe_optim, "optimizer.moe_optim")


def _check_first_axes(model_chunks: list[Any]) -> None:
    """Refuse interleaved experts of whose states the first axis is not that of rows.

    Around checkpoints Megatron-Bridge sorts the first axis of all that is named
    ``linear_fc1.weight...``. Experts of Transformer Engine have rows there, [rows, columns] each.

    Raises:
        ConfigError: naming the first of them.
    """
    for chunk in model_chunks:
        size = chunk.config.moe_mlp_glu_interleave_size
        for name, module in chunk.named_modules() if size is not None else ():
            if not isinstance(module, GroupedLinear):
                continue
            refuse(
                {
                    "one of all experts (set optimizer.moe_optim.expert_layout=indexed)": (
                        module.expert_layout == "grouped"
                    ),
                    "amaxes of all experts (take a format other than nvfp4, and "
                    "record_amax=false)": module.amax() is not None,
                },
                expected=(
                    f"MoEOptimizerConfig.provide: {name}: expected one weight an expert and no "
                    f"more with model.moe_mlp_glu_interleave_size {size}, whose rows "
                    "Megatron-Bridge sorts"
                ),
                remedy="Or set the size null.",
            )


# configurations are saved as YAML with the path of their class, and read back through this list
target_allowlist.add_exact(f"{MoEOptimizerConfig.__module__}.{MoEOptimizerConfig.__qualname__}")
