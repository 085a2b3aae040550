"""The plug-in replaces nothing until it is asked to, and gives everything back."""

import importlib
import pkgutil
import sys
import types
from typing import Any

import pytest

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, PatchError, StateError
from moe_optim.integration import cpu_runtime, installation, patches
from moe_optim.integration.arguments import config_from_argv
from moe_optim.integration.engine import Patch
from moe_optim.kernels.member_table import MemberTable
from tests.support.ranks import on_ranks
from tests.support.states import life_cycle
from tests.support.training import pretrain

MXFP8 = MoEOptimConfig(format="mxfp8")
OTHER = MoEOptimConfig(format="mxfp8", expert_layout="indexed")

Attributes = dict[tuple[str, str], Any]


def owners_below(*prefixes: str) -> dict[str, Any]:
    """Return all loaded modules below these names, and the classes they define, by name."""
    modules = {
        name: module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and f"{name}.".startswith(tuple(prefixes))
    }
    classes = {
        f"{name}.{value.__qualname__}": value
        for name, module in modules.items()
        for value in list(vars(module).values())
        if isinstance(value, type) and value.__module__ == name
    }
    return modules | classes


def attributes_of(owners: dict[str, Any]) -> Attributes:
    return {
        (name, key): value
        for name, owner in owners.items()
        for key, value in vars(owner).items()
        if key not in {"__slotnames__", "__warningregistry__"}  # of copying and of warnings
    }


def differences(before: Attributes, after: Attributes) -> list[str]:
    """Return what is not the identical object, or is new, or is gone."""
    return sorted(
        f"{name}.{key}"
        for name, key in before.keys() | after.keys()
        if before.get((name, key), KeyError) is not after.get((name, key), KeyError)
    )


def is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "moe_optim"


@on_ranks(1)
def test_importing_and_reading_a_command_line_replaces_nothing():
    """Without the flag no attribute of any module or class of Megatron becomes another object."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "moe_optim"]:
        del sys.modules[name]  # so that what happens on import happens here
    owners = owners_below("megatron.", "torch.cuda.")
    before = attributes_of(owners)
    importlib.import_module("moe_optim")
    package = importlib.import_module("moe_optim")
    for module in pkgutil.walk_packages(package.__path__, "moe_optim."):
        importlib.import_module(module.name)
    arguments = sys.modules["moe_optim.integration.arguments"]
    assert arguments.config_from_argv(["--num-layers", "2", "--moe-grouped-gemm"]) is None
    after = attributes_of(owners)
    ours = [f"{name}.{key}" for (name, key), value in after.items() if is_ours(value)]
    changed, watched, ours = differences(before, after), len(before), ours
    assert watched > 5000
    assert not changed
    assert not ours


@on_ranks(1)
def test_install_replaces_the_targets_of_its_patches_and_uninstall_restores_them():
    """By identity; a second call of either does nothing. The factory's importers follow it."""
    owners = owners_below("megatron.")
    before = attributes_of(owners)
    installation.install(MXFP8)
    installed = attributes_of(owners)
    installation.install(MXFP8)
    again = attributes_of(owners)
    installation.uninstall()
    after = attributes_of(owners)
    installation.uninstall()
    report = {
        "replaced": differences(before, installed),
        "replaced by the second install": differences(installed, again),
        "left behind": differences(before, after),
    }
    targets = {patch.target.replace(":", ".") for patch in patches.INSTALLED}
    others = set(report["replaced"]) - targets
    assert targets <= set(report["replaced"])
    assert "megatron.core.optimizer.get_megatron_optimizer" in others
    imported = {"get_megatron_optimizer", "load_checkpoint"}
    assert {name.rpartition(".")[2] for name in others} == imported
    assert report["replaced by the second install"] == []
    assert report["left behind"] == []


