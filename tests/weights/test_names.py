"""A parameter has one name, whatever wraps its model."""

import pytest
import torch

from moe_optim.weights.names import parameter_names, unwrapped_name


@pytest.mark.parametrize(
    "wrapped",
    ["layer.weight", "module.layer.weight", "module._orig_mod.module.layer._orig_mod.weight"],
)
def test_wrappers_leave_no_trace_in_a_name(wrapped):
    assert unwrapped_name(wrapped) == "layer.weight"


def test_a_component_that_only_contains_the_name_of_a_wrapper_stays():
    assert unwrapped_name("module.submodule.my_module.weight") == "submodule.my_module.weight"


def test_every_parameter_of_every_chunk_is_named():
    chunks = [torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2)]
    chunks[1] = torch.nn.Module()
    chunks[1].module = torch.nn.Linear(2, 2, bias=False)
    names = parameter_names(chunks)
    assert list(names.values()) == ["0.weight", "0.bias", "weight"]
    assert names[chunks[1].module.weight] == "weight"
