"""``--optimizer-cpu-offload`` and precision-aware Adam, as scripts of RL stacks ask for them.

States lie on the host and are stepped by the fused step: the run is the one without the flags.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, MoEOptimError
from tests.optimizer.test_fused_runs import FLAGS, ONLY, RESHARDABLE, fused, states_of
from tests.optimizer.test_fused_runs import trained as trained_without
from tests.support import training
from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks
from tests.support.steps.host_states import share_at_home
from tests.support.training import OVERLAP, Record, assert_same_run, pretrain


def run_without_gpus() -> None:
    """Have ``HybridDeviceOptimizer`` put all states on the host, though nothing is on a GPU.

    It looks for parameters that are; those of a CPU it steps without a copy, and then fails.
    """
    from moe_optim.integration import cpu_runtime

    cpu_runtime.install()
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = _all_on_the_host


def _all_on_the_host(optimizer: Any, _fraction: float) -> tuple[Any, ...]:
    """Return groups on the host and on the device, and which tensor is whose copy."""
    on_host, copies, originals, masters = [], {}, {}, {}
    for group in optimizer.param_groups:
        copied = []
        for param in group["params"]:
            copy = param.detach().clone().float()
            copies[param], originals[copy] = copy, param
            if param.dtype != torch.float32:
                masters[param] = copy
            copied.append(copy)
        if copied:
            on_host.append({**group, "params": copied})
    return on_host, [], copies, originals, masters


pytestmark = pytest.mark.slow

AWARE = ["--use-precision-aware-optimizer"]
OFFLOAD = [*AWARE, "--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"]
NARROW = [*AWARE, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
BF16 = MoEOptimConfig(format="bf16")
extended = pytest.mark.extended


def _train(flags: list[str], config: MoEOptimConfig) -> Record:
    def observe(model: list[Any], optimizer: Any) -> Any:
        return states_of(model, optimizer), share_at_home(optimizer)

    return pretrain(flags, config, observe=observe)


def without_flags(format: str) -> list[Record]:
    """Return a run of fused steps on two ranks, all states on the device."""
    return trained_without(2, fused(format), *ONLY)


@pytest.mark.parametrize(
    ("config", "flags", "fraction"),
    [
        pytest.param(BF16, [], 1, id="bf16"),
        pytest.param(
            MoEOptimConfig(format="mxfp8"),
            [*OVERLAP, "--optimizer-offload-fraction", "0.5"],
            0.5,
            id="mxfp8, half",
            marks=extended,
        ),
        pytest.param(
            MoEOptimConfig(format="bf16", offload_states=0.25),
            ["--no-pin-cpu-params", "--no-pin-cpu-grads"],
            0.25,
            id="the knob counts first",
            marks=extended,
        ),
        pytest.param(
            MoEOptimConfig(format="nvfp4"),
            ["--use-torch-optimizer-for-cpu-offload", "--optimizer-offload-fraction", "1.5"],
            1,
            id="nvfp4, more than all",
            marks=extended,
        ),
        pytest.param(BF16, ["--optimizer-offload-fraction", "0"], 0, id="none", marks=extended),
    ],
)
def test_megatrons_flag_puts_states_on_the_host_and_leaves_no_trace(config, flags, fraction):
    """Losses, masters, moments and weights of each rank are those without, clipping active."""
    config = config if fraction else fused("bf16")  # without states there, auto is stock here
    runs = run_ranks(2, _train, [*FLAGS, *ONLY, *OFFLOAD, *flags], config)
    for got, want in zip(runs, without_flags(config.format), strict=True):
        states, (at_home, total) = got.extra
        assert states.is_fused
        assert at_home == total if fraction == 1 else at_home <= fraction * total
        assert bool(at_home) is bool(fraction)
        assert_same_run(got, want, what="with the flag")


@extended
def test_a_precision_aware_step_of_bf16_weights_is_fused_where_that_is_asked_for():
    """Megatron keeps the masters then, not Adam; with fp32 moments it is the run without."""
    runs = run_ranks(2, _train, [*FLAGS, *ONLY, *AWARE], fused("bf16"))
    for got, want in zip(runs, without_flags("bf16"), strict=True):
        assert got.extra[0].is_fused
        assert_same_run(got, want, what="precision-aware")


@extended
def test_bf16_moments_of_bf16_weights_resume_to_the_bit(tmp_path: Path):
    """Saved with all states on the host, loaded onto the device."""
    flags = [*FLAGS, *ONLY, *NARROW]
    whole = run_ranks(2, _train, flags, fused("bf16"))
    first = [*flags, "--optimizer-cpu-offload", "--save", f"{tmp_path}", "--exit-interval", "2"]
    run_ranks(2, _train, first, BF16)
    rest = run_ranks(2, _train, [*flags, "--load", f"{tmp_path}"], fused("bf16"))
    for got, want in zip(rest, whole, strict=True):
        assert {one.dtype for moments in want.moments.values() for one in moments.values()} == {
            torch.bfloat16
        }
        want = replace(want, losses={step: want.losses[step] for step in got.losses})
        want = replace(want, validation_losses=got.validation_losses)
        assert_same_run(got, want, what="resumed")


# Beside stock Megatron with the flag


def _held(model: list[Any], optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return copies of what a checkpoint has of each parameter of this rank, steps included."""
    names = {param: name for name, param in training.named_parameters(model)}
    held = {}
    for part in optimizer.chained_optimizers:
        for param in (one for group in part.model_float16_groups for one in group):
            states = part._get_main_param_and_optimizer_states(param)
            group, _ = part.model_param_group_index_map[param]
            steps = states.pop("step", part.optimizer.param_groups[group].get("step"))
            copies = {name: state.detach().clone() for name, state in states.items()}
            held[names[param]] = copies | {"step": torch.tensor(float(steps))}
    return held