def _use_several_configurations() -> None:
    from moe_optim.experts import module

    with pytest.raises(StateError, match=r"install\(\) to have run"):
        module.grouped_mlp_modules(None, True)
    installation.install()
    assert installation.installed_config() == MoEOptimConfig()
    installation.install(MoEOptimConfig())  # equal, though not identical
    with pytest.raises(
        StateError, match=r"got .*expert_layout='indexed'.*uninstall\(\) first"
    ) as e:
        installation.install(OTHER)
    assert "nonfinite" not in str(e.value)  # which they have in common
    with pytest.raises(ConfigError, match="expected a MoEOptimConfig, got 'mxfp8'"):
        installation.install("mxfp8")
    assert installation.installed_config() == MoEOptimConfig()
    installation.uninstall()
    assert installation.installed_config() is None
    installation.install(OTHER)
    assert installation.installed_config() == OTHER


def _use_several_optimizers() -> None:
    assert installation.installed_optimizer() == "adam"
    installation.install(MXFP8, optimizer="muon")
    installation.install(MXFP8, optimizer="muon")
    assert installation.installed_optimizer() == "muon"
    with pytest.raises(StateError, match=r"installed, muon, got adam\. .*uninstall\(\) first"):
        installation.install(MXFP8)
    with pytest.raises(
        StateError, match=r'got adam\. Call moe_optim.install\(config, optimizer="ad'
    ):
        installation.set_optimizer("adam")
    assert installation.installed_optimizer() == "muon"
    installation.uninstall()
    assert installation.installed_optimizer() == "adam"
    with pytest.raises(ConfigError, match="optimizer: expected adam or muon, got 'sgd'"):
        installation.install(MXFP8, optimizer="sgd")
    assert installation.installed_config() is None


def _install_by_flag() -> None:
    installation.install_by_flag(MXFP8)
    assert (installation.installed_config(), installation.installed_optimizer()) == (MXFP8, "adam")
    installation.set_optimizer("muon")
    installation.set_optimizer("muon")  # Megatron may validate more than once
    assert installation.installed_optimizer() == "muon"
    installation.install_by_flag(MXFP8)
    assert installation.installed_optimizer() == "muon"


def _fail_to_install() -> list[str]:
    broken = Patch(
        id="broken",
        target="megatron.core.optimizer:NoSuchName",
        replacement="moe_optim.optimizer.adam:GroupStepAdam",
        form="class",
        because="a test",
        remove_when="never",
    )
    owners = owners_below("megatron.")
    before = attributes_of(owners)
    installed, patches.INSTALLED = patches.INSTALLED, (*patches.INSTALLED, broken)
    with pytest.raises(PatchError, match="NoSuchName"):
        installation.install(MXFP8)
    patches.INSTALLED = installed
    assert installation.installed_config() is None
    return differences(before, attributes_of(owners))


def _install_over_a_wrapper() -> tuple[list[str], bool]:
    """Wrap a function after this package was imported; return the calls it saw, and whether it
    stands there again."""
    from megatron.core import dist_checkpointing

    import moe_optim.checkpoint.loading  # noqa: F401

    calls = []

    def wrapper(checkpoint_dir: str) -> dict[str, Any]:
        calls.append(checkpoint_dir)
        return {}

    dist_checkpointing.load_common_state_dict = wrapper
    installation.install(MXFP8)
    dist_checkpointing.load_common_state_dict("msc://bucket/iter_0000001")
    installation.uninstall()
    return calls, dist_checkpointing.load_common_state_dict is wrapper


@on_ranks(1)
def test_one_configuration_and_one_optimizer_are_installed_at_a_time():
    """``install()`` means Adam unless it says otherwise; a flag installs before the optimizer is
    known; ``uninstall()`` forgets both. An installation that fails changes nothing, and what others
    wrapped before it stays wrapped: replacements call what they replaced."""
    for use in (_use_several_configurations, _use_several_optimizers, _install_by_flag):
        use()
        installation.uninstall()
    failed, wrapped = _fail_to_install(), _install_over_a_wrapper()
    assert failed == []
    assert wrapped == (["msc://bucket/iter_0000001"], True)


