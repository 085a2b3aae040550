"""What Megatron-Bridge 0.6.0 does with an optimizer configuration, done to ours with Megatron-core.

The contract was read in its sources (commit 51885cf of 2026-08-19, which builds on megatron-core
0.19): ``training/config.py`` (finalize), ``training/setup.py`` (the order), ``training/optim.py``
(provide), ``training/checkpointing.py`` and ``training/utils/omegaconf_utils.py`` (overrides). The
package itself needs Transformer Engine: see ``test_bridge_package.py``.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import MoEOptimError
from tests.support.hostile.damage import flip
from tests.support.ranks import run_ranks
from tests.support.training import (
    OVERLAP,
    Record,
    _record_state,
    assert_same_run,
    pretrain,
)

NVFP4 = MoEOptimConfig(format="nvfp4", expert_layout="indexed")
FLAGS = ["--train-iters", "4", "--eval-interval", "2", *OVERLAP, "--clip-grad", "1.0"]


# Configuration: fields are set one by one, then finalized


def _outcome(act: Any) -> Any:
    try:
        return act()
    except (MoEOptimError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _configure() -> dict[str, Any]:
    """Return what becomes of configurations, in a process where nothing was installed before."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.training.config.container import ConfigContainerBase
    from megatron.training.config.instantiate_utils import instantiate
    from megatron.training.config.yaml_utils import safe_yaml_representers

    import moe_optim
    from moe_optim.experts.grouped_linear import GroupedLinear
    from moe_optim.formats import MXFP8, get_format
    from moe_optim.integration import bridge, installation

    def chunks(
        interleave: int | None = None, layout: str = "grouped", format: Any = MXFP8
    ) -> list[Any]:
        """Return one chunk: a layer of Transformer Engine's experts, and one of portable ones."""
        chunk: Any = torch.nn.Module()
        chunk.config = SimpleNamespace(moe_mlp_glu_interleave_size=interleave)
        chunk.of_transformer_engine = torch.nn.Module()
        weight = torch.nn.Parameter(torch.empty(64, 32))
        chunk.of_transformer_engine.register_parameter("weight0", weight)
        chunk.portable = GroupedLinear(1, 64, 32, format=format, expert_layout=layout)
        return [chunk]

    built: list[str] = []
    bridge.get_megatron_optimizer = lambda *_, **__: built.append("an optimizer")

    found: dict[str, Any] = {}
    make = moe_optim.MoEOptimizerConfig
    refused = {"overlap_param_gather_with_optimizer_step": True}
    refused |= {"reuse_grad_buf_for_mxfp8_param_ag": True}
    unfinished = make(**refused)
    found["is one of Megatron's"] = isinstance(unfinished, OptimizerConfig)
    found["refused by Megatron"] = _outcome(unfinished.finalize)
    misspelt = make(moe_optim={"fromat": "nvfp4"})
    found["misspelt"] = _outcome(misspelt.finalize)
    found["installed before"] = installation.installed_config()

    config = make(moe_optim=MoEOptimConfig(expert_layout="indexed"), lr=1e-3)
    found["provide before finalize"] = _outcome(lambda: config.provide(model_chunks=chunks()))
    overridden = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    overridden["moe_optim"] = {**overridden["moe_optim"], "format": "nvfp4"}
    for name, value in overridden.items():
        setattr(config, name, value)
    for _ in range(2):
        config.finalize()
    found["installed"] = installation.installed_config()
    found["another"] = _outcome(make(moe_optim=MoEOptimConfig(format="bf16")).finalize)
    found["interleaved"] = _outcome(lambda: config.provide(model_chunks=chunks(32)))
    with_amaxes = chunks(32, "indexed", get_format("nvfp4"))
    found["amaxes"] = _outcome(lambda: config.provide(model_chunks=with_amaxes))
    config.provide(model_chunks=chunks(32, "indexed"))
    config.provide(model_chunks=chunks(None, "grouped"))
    found["provided"] = list(built)
    config.optimizer = "muon"
    found["another optimizer"] = _outcome(config.finalize)
    found["provide for another"] = _outcome(lambda: config.provide(model_chunks=chunks()))
    for name in ("muon", "dist_muon"):
        moe_optim.uninstall()
        muon = make(optimizer=name, moe_optim=NVFP4, use_layer_wise_distributed_optimizer=True)
        for _ in range(2):
            muon.finalize()
        flags = muon.optimizer, muon.use_distributed_optimizer
        flags += (muon.use_layer_wise_distributed_optimizer,)
        found[name] = *flags, installation.installed_optimizer()
        muon.provide(model_chunks=chunks(None, "grouped"))
    found["provided to Muon"] = built[2:]

    with safe_yaml_representers():
        stored = yaml.safe_dump(ConfigContainerBase._convert_value_to_dict(config))
    read_back = instantiate(yaml.safe_load(stored))
    found["read back"] = type(read_back).__name__, read_back == config
    return found


@pytest.fixture(scope="module")
def configured() -> dict[str, Any]:
    return run_ranks(1, _configure)[0]


