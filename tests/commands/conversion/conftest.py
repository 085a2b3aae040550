"""Small checkpoints are cut as large ones are."""

import pytest

from moe_optim.commands.conversion import file_plan


@pytest.fixture(autouse=True)
def smallest_pieces(monkeypatch):
    """A piece is a stored chunk, an expert or a row; tests of commands have whole tensors."""
    monkeypatch.setattr(file_plan, "PIECE_BYTES", 1)
