"""States that are Inf or NaN are refused on all ranks, and no others are."""

from pathlib import Path

import torch

from moe_optim.errors import NonFiniteError
from tests.support.checkpoints.checkpoint_journey import Journey, Station, owned_states
from tests.support.ranks import run_ranks

EXPERT_PARALLEL = Station(ep=2)
SHARDINGS = ("fully_reshardable", "dp_reshardable")


def _save_with(folder: Path, sharding: str, value: float) -> str:
    """Give the second rank, alone in the data-parallel group of its experts, such a moment."""
    journey = Journey(EXPERT_PARALLEL).fill()
    if torch.distributed.get_rank() == 1:
        *_, (_, _, states) = owned_states(journey.parts[-1])
        states["exp_avg"].detach().fill_(value)
    try:
        journey.save(folder, sharding)
    except NonFiniteError as error:
        assert not (folder / "metadata.json").exists()
        return str(error)
    return "saved"


def _save_some(folder: Path) -> list[str]:
    largest = torch.finfo(torch.float32).max
    refused = [_save_with(folder / one, one, torch.nan) for one in SHARDINGS]
    return [*refused, _save_with(folder / "largest", SHARDINGS[0], largest)]


def test_ranks_of_other_data_parallel_groups_refuse_as_well(tmp_path: Path):
    """One of them would wait for the refusing rank to save otherwise. Finite states whose sum is
    beyond fp32 are saved."""
    for *refused, largest in run_ranks(2, _save_some, tmp_path / "saved"):
        for said in refused:
            assert "non-finite exp_avg" in said and "save_nonfinite" in said
        assert largest == "saved"
