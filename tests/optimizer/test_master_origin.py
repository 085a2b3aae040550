"""What masters are made of: the values that a quantized weight was last given."""

from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import LayoutError, StateError
from moe_optim.weights.grouped_weight import GroupedWeight
from tests.support.bytes import assert_bytes_equal
from tests.support.ranks import on_ranks, run_ranks
from tests.support.states import given_values, life_cycle
from tests.support.states.masters import assert_weights_come_from_masters, full_master
from tests.support.training import named_parameters, pretrain

FLAGS = ["--train-iters", "1", "--lr", "0", "--min-lr", "0", "--weight-decay", "0"]
FLAGS += ["--eval-interval", "1000000"]


def _copy(model: torch.nn.Module) -> None:
    for name, param in model.named_parameters():  # as converters of checkpoints do
        param.data.copy_(given_values.draw_values(name, param.shape))


WRITERS = {"load_state_dict": given_values.load, "copy_ into .data": _copy}


@pytest.mark.parametrize(
    ("format", "layout", "writer", "initialize"),
    [
        ("nvfp4", "grouped", "load_state_dict", True),
        ("mxfp8", "indexed", "copy_ into .data", False),
    ],
)
@on_ranks(1)
def test_weights_given_before_the_model_is_wrapped_are_those_it_trains(
    format: str, layout: str, writer: str, initialize: bool
):
    """Masters are the values themselves, not what quantizing left of them, and not those of the
    initialization, which stock Megatron goes back to with quantized weights."""
    config = MoEOptimConfig(format=format, expert_layout=layout)
    given_values.when_built(WRITERS[writer], initialize=initialize)

    def check(model: list[Any], optimizer: Any) -> Any:
        assert assert_weights_come_from_masters(model, optimizer) >= 4
        drawn = given_values.draw_all(model[0].module.module)
        return {f"module.{name}": values for name, values in drawn.items()}

    record = pretrain(FLAGS, config, observe=check)
    assert record.losses.keys() == {1}
    for name, master in record.masters.items():
        assert_bytes_equal(master.view(-1), record.extra[name].view(-1).float(), what=name)


@on_ranks(1)
def test_nothing_is_kept_for_weights_without_masters():
    """Neither the initial values of frozen experts nor what is loaded into them; a module keeps
    what it loads once, however many optimizers ask for it."""
    config = MoEOptimConfig(format="mxfp8")

    def freeze(model: Any) -> None:
        model.decoder.layers[0].mlp.experts.requires_grad_(False)

    def look(model: list[Any], optimizer: Any) -> tuple[list[bool], int, int]:
        from moe_optim.weights.managed import keep_loaded_values

        weights = [p for _, p in named_parameters(model) if isinstance(p, GroupedWeight)]
        kept_at_first = [w.quantized_storage.initial is not None for w in weights]
        linear = model[0].module.module.decoder.layers[1].mlp.experts.linear_fc1
        hooks = len(linear._load_state_dict_pre_hooks)
        keep_loaded_values(model)
        assert len(linear._load_state_dict_pre_hooks) == hooks
        given_values.load(model[0].module.module)
        return kept_at_first, hooks, sum(w.quantized_storage.initial is not None for w in weights)

    given_values.when_built(freeze)
    kept_at_first, hooks, kept = pretrain(FLAGS, config, observe=look).extra
    assert kept_at_first == [False] * 4
    assert (hooks, kept) == (1, 2)


@on_ranks(1)
def test_values_that_a_step_has_overwritten_are_no_masters_any_more():
    """A load that makes no masters leaves the old ones to the step, as in Megatron. Masters made
    afterwards equal the weights, not the loaded values."""
    config = MoEOptimConfig(format="mxfp8")

    def load(model: list[Any], _optimizer: Any) -> None:
        given_values.load(model[0].module.module)

    def reload(model: list[Any], optimizer: Any) -> list[torch.Tensor]:
        assert_weights_come_from_masters(model, optimizer)
        weights = [p for _, p in named_parameters(model) if isinstance(p, GroupedWeight)]
        values = [weight.dequantize().float() for weight in weights]
        optimizer.reload_model_params()
        return [
            full_master(optimizer, weight).view(weight.shape) - value
            for weight, value in zip(weights, values, strict=True)
        ]

    differences = pretrain(FLAGS, config, after_setup=load, observe=reload).extra
    assert len(differences) == 4
    for difference in differences:
        assert not difference.any()


