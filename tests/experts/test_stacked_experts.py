"""bf16 experts that are parameters of their own are multiplied where they lie, without a copy."""

import copy
import io
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_optim.experts.operands import lie_together, stack_experts
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import normal_weights
from tests.support.modules.compiling import make_linear

SHAPE = (4, 64, 32)
NUMEL = SHAPE[0] * SHAPE[1] * SHAPE[2]
ENDS = torch.tensor([2, 2, 7, 8], dtype=torch.int32)


def make(layout="indexed"):
    return make_linear(None, layout, shape=SHAPE)


def scatter(linear):
    """Exchange every weight for one in memory of its own."""
    for weight in linear.weights():
        weight.data = weight.data.clone()
    return linear


def lay_in_buffer(linear, gap=0, first=8):
    """Make weights views of one buffer, as Megatron's DDP does: the last parameter comes first."""
    parameters = list(linear.parameters())[::-1]
    step = parameters[0].numel() + gap
    buffer = torch.zeros(first + step * len(parameters), dtype=torch.bfloat16)[first:]
    for index, parameter in enumerate(parameters):
        place = buffer[index * step : index * step + parameter.numel()]
        parameter.data = place.view(parameter.shape).copy_(parameter.data)
    return linear


def saved_and_loaded(linear):
    file = io.BytesIO()
    torch.save(linear, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class LargeResults(TorchDispatchMode):
    """Lists the operations that write new memory of the size of all experts, or more."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        own = {one.untyped_storage().data_ptr() for one in given}
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in own:
                self.found += [str(func)] if one.numel() >= NUMEL else []
        return result


def copies_at_a_forward(linear):
    tokens = torch.ones(8, SHAPE[2]).bfloat16()
    with torch.no_grad(), LargeResults() as results:
        linear(tokens, ENDS)
    return results.found


PLACES = {
    "as they are built": lambda linear: linear,
    "in a buffer": lay_in_buffer,
    "in a buffer with gaps": lambda linear: lay_in_buffer(linear, gap=64),
    "converted to and fro": lambda linear: linear.float().bfloat16(),
    "deepcopied": copy.deepcopy,
    "pickled": lambda linear: pickle.loads(pickle.dumps(linear)),
    "saved and loaded": saved_and_loaded,
    "loaded into": lambda linear: linear.load_state_dict(linear.state_dict()) and linear,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_forward_pass_copies_no_weights(place):
    linear = place(make())
    assert lie_together(linear.weights())
    assert linear.operand("rowwise").data_ptr() == linear.weight0.data_ptr()
    assert copies_at_a_forward(linear) == []
    assert_bytes_equal(linear.operand("rowwise"), make("grouped").operand("rowwise"))
    assert copies_at_a_forward(scatter(make())) == ["aten.stack.default"]  # which is seen


ELSEWHERE = {
    "in memory of their own": scatter,
    "in another order": lambda linear: lay_in_buffer(linear).weights()[::-1],
    "at other distances": lambda linear: linear.weights()[:2] + linear.weights()[3:],
    "at distances that products do not take": lambda linear: lay_in_buffer(linear, gap=3),
    "from where products do not begin": lambda linear: lay_in_buffer(linear, first=1),
    "twice the same": lambda linear: linear.weights()[:1] * 2,
}


@pytest.mark.parametrize("place", ELSEWHERE.values(), ids=ELSEWHERE)
def test_experts_that_lie_otherwise_are_copied(place):
    placed = place(make())
    weights = placed if isinstance(placed, list) else placed.weights()
    stacked = stack_experts(weights)
    assert not lie_together(weights)
    assert stacked.data_ptr() not in [weight.data_ptr() for weight in weights]
    assert_bytes_equal(stacked, torch.stack([weight.detach() for weight in weights]))


def test_memory_that_happens_to_be_adjacent_is_not_one():
    """Two views of one buffer whose storages are not the same: the first ends with its expert."""
    whole = torch.zeros(2, 64, 32, dtype=torch.bfloat16)
    first = torch.frombuffer(whole[0].view(torch.uint8).numpy(), dtype=torch.bfloat16).view(64, 32)
    assert not lie_together([first, whole[1]])
    assert lie_together([whole[0], whole[1]])
    assert stack_experts([first]).data_ptr() == first.data_ptr()


def test_products_and_gradients_are_those_of_one_parameter():
    outcomes = []
    for linear in (make(), lay_in_buffer(make(), gap=64), scatter(make()), make("grouped")):
        tokens = normal_weights(8, SHAPE[2]).bfloat16().requires_grad_()
        output = linear(tokens, ENDS)
        output.float().square().sum().backward()
        grads = [weight.grad.view(-1, *SHAPE[1:]) for weight in linear.weights()]
        outcomes.append((output.detach(), tokens.grad, torch.cat(grads)))
    for outcome in outcomes[:-1]:
        for mine, theirs in zip(outcome, outcomes[-1], strict=True):
            assert_bytes_equal(mine, theirs)


def test_weights_are_in_the_order_of_experts_whatever_their_registration():
    linear = make()
    assert [id(w) for w in linear.weights()] == [
        id(getattr(linear, f"weight{i}")) for i in range(4)
    ]
    assert [name for name, _ in linear.named_parameters()] == [f"weight{i}" for i in (3, 2, 1, 0)]
