"""``get_megatron_optimizer`` as a drop-in: adopts what it can, refuses what it cannot, by name."""

import copy
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import moe_optim
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import MXFP8
from tests.support import training
from tests.support.bytes import assert_bytes_equal
from tests.support.ranks import on_ranks, run_ranks
from tests.support.states import life_cycle
from tests.support.training import OVERLAP, Record, assert_same_run, pretrain
from tests.support.wrapping import build_optimizer, layer_config, wrap

FLAGS = ["--train-iters", "4", "--eval-interval", "2", *OVERLAP, "--clip-grad", "1.0"]


def test_the_signature_is_megatrons():
    """Names, order and defaults of all arguments."""
    from megatron.core.optimizer import get_megatron_optimizer as stock

    expected, ours = (
        [f"{p.name}={p.default}" for p in inspect.signature(function).parameters.values()]
        for function in (stock, moe_optim.get_megatron_optimizer)
    )
    assert ours == expected


def _stock(flags: list[str]) -> Record:
    return pretrain(flags, None)


def _adopted(flags: list[str]) -> Record:
    """A stock model, wrapped by stock DDP, under our optimizer; nothing is installed."""
    from megatron.training import training

    import moe_optim

    training.get_megatron_optimizer = moe_optim.get_megatron_optimizer
    return pretrain(flags, None)


def test_a_bf16_model_that_was_wrapped_before_is_adopted_to_the_bit():
    """Without install(), on Megatron's own experts and buffers, training is Megatron's."""
    for ours, stock in zip(run_ranks(2, _adopted, FLAGS), run_ranks(2, _stock, FLAGS), strict=True):
        assert stock.classes == {"DistributedOptimizer"}
        assert ours.classes == {"GroupedDistributedOptimizer"}
        assert_same_run(ours, stock, what="adopted")


@on_ranks(1)
def test_quantized_experts_wrapped_before_install_are_refused():
    """Megatron's buffer would replace quantized storage by plain memory; it is stopped by name."""
    flags = FLAGS
    with pytest.raises(StateError) as error:
        pretrain(flags, MoEOptimConfig(format="mxfp8"), optimizer=False)
    message = str(error.value)
    assert "experts.linear_fc2.weight" in message
    assert "call install() first" in message