@on_ranks(1)
def test_uninstall_leaves_nothing_behind_and_optimizers_their_configuration():
    """What an optimizer put in place for its checkpoints goes, too. It trains on as it was built,
    and a load that would miss its manifest is refused."""
    life_cycle.initialize()
    installation.uninstall()
    owners = owners_below("megatron.")
    before = attributes_of(owners)
    cycle = life_cycle.LifeCycle(format="nvfp4")
    cycle.zero()
    cycle.micro(0, last=True)
    cycle.step()
    installation.uninstall()
    left_behind = differences(before, attributes_of(owners))
    cycle.zero()
    cycle.micro(1, last=True)
    cycle.step()
    cycle.check()
    part = cycle.optimizer.chained_optimizers[0]
    kind = {"distrib_optim_sharding_type": "fully_reshardable"}
    with pytest.raises(StateError, match=r"expected the plug-in to be installed.*install\(\)"):
        part.sharded_state_dict({}, is_loading=True, metadata=kind)
    assert left_behind == []


@on_ranks(1)
def test_plugin_and_cpu_runtime_do_not_undo_each_other():
    """Both need the mended Adam: it stays until the last one goes."""
    owners, left_behind = owners_below("megatron."), {}
    for first, second in ((cpu_runtime, installation), (installation, cpu_runtime)):
        first.install()
        before = attributes_of(owners)
        second.install()
        second.uninstall()
        left_behind[second.__name__] = differences(before, attributes_of(owners))
        first.uninstall()
    assert len(left_behind) == 2 and not any(left_behind.values()), left_behind


@on_ranks(1)
def test_a_run_without_the_flag_is_megatrons_own():
    """Trained for two steps with the runtime that the CPU needs: not one class of this package."""
    assert config_from_argv(["--train-iters", "2"]) is None
    distributed = "megatron.core.distributed"

    def observe(model: list[Any], optimizer: Any) -> dict[str, str]:
        chunk = model[0]
        (experts,) = {
            type(module) for name, module in chunk.named_modules() if name.endswith("mlp.experts")
        }
        kinds = {
            "chain": type(optimizer),
            "optimizer": type(optimizer.chained_optimizers[0]),
            "DDP": type(chunk),
            "buffer": type(chunk.buffers[0]),
            "bucket": type(chunk.buffers[0].buckets[0]),
            "bucket group": type(chunk.bucket_groups[0]),
            "experts": experts,
        }
        return {what: f"{kind.__module__}.{kind.__qualname__}" for what, kind in kinds.items()}

    flags = ["--train-iters", "2", "--eval-interval", "2"]
    assert pretrain(flags, None, observe=observe).extra == {
        "chain": "megatron.core.optimizer.optimizer.ChainedOptimizer",
        "optimizer": "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
        "DDP": f"{distributed}.distributed_data_parallel.DistributedDataParallel",
        "buffer": f"{distributed}.param_and_grad_buffer._ParamAndGradBuffer",
        "bucket": f"{distributed}.param_and_grad_buffer._ParamAndGradBucket",
        "bucket group": f"{distributed}.param_and_grad_buffer._ParamAndGradBucketGroup",
        "experts": "megatron.core.transformer.moe.experts.SequentialMLP",
    }


@pytest.mark.parametrize(
    "config",
    [
        MoEOptimConfig(format="nvfp4", backend="reference", wire="bf16", expert_layout="indexed"),
        MoEOptimConfig(format="bf16", backend="reference", compute="mxfp8"),
    ],
    ids=["bf16 wire", "compute"],
)
@on_ranks(1)
def test_the_backend_reaches_everything_that_quantizes(config: MoEOptimConfig):
    """Gathers, initial values and copies for products: no table is built with kernels."""
    seen: set[str] = set()
    stock = MemberTable.build.__func__  # type: ignore[attr-defined]

    def build(cls: type, entries: Any, **kwargs: Any) -> MemberTable:
        seen.add(kwargs.get("backend", "auto"))
        return stock(cls, entries, **kwargs)

    MemberTable.build = classmethod(build)  # type: ignore[method-assign,assignment]
    pretrain(["--train-iters", "2", "--eval-interval", "1"], config)
    assert seen == {"reference"}
