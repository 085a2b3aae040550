"""No order of calls mixes up weights and gradients, whether they share memory (wire bf16) or not.

Each hazard is named after what a training loop does; all are sequences that have corrupted weights
or gradients in Megatron's own shared buffer, or would.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moe_optim.buckets.states import Event, Gradients
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import StateError
from moe_optim.formats import reference
from moe_optim.weights.grouped_weight import GroupedWeight
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.ranks import on_ranks, run_ranks
from tests.support.states import life_cycle
from tests.support.states.making_room import list_masters, move_masters
from tests.support.states.masters import assert_weights_come_from_masters, full_master
from tests.support.training import OVERLAP, Record, assert_same_run, pretrain, weight_bytes

pytestmark = pytest.mark.slow

MXFP8 = MoEOptimConfig(format="mxfp8")
FLAGS = ["--train-iters", "8", "--eval-interval", "1000000"]


def forward(model: list[Any]) -> torch.Tensor:
    """Run a batch through the wrapped model, with whatever hooks are on."""
    tokens = torch.arange(32).view(1, 32)
    return model[0](tokens, tokens, None, labels=tokens).float().sum()


def managed_groups(model: list[Any]) -> list[Any]:
    """Return the bucket groups of quantized weights."""
    groups = (*model[0].bucket_groups, *model[0].expert_parallel_bucket_groups)
    return [group for group in groups if group.managed]


def managed_buckets(model: list[Any]) -> list[Any]:
    return [bucket for group in managed_groups(model) for bucket in group.managed]


def _rollout(model: list[Any], optimizer: Any) -> None:
    """An RL rollout: forwards with the pre-hooks on, between a step and the next."""
    with torch.no_grad():
        forward(model)
        forward(model)


def _synchronise_for_save(model: list[Any], optimizer: Any) -> None:
    """What Megatron does before a save, a hash check and its exit."""
    from megatron.training import training

    training.force_param_sync(model, optimizer)


def _synchronise_twice(model: list[Any], optimizer: Any) -> None:
    """A save right after an evaluation."""
    _synchronise_for_save(model, optimizer)
    _synchronise_for_save(model, optimizer)


def _dispatch_and_free(model: list[Any], optimizer: Any) -> None:
    """A custom saver that frees overlap buffers while a gather is in flight."""
    model[0].start_param_sync()
    model[0].free_overlap_buffers()
    assert all(param.quantized_storage.is_fresh for param in quantized(model))


def _dispatch_and_forget(model: list[Any], optimizer: Any) -> None:
    """A gather nobody waits for before gradients are zeroed: a module the batch does not use."""
    model[0].start_param_sync()


def _evaluate_by_hand(model: list[Any], optimizer: Any) -> None:
    """Megatron's evaluation: hooks off with a forced gather, forward, hooks on."""
    from megatron.training import training

    training.disable_forward_pre_hook(model, optimizer)
    with torch.no_grad():
        forward(model)
    training.enable_forward_pre_hook(model)


HARMLESS: list[Callable[[list[Any], Any], None]] = [
    _rollout,
    _synchronise_for_save,
    _synchronise_twice,
    _dispatch_and_free,
    _dispatch_and_forget,
    _evaluate_by_hand,
]


def quantized(model: list[Any]) -> list[GroupedWeight]:
    """Return the quantized parameters of the model."""
    return [param for param in model[0].parameters() if isinstance(param, GroupedWeight)]


def _do_one_harmless_thing(step: int, model: list[Any], optimizer: Any) -> None:
    if model[0].remove_forward_pre_hook_handles:  # Megatron trains step 1 without hooks
        HARMLESS[step % len(HARMLESS)](model, optimizer)


def _train(flags: list[str], interrupted: bool) -> Record:
    return pretrain(flags, MXFP8, after_step=_do_one_harmless_thing if interrupted else None)


