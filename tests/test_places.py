"""Where tensors lie: every exchange is found, whichever tensor of many it was, and nothing else."""

from types import SimpleNamespace

import pytest
import torch

from moe_optim.places import Attributes, Places

NAMES = ("data", "scale")
COUNT = 5


def tensors():
    return [torch.zeros(3, 4) for _ in range(COUNT)]


def exchange_data(tensor):
    tensor.data = torch.zeros(3, 4)


def free(tensor):
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("exchange", [exchange_data, free])
@pytest.mark.parametrize("index", range(COUNT))
def test_memory_of_any_tensor_that_was_exchanged_is_found(index, exchange):
    held = tensors()
    places = Places(held)
    held[index].add_(1)
    assert not places.have_moved  # a write is no move
    exchange(held[index])
    assert places.have_moved and places.have_moved


def test_writes_are_those_of_the_version_counters():
    """Also through views, and not those that autograd is not told of."""
    held = tensors()
    places = Places(held)
    before = places.count_writes()
    held[0].add_(1)
    held[3].view(-1)[2:4].zero_()
    held[4].data.add_(1)
    assert places.count_writes() == before + 2


def owners():
    made = [SimpleNamespace(data=torch.zeros(2), scale=torch.zeros(2)) for _ in range(COUNT)]
    made[1].scale = None
    return made


CHANGES = {
    "another tensor": lambda owner, name: setattr(owner, name, torch.zeros(2)),
    "other memory": lambda owner, name: setattr(getattr(owner, name), "data", torch.zeros(2)),
    "none": lambda owner, name: setattr(owner, name, None),
}


@pytest.mark.parametrize("index", range(COUNT))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES)
def test_an_attribute_of_any_owner_that_was_exchanged_is_found(change, name, index):
    """In what was noted of the owner, and in what several notes make together."""
    held = owners()
    each = [Attributes.of([owner], NAMES) for owner in held]
    all_of_them = Attributes.merge(each)
    assert len(all_of_them) == 1
    assert not all_of_them[0].have_moved
    if getattr(held[index], name) is None:
        held[index].scale = torch.zeros(2)  # where there was none
    else:
        CHANGES[change](held[index], name)
    assert [one.have_moved for one in each] == [number == index for number in range(COUNT)]
    assert all_of_them[0].have_moved


def test_a_flag_of_any_owner_counts_as_a_move():
    held = [SimpleNamespace(data=torch.zeros(2), swizzled=False) for _ in range(COUNT)]
    (together,) = Attributes.merge([Attributes.of([one], ["data"], ["swizzled"]) for one in held])
    assert not together.have_moved
    held[3].swizzled = True
    assert together.have_moved


def test_owners_of_other_attributes_are_kept_apart():
    first, second = SimpleNamespace(a=torch.zeros(2)), SimpleNamespace(b=torch.zeros(2))
    apart = Attributes.merge([Attributes.of([first], ["a"]), Attributes.of([second], ["b"])])
    assert len(apart) == 2
    second.b = torch.zeros(2)
    assert [one.have_moved for one in apart] == [False, True]