def _load_when_there_are_masters(config: MoEOptimConfig) -> dict[str, Any]:
    """Load values beside the optimizer and make masters of them; return these, and where in an
    expert this rank's parts begin."""

    def load(model: list[Any], optimizer: Any) -> None:
        given_values.load(model[0].module.module)
        optimizer.reload_model_params()

    def look(model: list[Any], optimizer: Any) -> dict[str, Any]:
        assert assert_weights_come_from_masters(model, optimizer) == 6
        (part,) = (part for part in optimizer.chained_optimizers if not part.is_stub_optimizer)
        starts = [
            one.start % one.param.shape[1:].numel()
            for bucket in part.managed_buckets
            for one in part.masters_of(bucket)
        ]
        drawn = given_values.draw_all(model[0].module.module)
        wanted = {
            name: (full_master(optimizer, weight), drawn[name.removeprefix("module.")])
            for name, weight in named_parameters(model)
            if isinstance(weight, GroupedWeight)
        }
        return {"starts": starts, "masters": wanted}

    flags = [*FLAGS, "--num-layers", "3", "--num-experts", "3"]
    return pretrain(flags, config, after_setup=load, observe=look).extra


def test_each_rank_makes_masters_of_its_own_part_of_what_was_loaded():
    """Weights alone, on two ranks whose shards meet inside an expert."""
    config = MoEOptimConfig(format="mxfp8", layout="stock")
    ranks = run_ranks(2, _load_when_there_are_masters, config)
    assert any(start for rank in ranks for start in rank["starts"])
    for rank in ranks:
        assert len(rank["masters"]) == 6
        for name, (master, drawn) in rank["masters"].items():
            assert_bytes_equal(master, drawn.float().view(master.shape), what=name)


@on_ranks(2)
def test_a_reload_that_fails_on_one_rank_fails_on_all():
    """No rank is left in a collective, and none goes on with masters of which some are replaced."""
    life_cycle.initialize()
    cycle = life_cycle.LifeCycle(step="fused")
    names = ("first.linear_fc2.weight", "dense.weight", "last.linear_fc2.weight")
    values = dict(zip(names, [one.detach() for one in cycle.expected.masters], strict=True))
    missing = {name: value for name, value in values.items() if name != "dense.weight"}
    with pytest.raises(LayoutError, match="dense.weight is there 0 times"):
        cycle.optimizer.reload_model_params(missing if cycle.rank else values)
    with pytest.raises(StateError, match="failed load of reload_model_params has partly"):
        cycle.optimizer.step()
    cycle.optimizer.reload_model_params(values)
    for name, calls in (("zero", {}), ("micro", {"seed": 1, "last": True}), ("step", {})):
        getattr(cycle, name)(**calls)
    cycle.rollout(seed=2)


@on_ranks(2)
def test_a_reload_that_dies_on_every_rank_leaves_no_masters_to_step():
    """Some have been written by then, even of the first optimizer."""
    life_cycle.initialize()
    cycle = life_cycle.LifeCycle(step="fused")
    stock = DistributedOptimizer._copy_model_params_to_main_params

    def die(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        raise MemoryError("no memory is left")

    with (
        mock.patch.object(DistributedOptimizer, "_copy_model_params_to_main_params", die),
        pytest.raises(MemoryError),
    ):
        cycle.optimizer.reload_model_params()
    with pytest.raises(
        StateError, match="a failed load of reload_model_params has partly replaced"
    ):
        cycle.optimizer.step()