def test_what_a_loop_may_do_between_steps_leaves_no_trace():
    """Rollouts with hooks on, forced gathers, freed buffers, gathers nobody waits for, offloading:
    after each, training goes on to the bit as if it had not happened."""
    flags = [*FLAGS, *OVERLAP, "--global-batch-size", "2"]
    undisturbed, disturbed = (run_ranks(2, _train, flags, way) for way in (False, True))
    for rank in range(2):
        assert_same_run(disturbed[rank], undisturbed[rank], what=f"rank {rank}")


WIRES = ("quantized", "bf16")


@on_ranks(2)
def test_a_gather_may_be_started_in_inference_mode():
    """What it plans and allocates is written again in training."""
    life_cycle.initialize()
    for wire in WIRES:
        cycle = life_cycle.LifeCycle(wire=wire, format="nvfp4")
        for step in range(4):
            cycle.zero()
            cycle.micro(step, last=True)
            cycle.step()
            if step % 2 == 0:
                with torch.inference_mode():
                    cycle.rollout(step)
            cycle.check()


def _start(**options: Any) -> life_cycle.LifeCycle:
    """Take one step."""
    cycle = life_cycle.LifeCycle(**options)
    cycle.zero()
    cycle.micro(0, last=True)
    cycle.step()
    cycle.force_sync()
    return cycle


def _go_on(cycle: life_cycle.LifeCycle) -> None:
    """Take two steps."""
    for step in range(2):
        cycle.ddp.zero_grad_buffer()
        cycle.ddp(life_cycle.tokens_of(step, 0)).float().sum().backward()
        cycle.ddp.finish_grad_sync()
        cycle.optimizer.step()
    cycle.ddp.start_param_sync(force_sync=True)


def _assert_weights_of_masters(cycle: life_cycle.LifeCycle) -> None:
    """On one rank."""
    for bucket, part in product(managed_buckets([cycle.ddp]), cycle.optimizer.chained_optimizers):
        for one in part.masters_of(bucket):
            storage = one.param.quantized_storage
            wanted = reference.quantize(one.master.view(storage.shape), storage.format)
            for name, buffer in storage.quantized.buffers().items():
                assert_bytes_equal(buffer, wanted.buffers()[name], what=name)


