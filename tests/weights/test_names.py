"""A parameter has one name, whatever wraps its model."""

import torch

from moe_optim.weights.names import parameter_names, unwrapped_name


def test_wrappers_leave_no_trace_in_a_name():
    """A component that only contains the name of a wrapper stays."""
    for name in ("layer", "module.layer", "module._orig_mod.module.layer._orig_mod"):
        assert unwrapped_name(f"{name}.weight") == "layer.weight"
    assert unwrapped_name("module.submodule.my_module.weight") == "submodule.my_module.weight"


def test_every_parameter_of_every_chunk_is_named():
    chunks = [torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2)]
    chunks[1] = torch.nn.Module()
    chunks[1].module = torch.nn.Linear(2, 2, bias=False)
    names = parameter_names(chunks)
    assert list(names.values()) == ["0.weight", "0.bias", "weight"]
    assert names[chunks[1].module.weight] == "weight"