def _refusals(build: Callable[..., Any] = moe_optim.get_megatron_optimizer) -> list[str]:
    """Return the answer to refused flags of a model of two chunks, one with a quantized weight."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    flags = OptimizerConfig(use_distributed_optimizer=True, optimizer="sgd", fp16=True)
    chunks: list[Any] = [torch.nn.Linear(1, 1), GroupedLinear(1, 32, 32, format=MXFP8)]
    for chunk in chunks:
        chunk.ddp_config = DistributedDataParallelConfig(nccl_ub=True)
        chunk.config = SimpleNamespace(
            qk_clip=True, gtp_weight_remat_size=1, expert_gtp_weight_remat_size=1
        )
    with pytest.raises(ConfigError) as error:
        build(flags, chunks)
    return str(error.value).splitlines()


def _build_by_an_imported_name() -> list[str]:
    """Build an optimizer that is refused, by a name that was imported before ``install()``."""
    from megatron.core.optimizer import get_megatron_optimizer

    from moe_optim.optimizer import factory

    launcher: Any = ModuleType("launcher")
    launcher.native = get_megatron_optimizer
    sys.modules["launcher"] = launcher
    moe_optim.install()
    said = _refusals(launcher.native)
    from megatron.core.optimizer import get_megatron_optimizer as imported_meanwhile

    moe_optim.uninstall()
    assert launcher.native is get_megatron_optimizer
    factory._core_factory = lambda *_: "Megatron's"  # type: ignore[assignment]
    assert imported_meanwhile(None, []) == "Megatron's"
    return said


@on_ranks(1)
def test_all_that_a_built_model_is_refused_for_is_named_at_once():
    """Also in modules that import the factory by name, as verl's and Megatron-Bridge's do."""
    called, by_name = _refusals(), _build_by_an_imported_name()
    assert by_name == called
    first, *lines = called
    assert first == "moe_optim: expected settings that go together, got:"
    assert [line.strip().partition(":")[0] for line in lines] == [
        "--optimizer sgd",
        "--qk-clip",
        "--fp16",
        "--use-nccl-ub with quantized weights",
    ]


def _train_with_megatrons_experts(config: MoEOptimConfig) -> str:
    training.MODEL.remove("--moe-grouped-gemm")  # in this rank alone
    try:
        pretrain(["--train-iters", "1", "--eval-interval", "1"], config)
    except ConfigError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("config", "outcome"),
    [
        (MoEOptimConfig(format="mxfp8"), r"format: mxfp8 without weights .* or set format: bf16\."),
        pytest.param(
            MoEOptimConfig(format="bf16", compute="bf16"), "trained", marks=pytest.mark.extended
        ),
    ],
    ids=["format", "bf16"],
)
def test_narrow_experts_that_nobody_builds_are_refused(config: MoEOptimConfig, outcome: str):
    """Without portable experts only bf16 trains: whoever asked to store or to multiply in less
    hears which field asks for it, and of the flag that builds them."""
    (got,) = run_ranks(1, _train_with_megatrons_experts, config)
    assert re.search(outcome, got), got
    assert ("--moe-grouped-gemm" in got) is (outcome != "trained")


def _train_without_reducing(flags: list[str], config: MoEOptimConfig) -> Record | str:
    from megatron.training import training as megatron_training

    megatron_training.finalize_model_grads = lambda *_, **__: None
    try:
        return pretrain(flags, config)
    except StateError as error:
        return str(error)


def test_gradients_of_one_rank_need_no_reduction_and_those_of_several_do():
    """A loop of its own may step right after the backward pass where one rank has all gradients:
    losses, masters, moments and weights are those of Megatron's loop. Where ranks share them, the
    step is refused, which in Megatron goes on with the gradients of each rank alone."""
    config, flags = MoEOptimConfig(format="mxfp8"), FLAGS[:4]
    (ours,) = run_ranks(1, _train_without_reducing, flags, config)
    (want,) = run_ranks(1, pretrain, flags, config)
    assert_same_run(ours, want, what="without a reduction")
    for message in run_ranks(2, _train_without_reducing, flags, config):
        assert "got gradients that are still accumulating. Call finish_grad_sync()" in message


def _count_gathers(flags: list[str], config: MoEOptimConfig) -> tuple[Record, set[int]]:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    stock = _ParamAndGradBucketGroup.start_param_sync
    counts: dict[int, int] = {}

    def count(group: Any, *args: Any, **kwargs: Any) -> None:
        counts[id(group)] = counts.get(id(group), 0) + 1
        stock(group, *args, **kwargs)

    def begin(model: list[Any], _optimizer: Any) -> None:
        _ParamAndGradBucketGroup.start_param_sync = count

    record = pretrain(flags, config, after_setup=begin)
    return record, set(counts.values())


def test_each_group_is_gathered_once_a_step_however_many_optimizers_there_are():
    """With expert parallelism dense and expert parameters have an optimizer each, and Megatron
    gathers everything after each of them. A run is the same without that."""
    flags = ["--train-iters", "3", "--eval-interval", "1000", "--expert-model-parallel-size", "2"]
    config = MoEOptimConfig(format="bf16")
    for (ours, counts), stock in zip(
        run_ranks(2, _count_gathers, flags, config),
        run_ranks(2, _portable_under_stock, flags, config),
        strict=True,
    ):
        assert counts == {3}
        assert_same_run(ours, stock, what="expert parallel")


def _portable_under_stock(flags: list[str], config: MoEOptimConfig) -> Record:
    return pretrain(flags, config, optimizer=False)


@on_ranks(2)
def test_states_of_experts_alone_save_to_a_file_and_load(tmp_path: Path):
    """All else is frozen, and its optimizer, which a chain always has, is without parameters."""
    life_cycle.initialize()
    moe_optim.install(MoEOptimConfig(format="mxfp8", step="fused"))
    layers, config = life_cycle.make_layers("mxfp8"), layer_config(life_cycle.WIDTH)
    layers[:2].requires_grad_(False)
    layers[2].weight.allreduce = False
    ddp = wrap(config, life_cycle.make_model(config, layers))
    optimizer = build_optimizer(ddp)
    assert [part.is_stub_optimizer for part in optimizer.chained_optimizers] == [True, False]

    def step(seed: int) -> list[torch.Tensor]:
        ddp.zero_grad_buffer()
        ddp(life_cycle.tokens_of(seed, rank=0)).float().sum().backward()
        ddp.finish_grad_sync()
        optimizer.step()
        return [one.detach().float().clone() for one in optimizer._tensors()]

    first, state = step(1), copy.deepcopy(optimizer.state_dict())
    optimizer.save_parameter_state(f"{tmp_path}/states.pt")
    torch.distributed.barrier()
    second = step(2)
    optimizer.load_state_dict(state)
    optimizer.load_parameter_state(f"{tmp_path}/states.pt")
    for got, want in zip(optimizer._tensors(), first, strict=True):
        assert_bytes_equal(got.detach().float(), want)
    for got, want in zip(step(2), second, strict=True):
        assert_bytes_equal(got, want)