def _train_in_parallel(options: dict[str, Any], sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Return the weights after three steps, and the masters of this rank."""
    life_cycle.initialize(**sizes)
    cycle = _start(**options)
    _go_on(cycle)
    masters = [master.clone() for master in list_masters(cycle.optimizer)]
    found = {f"master {index}": master for index, master in enumerate(masters)}
    for name, param in cycle.ddp.module.named_parameters():
        found |= weight_bytes(name, param)
    return found


@pytest.mark.parametrize("knobs", [{"step": "fused"}, {"wire": "bf16"}], ids=str)
def test_context_parallel_ranks_share_a_step_as_data_parallel_ones_do(knobs: dict[str, Any]):
    """Masters are cut over both, gradients reduced over both: not a bit differs."""
    data, context = (
        run_ranks(2, _train_in_parallel, knobs, {"context_parallel_size": size}) for size in (1, 2)
    )
    for rank, (want, got) in enumerate(zip(data, context, strict=True)):
        assert_same_tensors(got, want, what=f"rank {rank}:")


@life_cycle.on_a_rank
def test_an_optimizer_takes_the_place_of_the_one_before_it():
    """Its masters are gathered, the others are freed, and stepping them raises."""
    for wire in WIRES:
        cycle = _start(wire=wire)
        first, cycle.optimizer = cycle.optimizer, cycle.build_optimizer()
        _go_on(cycle)
        _assert_weights_of_masters(cycle)

        cycle.ddp.zero_grad_buffer()
        with pytest.raises(StateError, match="optimizer that was built last"):
            first.step()
        masters = weakref.ref(first.chained_optimizers[0])
        del first
        gc.collect()
        assert masters() is None


@life_cycle.on_a_rank
def test_a_model_that_is_wrapped_again_trains():
    """Buckets of before, which nobody zeroes any more, hear of no gradient, and gather nothing into
    memory that no product reads any more."""
    from megatron.core.distributed import DistributedDataParallel

    for wire in WIRES:
        # overlapped reductions of before would still be started, by hooks that stock leaves, too
        cycle = _start(wire=wire, overlap=False)
        before, first = held_bytes([cycle.ddp]), cycle.optimizer
        old = cycle.ddp
        cycle.ddp = DistributedDataParallel(old.config, old.ddp_config, old.module)
        for part in first.chained_optimizers:
            with pytest.raises(StateError, match="one of a DistributedDataParallel that was made"):
                part.refresh_weights()
        assert_holds([cycle.ddp], before, what="after the other was gathered in vain")
        cycle.optimizer = cycle.build_optimizer()
        _go_on(cycle)
        _assert_weights_of_masters(cycle)


def _accumulate(**settings: Any) -> list[torch.Tensor]:
    """Add up gradients of eight micro-batches; return them, as they are and once reduced."""
    from megatron.core.distributed import DistributedDataParallel

    cycle = life_cycle.LifeCycle(overlap=False)
    config = replace(cycle.ddp.ddp_config, **settings)
    cycle.ddp = DistributedDataParallel(cycle.ddp.config, config, cycle.ddp.module)
    cycle.ddp.zero_grad_buffer()
    for micro in range(8):
        cycle.ddp(life_cycle.tokens_of(micro, 0)).float().square().sum().backward()
    weights = quantized([cycle.ddp])
    added_up = [weight.main_grad.clone() for weight in weights]
    cycle.ddp.finish_grad_sync()
    reduced = [weight.main_grad.clone() for weight in weights]
    cycle.ddp.zero_grad_buffer()
    assert not any(weight.main_grad.any() for weight in weights)
    weights[0].main_grad[0, 0, 0] = 1.0  # by hand
    (bucket,) = (one for one in managed_buckets([cycle.ddp]) if weights[0] in set(one.params))
    bucket.find_unannounced()
    assert bucket.state.gradients is Gradients.PARTIAL
    return [*added_up, *reduced]


@life_cycle.on_a_rank
def test_gradients_are_added_up_in_fp32_where_they_are_reduced_in_bf16():
    """By ``--ddp-param-name-patterns-for-fp32-local-accumulation``: sums are those of fp32 buffers,
    what is reduced are these sums, rounded; they are zeroed, and writes by hand noticed."""
    apart = {"param_name_patterns_for_fp32_local_accumulation": ("all",)}
    want, got = _accumulate(), _accumulate(grad_reduce_in_fp32=False, **apart)
    half = len(want) // 2
    for index, sums in enumerate(want[:half]):
        assert_bytes_equal(got[index], sums, what=f"sums of weight {index}")
        assert_bytes_equal(got[half + index], sums.bfloat16().float(), what=f"reduced {index}")


def _exchange_masters(model: list[Any], optimizer: Any) -> None:
    """Move masters to other memory and back to yet other, as verl offloads an optimizer."""
    masters = list_masters(optimizer)
    left = [StorageWeakRef(master.untyped_storage()) for master in masters]
    move_masters(optimizer)
    assert all(memory.expired() for memory in left)
    for scale in (2, 3):
        for master in masters:
            master.data = master.data * scale
        for bucket in managed_buckets(model):
            bucket.state.record(Event.SETTLE)
        assert assert_weights_come_from_masters(model, optimizer) == 4
        for weight in quantized(model):
            storage = weight.quantized_storage
            if storage.recorded_amax is not None:
                amax = full_master(optimizer, weight).bfloat16().abs().amax((1, 2)).float()
                assert_bytes_equal(storage.recorded_amax, amax, what=f"amax of {storage.name}")


def _train_and_exchange_masters(knobs: dict[str, Any]) -> Record:
    config = MoEOptimConfig(**knobs)
    return pretrain(["--train-iters", "2", *FLAGS[2:]], config, observe=_exchange_masters)


@pytest.mark.parametrize(
    ("ranks", "knobs"),
    [
        (1, {"format": "mxfp8", "record_amax": True}),
        (2, {"format": "nvfp4", "layout": "stock"}),
        (1, {"format": "mxfp8", "step": "fused"}),
    ],
    ids=["wire quantized", "two ranks", "fused step"],
)
def test_masters_are_read_where_they_lie_now(ranks: int, knobs: dict[str, Any]):
    """And the memory that they left is free: what is planned for gathers and steps does not hold
    it."""
    run_ranks(ranks, _train_and_exchange_masters, knobs)


def named_weights(model: list[Any]) -> list[tuple[str, GroupedWeight]]:
    """Return the quantized parameters and their names."""
    named = model[0].module.named_parameters()
    return [(name, param) for name, param in named if isinstance(param, GroupedWeight)]


def held_bytes(model: list[Any]) -> dict[str, torch.Tensor]:
    """Return every buffer of every quantized weight."""
    return {
        key: buffer
        for name, param in named_weights(model)
        for key, buffer in weight_bytes(name, param).items()
    }


def assert_holds(model: list[Any], buffers: dict[str, torch.Tensor], *, what: str) -> None:
    """Assert that no byte of a quantized weight has changed."""
    held = held_bytes(model)
    assert held.keys() == buffers.keys()
    for key, buffer in held.items():
        assert_bytes_equal(buffer, buffers[key], what=f"{key} {what}")


@on_ranks(1)
def test_dense_buckets_are_not_dragged_into_the_group_of_quantized_ones():
    """Groups are all managed or not at all, cover every parameter once, and follow each other in
    the order of the backward pass."""
    flags = ["--train-iters", "1", *OVERLAP, "--eval-interval", "1000"]
    flags += ["--ddp-bucket-size", "20000"]

    def groups(model: list[Any], _optimizer: Any) -> list[tuple[bool, list[int]]]:
        names = {param: i for i, param in enumerate(model[0].module.parameters())}
        return [
            (bool(group.managed), sorted(names[param] for param in group.params))
            for group in model[0].bucket_groups
        ]

    groups = pretrain(flags, MXFP8, observe=groups).extra
    assert {managed for managed, _ in groups} == {True, False}
    members = [index for _, group in groups for index in group]
    assert sorted(members) == list(range(len(members)))
    last = [max(group) for _, group in groups]
    assert last == sorted(last, reverse=True)


def _initial_values_left(flags: list[str]) -> int:
    left: list[int] = []

    def count(model: list[Any], optimizer: Any) -> None:
        left.append(sum(p.quantized_storage.initial is not None for p in quantized(model)))

    pretrain(flags, MXFP8, after_setup=count)
    return left[0]


def test_initial_values_are_freed_on_every_rank():
    """Also those of weights that another rank owns: Megatron keeps these for the whole run."""
    flags = ["--train-iters", "1", "--eval-interval", "1000000", "--ddp-bucket-size", "1", *OVERLAP]
    assert run_ranks(2, _initial_values_left, flags) == [0, 0]


def test_a_buffer_of_several_kinds_of_weights_is_refused():
    """Megatron would update such a bucket up to the first weight that is not quantized."""
    from moe_optim.buckets.buffer import GroupedParamAndGradBuffer
    from moe_optim.formats import MXFP8 as FORMAT
    from moe_optim.weights.storage import PortableStorage

    params = [
        (torch.nn.Parameter(GroupedWeight(PortableStorage(FORMAT, (1, 32, 32)))), "experts.weight"),
        (torch.nn.Parameter(torch.zeros(32, 32, dtype=torch.bfloat16)), "dense.weight"),
    ]
    with pytest.raises(StateError, match=r"of one kind, got .*experts\.weight, dense\.weight"):
        GroupedParamAndGradBuffer(None, torch.uint8, torch.float32, params)
