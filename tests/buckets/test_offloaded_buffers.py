"""Buffers on the host and back: weights are what they were, and training goes on to the bit."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from moe_optim.errors import StateError
from moe_optim.weights.grouped_weight import GradientNote
from tests.support.states import life_cycle, making_room

BOTH = (("fused", "quantized"), ("stock", "bf16"))
"""Step and wire."""
TRAIN = [("zero", {}), ("micro", {"seed": 1, "last": True}), ("step", {})]
WAYS = {
    "megatron": ("make_room",),
    "megatron, gradients too": ("offload", "make_room", "reload"),
    "verl": ("send_all_away", "bring_back"),
}


KNOBS = (
    {"format": "bf16", "step": "stock"},
    {"format": "mxfp8", "step": "stock"},
    {"format": "nvfp4", "step": "fused", "overlap": False},
    {"format": "fp8_block", "step": "stock", "wire": "bf16"},
)


@life_cycle.on_a_rank
def test_training_goes_on_to_the_bit_after_all_buffers_were_on_the_host():
    """Dense weights and quantized ones, on both sides of each way; Megatron's calls keep gradients
    where these stay. The life cycle compares everything to plain torch."""
    for knobs, calls in product(KNOBS, WAYS.values()):
        cycle = life_cycle.LifeCycle(**knobs)
        for turn in range(2):
            life_cycle.replay(cycle, [*TRAIN, *((call, {}) for call in calls), *TRAIN])
            cycle.evaluate(seed=turn)
        assert len(making_room.all_buffers([cycle.ddp])) > 1


# Gradients


@life_cycle.on_a_rank
def test_gradients_that_are_away_are_neither_read_nor_written():
    """Freed by Megatron's call, or by verl's, which tells nobody."""
    for step, wire in BOTH:
        _use_gradients_that_are_away(step, wire)


def _use_gradients_that_are_away(step: str, wire: str) -> None:
    said = {}
    for name, act in {
        "a backward pass": lambda c: c._forward_backward(1),
        "a second backward pass": lambda c: c._forward_backward(2),
        "the reduction": lambda c: c.ddp.finish_grad_sync(),
        "a step of gradients not reduced": lambda c: c.optimizer.step(),
        "a step of reduced gradients": lambda c: c.optimizer.step(),
        "zeroing": lambda c: c.ddp.zero_grad_buffer(),
    }.items():
        print("uses:", name, flush=True)
        cycle = life_cycle.LifeCycle(step=step, wire=wire, overlap=False)
        cycle.zero()
        if name != "a backward pass":
            cycle._forward_backward(1)
        if name == "a step of reduced gradients":
            cycle.ddp.finish_grad_sync()
        masters = [master.clone() for master in making_room.list_masters(cycle.optimizer)]
        if wire == "bf16":
            making_room.send_gradients_away_as_verl([cycle.ddp])
        else:
            cycle.ddp.offload_grad_buffers()
        with pytest.raises(StateError) as refused:
            act(cycle)
        said[name] = str(refused.value)
        for master, before in zip(making_room.list_masters(cycle.optimizer), masters, strict=True):
            assert torch.equal(master, before)
    assert len(said) == 6
    for what, message in said.items():
        assert "expected gradient memory, got none: it is offloaded" in message, what
        assert "restore_grad_buffers()" in message


@life_cycle.on_a_rank
def test_neither_a_step_nor_a_gather_writes_weights_that_are_away():
    """Step while weights of Megatron's own buffers are away, whoever sent them."""
    said = []
    ways = (making_room.send_weights_away, making_room.send_away_as_verl)
    for step, send in product(("stock", "fused"), ways):
        cycle = life_cycle.LifeCycle(format="bf16", step=step, overlap=False)
        for name, arguments in TRAIN[:-1]:
            getattr(cycle, name)(**arguments)
        cycle.ddp.finish_grad_sync()
        masters = [master.clone() for master in making_room.list_masters(cycle.optimizer)]
        send([cycle.ddp])
        if send is making_room.send_away_as_verl:
            making_room.bring_gradients_back_as_verl([cycle.ddp])
        for write in (cycle.optimizer.step, partial(cycle.ddp.start_param_sync, force_sync=True)):
            with pytest.raises(StateError) as refused:
                write()
            said.append(str(refused.value))
        for master, before in zip(making_room.list_masters(cycle.optimizer), masters, strict=True):
            assert torch.equal(master, before)
    assert len(said) == 8
    for message in said:
        assert "expected weights to write into, got none: they are offloaded" in message
        assert "reload_from_cpu()" in message


# A model that is wrapped twice


def managed_weights(cycle: life_cycle.LifeCycle) -> list[Any]:
    return [param for param in cycle.params if hasattr(param, "quantized_storage")]


@life_cycle.on_a_rank
def test_buffers_of_a_first_wrapper_leave_the_weights_of_a_second_alone():
    """It holds gradients and other weights of its own, quantized ones no longer."""
    for step, wire in BOTH:
        _wrap_twice(step, wire)


def _wrap_twice(step: str, wire: str) -> None:
    from megatron.core.distributed import DistributedDataParallel

    cycle = life_cycle.LifeCycle(step=step, wire=wire, overlap=False)
    for name, arguments in TRAIN:
        getattr(cycle, name)(**arguments)
    old = cycle.ddp
    for param in cycle.params:
        del param.main_grad
    cycle.ddp = DistributedDataParallel(old.config, old.ddp_config, old.module)
    cycle.optimizer = cycle.build_optimizer()
    notes = [list(param._backward_hooks.values()) for param in managed_weights(cycle)]
    assert [sum(type(hook) is GradientNote for hook in of_one) for of_one in notes] == [1, 1]
    managed = making_room.managed_buffers([old])
    said = []
    acts: list[Any] = [lambda b: b.offload_to_cpu(), lambda b: b.param_data.cpu()]
    acts += [lambda b: b.param_data.storage().resize_(0)]

    def refuse_all() -> None:
        for buffer in managed:
            for act in acts:
                with pytest.raises(StateError) as refused:
                    act(buffer)
                said.append(str(refused.value))

    before = [p.detach().float() for p in cycle.params]
    refuse_all()
    for buffer in making_room.all_buffers([old]):  # what is its own
        buffer.offload_to_cpu(move_params=buffer not in managed)
    for param, values in zip(cycle.params, before, strict=True):
        assert torch.equal(param.detach().float(), values)
    making_room.send_weights_away([cycle.ddp])
    for group in cycle._managed_groups():
        group.start_param_sync(force_sync=True)  # of fresh weights there is nothing to gather
    refuse_all()
    for buffer in making_room.all_buffers([cycle.ddp]):
        buffer.reload_from_cpu(move_grads=False)
    for param, values in zip(cycle.params, before, strict=True):
        assert torch.equal(param.detach().float(), values)
    assert len(said) >= 12
    for message in said:
        assert "in this bucket, got them in one of a DistributedDataParallel that was" in message
        assert "made later for the same model" in message
        assert "drop the others" in message
