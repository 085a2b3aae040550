"""Small checkpoints are cut as large ones are."""

import pytest

from moe_optim.commands.conversion import pieces


@pytest.fixture(autouse=True)
def smallest_pieces(monkeypatch):
    """A piece is a stored chunk, an expert or a row; tests of commands have whole tensors."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1)