def _observed(flags: list[str], config: MoEOptimConfig | None) -> tuple[Any, Any, Record]:
    """Train Megatron's own experts; return states after loading, if anything is, and at the end.

    Without a config it is stock that trains.
    """
    training.MODEL.remove("--moe-grouped-gemm")  # in this rank alone
    if config is None:
        run_without_gpus()
        training._record_state = lambda *_: None  # it looks for masters of Megatron's
    loaded: list[Any] = [None]

    def keep(model: list[Any], optimizer: Any) -> None:
        if "--load" in flags:
            loaded[0] = _held(model, optimizer)

    record = pretrain(flags, config, after_setup=keep, observe=_held)
    return loaded[0], record.extra, record


def assert_same_states(got: Any, want: Any) -> None:
    """Masters, moments and counts of steps of every parameter are the same to the bit."""
    assert got.keys() == want.keys()
    for name, states in want.items():
        assert_same_tensors(got[name], states, what=name)


TRUSTING = replace(BF16, trust_checkpoint_code=True)


@pytest.mark.parametrize(
    "how", [pytest.param([], id="flat"), pytest.param([RESHARDABLE], id="by name", marks=extended)]
)
def test_a_run_of_stock_with_the_flag_goes_on_here(how: list[str], tmp_path: Path):
    """Its checkpoint names classes of Adam, which have to be trusted. States are its own to the
    bit, the step that follows has its loss, and what is saved then loads here without trust."""
    flags = [*FLAGS, *ONLY, *OFFLOAD, *how]
    first = [*flags, "--save", f"{tmp_path}/stock", "--exit-interval", "2"]
    ((_, ended, _),) = run_ranks(1, _observed, first, None)
    ((_, _, whole),) = run_ranks(1, _observed, flags, None)
    load = [*flags, "--load", f"{tmp_path}/stock"]
    (said,) = run_ranks(1, _refused, load, BF16)
    assert "it names torch.optim.adamw.AdamW" in said
    assert "set moe_optim.trust_checkpoint_code=true" in said
    save = ["--save", f"{tmp_path}/ours", "--exit-interval", "3"]
    ((loaded, saved, rest),) = run_ranks(1, _observed, [*load, *save], TRUSTING)
    assert_same_states(loaded, ended)
    assert rest.losses == {3: whole.losses[3]}
    ((again, _, _),) = run_ranks(1, _observed, [*flags, "--load", f"{tmp_path}/ours"], BF16)
    assert_same_states(again, saved)


@pytest.mark.extended
def test_stock_with_the_flag_goes_on_from_here(tmp_path: Path):
    """Masters and moments are ours to the bit. Steps stock counts from 1 again after every load,
    of its own checkpoints, too."""
    flags = [*FLAGS, *ONLY, *OFFLOAD]
    first = [*flags, "--save", f"{tmp_path}", "--exit-interval", "2"]
    ((_, ended, _),) = run_ranks(1, _observed, first, BF16)
    ((loaded, _, rest),) = run_ranks(1, _observed, [*flags, "--load", f"{tmp_path}"], None)
    for states in (*ended.values(), *loaded.values()):
        del states["step"]
    assert_same_states(loaded, ended)
    ((_, _, whole),) = run_ranks(1, _observed, flags, BF16)
    assert rest.losses[3] == whole.losses[3]


def _refused(flags: list[str], config: MoEOptimConfig) -> str:
    """Return what a rank says that does not get to train."""
    with pytest.raises(MoEOptimError) as error:
        pretrain(flags, config)
    return str(error.value)


def test_megatrons_own_function_is_refused_with_the_flag():
    """It would have the CPU step weights of our classes, or crash where masters are not Adam's."""
    from moe_optim.optimizer.distributed import GroupedDistributedOptimizer

    config = SimpleNamespace(optimizer_cpu_offload=True)
    with pytest.raises(ConfigError, match="expected moe_optim.get_megatron_optimizer to build"):
        GroupedDistributedOptimizer(None, config)