def test_finalizing_checks_and_installs_what_overrides_left_and_nothing_before_it(configured):
    """Recipes build it, and command lines change it, field by field, before it has to make sense.
    The settings are a plain mapping; a second call changes nothing, another installation fails."""
    assert configured["is one of Megatron's"]
    assert configured["refused by Megatron"].startswith("ValueError: overlap_param_gather_with_opt")
    assert "optimizer.moe_optim: expected a key among format" in configured["misspelt"]
    assert configured["installed before"] is None
    assert configured["installed"] == NVFP4
    assert "Call moe_optim.uninstall() first" in configured["another"]
    refusal = configured["another optimizer"]
    assert refusal.startswith("StateError: install: expected the optimizer that is installed, adam")
    assert refusal.endswith("got muon. Call moe_optim.uninstall() first.")


def test_a_model_that_was_not_built_under_these_knobs_gets_no_optimizer(configured):
    """Else a model of bf16 experts would train, and nobody would hear of it."""
    refusal = configured["provide before finalize"]
    assert refusal.startswith("StateError: MoEOptimizerConfig.provide: expected MoEOptimConfig(")
    assert "got None. Call finalize()" in refusal
    refusal = configured["provide for another"]
    assert " with muon to be installed, got MoEOptimConfig(" in refusal
    assert " with adam. Call finalize()" in refusal


def test_muon_becomes_a_distributed_optimizer_when_it_is_finalized(configured):
    """Under both names; Megatron-Bridge then turns on the distributed optimizer of DDP, too."""
    assert configured["muon"] == configured["dist_muon"] == ("muon", True, False, "muon")
    assert configured["provided to Muon"] == ["an optimizer"] * 2


def test_interleaved_experts_are_refused_where_they_are_the_first_axis(configured):
    """Megatron-Bridge reorders the first axis of their weights. Those of Transformer Engine, and
    portable ones with a parameter each, have rows there."""
    refusal = configured["interleaved"]
    assert "portable: one weight of all experts with model.moe_mlp_glu_interleave_size" in refusal
    assert "Set optimizer.moe_optim.expert_layout=indexed" in refusal
    assert "recorded amaxes" in configured["amaxes"]
    remedy = "Use a format other than nvfp4 and nvfp4_rows, and record_amax=false"
    assert remedy in configured["amaxes"]
    assert configured["provided"] == ["an optimizer"] * 2


def test_a_saved_configuration_is_read_back(configured):
    """``run_config.yaml`` lies beside every checkpoint, and names the class."""
    assert configured["read back"] == ("MoEOptimizerConfig", True)


# Training: finalize, build and wrap, provide


def bridge_setup_optimizer(config: Any, model: list[Any], overrides: Any) -> Any:
    """Ask a configuration for its optimizer in the words of ``setup_optimizer``."""
    if hasattr(config, "provide"):
        return config.provide(
            model_chunks=model,
            config_overrides=overrides,
            use_gloo_process_groups=True,
            pg_collection=None,
        )
    raise AssertionError("Megatron-Bridge would build Megatron's own optimizer")


class BridgeCheckpoint:
    """Saves and loads in the calls of ``training/checkpointing.py``. Every rank must call both.

    Args:
        folder: of the checkpoint.
        model: one chunk, DDP-wrapped.
        optimizer: what was provided for it.
        reshardable: ``dist_ckpt_optim_fully_reshardable``.
        sort_rows: called with the model's state as built, and again as loaded, with ``interleave``.
    """

    def __init__(
        self,
        folder: Path,
        model: Any,
        optimizer: Any,
        reshardable: bool,
        sort_rows: Callable[..., Any] | None = None,
    ) -> None:
        from megatron.core.utils import unwrap_model

        self.sort_rows = sort_rows or (lambda state, interleave: state)
        self.folder, self.model, self.optimizer = str(folder), unwrap_model(model), optimizer
        self.content = {"distrib_optim_sharding_type": "dp_reshardable"}
        if reshardable:
            self.content["distrib_optim_sharding_type"] = "fully_reshardable"
            self.content["distrib_optim_fully_reshardable_mem_efficient"] = False
        self.content |= {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}

    def _state(self, metadata: dict[str, Any], **loading: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"checkpoint_version": 3.0}
        state["model"] = self.model.sharded_state_dict(metadata=metadata)
        state["optimizer"] = self.optimizer.sharded_state_dict(state, metadata=metadata, **loading)
        return state

    def _metadata(self, content: dict[str, Any]) -> dict[str, Any]:
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return {**content, "dp_cp_group": group}

    def save(self) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelSaveStrategyWrapper,
        )
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        metadata = self._metadata(self.content)
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        state = self._state(metadata)
        state["model"] = self.sort_rows(state["model"], interleave=False)
        dist_checkpointing.save(
            state,
            self.folder,
            FullyParallelSaveStrategyWrapper(
                TorchDistSaveShardedStrategy(), metadata["dp_cp_group"], False
            ),
            async_sharded_save=False,
            async_strategy="nvrx",
            validate_access_integrity=True,
            preprocess_common_before_consistancy_check=None,
            content_metadata=self.content,
        )

    def load(self) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelLoadStrategyWrapper,
        )
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

        common = dist_checkpointing.load_common_state_dict(self.folder)
        content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        metadata = self._metadata(content)
        state = dist_checkpointing.load(
            self._state(metadata, is_loading=True),
            self.folder,
            FullyParallelLoadStrategyWrapper(
                TorchDistLoadShardedStrategy(), metadata["dp_cp_group"]
            ),
            strict="assume_ok_unexpected",
            validate_access_integrity=True,
        )
        loaded = self.sort_rows(state["model"], interleave=True)
        self.model.load_state_dict(loaded, strict=True)
        with torch.no_grad():
            self.optimizer.load_state_dict(state["optimizer"])


