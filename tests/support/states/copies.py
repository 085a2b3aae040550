"""Ways in which torch copies a module."""

import copy

import pytest

every_copy = pytest.mark.parametrize(
    "transfer",
    [copy.deepcopy, lambda module: module._apply(lambda tensor: tensor.to("cpu", copy=True))],
    ids=["deepcopy", "move"],
)
