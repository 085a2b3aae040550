"""States of Adam and of Muon are told apart by their keys, before anything is loaded."""

import pytest

from moe_optim.checkpoint.state_manifest import require_same_optimizer, state_kinds
from moe_optim.errors import LayoutError

ADAM = {"exp_avg", "exp_avg_sq", "param"}
MUON = {"momentum_buffer", "param"}
FLAT = "optimizer.distributed.dp_group_idx_0.gbuf_idx_1.dtype_(torch.bfloat16, torch.float32)"
"""Prefix of the buckets of a buffer in ``dp_reshardable`` checkpoints."""


@pytest.mark.parametrize(
    ("kinds", "is_muon", "has_matrices", "says"),
    [
        (ADAM, True, True, "expected Muon's optimizer states, got Adam's alone .exp_avg, "),
        (MUON, False, False, "expected Adam's optimizer states, got Muon's .momentum_buffer, "),
        (ADAM | MUON, False, False, "expected Adam's optimizer states, got Muon's"),
    ],
)
def test_states_of_the_other_optimizer_are_refused(kinds, is_muon, has_matrices, says):
    with pytest.raises(LayoutError, match=f"^here: {says}.*--no-load-optim"):
        require_same_optimizer(kinds, "here", is_muon=is_muon, has_matrices=has_matrices)


def test_states_of_the_same_optimizer_pass():
    """Also where all matrices are frozen, and where no optimizer was saved."""
    for kinds, is_muon, has_matrices in (
        (ADAM, False, False), (MUON, True, True), (ADAM | MUON, True, True), (ADAM, True, False),
        (set(), True, True),
    ):  # fmt: skip
        require_same_optimizer(kinds, "here", is_muon=is_muon, has_matrices=has_matrices)


def test_kinds_are_read_from_every_form_of_key():
    """By name, of one optimizer or of a chain, and flat; keys of weights have none."""
    keys = [
        "optimizer.state.exp_avg.decoder.weight",
        "chained_0.optimizer.state.momentum_buffer.decoder.weight",
        f"{FLAT}.bucket_idx_2.param",
        "decoder.optimizer.weight",
    ]
    assert state_kinds(keys) == {"exp_avg", "momentum_buffer", "param"}
