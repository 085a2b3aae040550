"""The helper of Megatron's datasets is compiled where it is not there, and nowhere else."""

import sys

from moe_optim.megatron.launch import dataset_helpers


def test_a_helper_that_can_be_imported_is_not_compiled(monkeypatch):
    """That of the wheel, which has no Makefile; one that is missing Megatron's function makes."""
    made = []
    monkeypatch.setattr(dataset_helpers, "original", lambda target: lambda: made.append(target))
    dataset_helpers.compile_helpers()
    assert made == []
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)
    dataset_helpers.compile_helpers()
    assert made == ["megatron.core.datasets.utils:compile_helpers"]
