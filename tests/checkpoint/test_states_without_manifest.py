"""Flat states that stock Megatron saved: every element arrives, or one error says what to do.

Each advice that an error gives is followed here, and works.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from moe_optim.checkpoint.files.folders import TRACKER
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.states_without_manifest import stored_buffers
from moe_optim.commands.cli.main import main
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import LayoutError
from tests.support.bytes import assert_same_tensors
from tests.support.checkpoints.stored_checkpoints import write_torch_dist
from tests.support.checkpoints.unmarked import (
    TIED,
    refuse,
    resume,
    save_stock,
)
from tests.support.ranks import run_ranks
from tests.support.training import OVERLAP

pytestmark = pytest.mark.slow

INDEXED = MoEOptimConfig(format="bf16", expert_layout="indexed")
GROUPED = MoEOptimConfig(format="bf16")
MXFP8 = MoEOptimConfig(format="mxfp8")

EXPERT_PARALLEL = ["--expert-model-parallel-size", "2"]
SMALL_BUCKETS = [*OVERLAP, "--ddp-bucket-size", "20000"]
LEGACY = ["--ckpt-format", "torch"]

SETTINGS = {  # flags of both runs, more flags of the first, what loads
    "expert parallel": (EXPERT_PARALLEL, SMALL_BUCKETS, (GROUPED, MXFP8)),
    "a legacy file": (LEGACY, [], (INDEXED,)),
}


@pytest.mark.parametrize(("flags", "first", "configs"), SETTINGS.values(), ids=SETTINGS)
def test_states_of_stock_megatron_arrive_in_every_layout_and_format(
    flags: list[str],
    first: list[str],
    configs: Sequence[MoEOptimConfig],
    tmp_path: Path,
):
    """Stock Megatron trains one parameter an expert, fc1 and fc2 of one beside each other, and
    saves flat states without a word on that. Every master and moment of every expert is then the
    one it was saved as, and in bf16 the next losses are stock's to the bit."""
    saved = run_ranks(2, save_stock, str(tmp_path / "stock"), [*flags, *first])
    for config in configs:
        resumed = run_ranks(2, resume, str(tmp_path / "stock"), flags, config)
        for got, want in zip(resumed, saved, strict=True):
            assert_same_tensors(got.extra, want.extra, what=str(config))
            assert got.losses.keys() == {3, 4}
            for iteration, loss in got.losses.items():
                assert config.format != "bf16" or loss == want.losses[iteration]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A checkpoint of two data-parallel ranks, and what each of them saved."""
    folder = str(tmp_path_factory.mktemp("stock"))
    return folder, run_ranks(2, save_stock, folder, [])


OTHERS = {  # flags of a model that is not the saved one -> what the error says
    ("--num-experts", "8", "--no-load-optim"): (
        "router.weight is [2, 4, 64], expected [2, 8, 64]", "--num-experts: 4, here 8",
    ),
    (TIED,): (
        "expected flat optimizer states of 185,152 elements", "got 189,248 of (torch.bfloat16",
        "--untie-embeddings-and-output-weights: True, here False", "--no-load-optim",
    ),
    tuple(EXPERT_PARALLEL): (
        "expected flat optimizer states of chained_0.optimizer.distributed.dp_group_idx_0",
        "--expert-model-parallel-size: 1, here 2", "--no-load-optim",
    ),
}  # fmt: skip


@pytest.mark.parametrize("flags", OTHERS, ids=" ".join)
def test_states_of_another_model_are_refused_before_anything_has_moved(stock, flags):
    """One error, on every rank, names the tensors or sizes and the arguments that differ; masters
    and weights of the model are those it had."""
    for message, moved in run_ranks(2, refuse, stock[0], flags, MXFP8):
        for words in OTHERS[flags]:
            assert words in message
        assert "trust_unmarked_states" not in message
        assert moved == []


def test_without_the_optimizer_the_weights_of_a_refused_checkpoint_load(stock):
    """``--no-load-optim``, where the error advises it: masters are the weights that were saved."""
    folder, saved = stock
    masters = {name: v for name, v in saved[0].extra.items() if name.startswith("param")}
    for got in run_ranks(2, resume, folder, [TIED, "--no-load-optim"], GROUPED):
        compared = 0
        for name, values in got.extra.items():
            if name in masters and "experts" not in name:  # numbered from 0 on each rank
                assert torch.equal(values, masters[name].bfloat16().float()), name
                compared += 1
        assert compared >= 10


def test_another_interleave_is_refused_and_converted_weights_load(stock, tmp_path: Path):
    """The rows of fc1 would be swapped; the command that the error spells out runs, and what it
    writes trains as the weights that were saved do."""
    folder, _ = stock
    flags = ["--moe-mlp-glu-interleave-size", "32"]
    ((message, moved),) = run_ranks(1, refuse, folder, flags, MXFP8)
    assert "expected 32 as in this model, got None" in message and moved == []
    command = re.search(r"`moe-optim (convert .*)` and load that with --finetune", message)[1]
    assert main(command.replace("NEW", str(tmp_path / "new")).split()) == 0
    (kept,) = run_ranks(1, resume, folder, ["--finetune"], GROUPED)
    (turned,) = run_ranks(1, resume, str(tmp_path / "new"), [*flags, "--finetune"], GROUPED)
    assert turned.losses[1] == kept.losses[1]


@pytest.mark.extended
def test_masters_of_another_iteration_than_the_weights_are_refused(tmp_path: Path):
    """As where a file of another iteration was copied into the folder."""
    folder = tmp_path / "stock"
    run_ranks(1, save_stock, str(folder), LEGACY)
    (newest,) = folder.glob(f"iter_*{(folder / TRACKER).read_text()}/mp_rank_00/distrib_optim.pt")
    shutil.copy(newest, folder / "iter_0000004/mp_rank_00" / newest.name)
    flags = [*LEGACY, "--ckpt-step", "4"]
    ((message, _),) = run_ranks(1, refuse, str(folder), flags, INDEXED)
    assert "masters round to the weights" in message


def test_lower_bits_of_masters_are_not_taken_for_masters(tmp_path: Path):
    """``--use-precision-aware-optimizer`` saves int16, which would load as numbers."""
    group = "optimizer.distributed.dp_group_idx_0"
    key = f"{group}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param"
    write_torch_dist(tmp_path / "c", {key: torch.zeros(64, dtype=torch.int16)})
    with pytest.raises(LayoutError, match=r"whole masters, got torch.int16.*--no-load-optim"):
        stored_buffers(TorchDistReader(tmp_path / "c"), group)