def _scramble(model: Any, optimizer: Any) -> None:
    for part in optimizer.chained_optimizers:
        for group in part.shard_fp32_from_float16_groups:
            for master in group:
                master.fill_(3.0)
                for moment in part.optimizer.state[master].values():
                    moment.fill_(7.0)
        part.refresh_weights()
    for parameter in model.parameters():
        if not hasattr(parameter, "quantized_storage"):
            parameter.data.fill_(5.0)


def _check_checkpoints(model: list[Any], optimizer: Any, folder: Path) -> dict[str, Any]:
    """Save, scramble and load in both sharding types; then load what was damaged."""
    found: dict[str, Any] = {}
    before = Record()
    _record_state(before, model, optimizer)
    for kind in ("dp_reshardable", "fully_reshardable"):
        checkpoint = BridgeCheckpoint(
            folder / kind, model[0], optimizer, kind == "fully_reshardable"
        )
        checkpoint.save()
        _scramble(model[0], optimizer)
        scrambled = Record()
        _record_state(scrambled, model, optimizer)
        assert any(not torch.equal(scrambled.masters[n], m) for n, m in before.masters.items())
        checkpoint.load()
        after = Record()
        _record_state(after, model, optimizer)
        assert_same_run(after, before, what=kind)
        found[kind] = len(after.masters)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        stored = max((folder / "dp_reshardable").glob("*.distcp"), key=lambda p: p.stat().st_size)
        stored.write_bytes(flip(stored.read_bytes(), stored.stat().st_size // 2, 0))
    torch.distributed.barrier()
    damaged = BridgeCheckpoint(folder / "dp_reshardable", model[0], optimizer, False)
    found["damaged"] = _outcome(damaged.load)
    return found


def _train_as_bridge(flags: list[str], folder: Path) -> Record:
    """Train in Megatron's loop, with the optimizer made as Megatron-Bridge makes it."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.training import training

    import moe_optim
    from moe_optim.integration import cpu_runtime, installation

    cpu_runtime.install()
    order: list[str] = []
    moe_optim.MoEOptimizerConfig(moe_optim=NVFP4).finalize()
    order.append(f"finalized {installation.installed_config().format}")
    wrap = DistributedDataParallel.__init__

    def wrap_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        order.append("wrapped")
        wrap(self, *args, **kwargs)

    def setup_optimizer(config: Any, model: list[Any], config_overrides: Any, **_: Any) -> Any:
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init}
        ours = moe_optim.MoEOptimizerConfig(**values, moe_optim=NVFP4)
        ours.finalize()  # Megatron's loop makes its configuration late; this installs nothing anew
        order.append("provided")
        return bridge_setup_optimizer(ours, model, config_overrides)

    def observe(model: list[Any], optimizer: Any) -> dict[str, Any]:
        return {"order": order, **_check_checkpoints(model, optimizer, folder)}

    DistributedDataParallel.__init__ = wrap_and_note
    training.get_megatron_optimizer = setup_optimizer
    return pretrain(flags, None, observe=observe)


def test_training_is_that_of_install_by_hand_and_checkpoints_bring_everything_back(tmp_path):
    """Two ranks, overlapped gathers, clipped gradients, evaluations: to the bit, all of it. Masters
    moments and quantized bytes come back in both sharding types, by the calls that it makes; it
    calls ``dist_checkpointing.load`` as an attribute, so that loads look for damage first."""
    bridged = run_ranks(2, _train_as_bridge, FLAGS, tmp_path)
    by_hand = run_ranks(2, pretrain, FLAGS, NVFP4)
    for ours, hand in zip(bridged, by_hand, strict=True):
        assert ours.extra["order"] == ["finalized nvfp4", "wrapped", "provided"]
        assert ours.classes == {"GroupedDistributedOptimizer"}
        assert any(name.endswith("rowwise_data") for name in ours.weights)
        assert_same_run(ours, hand, what="bridged")
        assert ours.extra["dp_reshardable"] == ours.extra["fully_reshardable"] > 0
        assert ours.extra["damaged"].startswith("StateError: ")
        assert ".distcp" in ours.extra["damaged"]
