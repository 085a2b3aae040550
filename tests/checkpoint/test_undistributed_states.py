"""Training, and checkpoints, of a command line without ``--use-distributed-optimizer``."""

from pathlib import Path
from typing import Any

import pytest

from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.loading import fit_by_name
from moe_optim.errors import LayoutError
from tests.support.bytes import assert_bytes_equal
from tests.support.ranks import run_ranks
from tests.support.training import Record, pretrain

pytestmark = pytest.mark.slow

UNDISTRIBUTED = ("--use-distributed-optimizer",)
PLUGIN = ["--use-moe-grouped-optim", "--moe-optim-set", "format=bf16"]
BY_NAME = "--dist-ckpt-optim-fully-reshardable"
SAVED = "iter_0000003"
SIZES = ("--expert-model-parallel-size", "2")


def train(*flags: str, iterations: int = 6) -> Record:
    """Train on two ranks by a command line without the flag; return what the first one saw."""
    given = ["--train-iters", str(iterations), "--eval-interval", "100", *flags]
    record: Record = run_ranks(2, _train, given)[0]
    return record


def _train(flags: list[str]) -> Record:
    return pretrain(flags, None, without=UNDISTRIBUTED)


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> tuple[Path, Record]:
    """Return the folder of a checkpoint that stock has saved after three iterations of six, and
    what it saw of all."""
    folder = tmp_path_factory.mktemp("stock")
    return folder, train(*SIZES, "--save", str(folder), "--save-interval", "3")


def test_the_flag_added_has_the_losses_of_stock(stock):
    _, want = stock
    got = train(*SIZES, *PLUGIN)
    assert got.classes == {"GroupedDistributedOptimizer"}
    assert got.losses == want.losses


def load(folder: Path, *flags: str, **settings: Any) -> Record:
    """Go on from the third iteration."""
    return train("--load", str(folder), "--ckpt-step", "3", *PLUGIN, *flags, **settings)


def test_a_checkpoint_of_stock_is_gone_on_from_to_the_bit(stock):
    """In parallel, too, as most command lines have it."""
    folder, want = stock
    got = load(folder, *SIZES, "--ckpt-fully-parallel-load")
    assert got.losses == {step: loss for step, loss in want.losses.items() if step > 3}


RESHARDED = ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel "
    "--expert-model-parallel-size 2")  # fmt: skip


def test_masters_and_moments_arrive_at_other_parallel_sizes(stock, tmp_path):
    """A checkpoint that is loaded and saved again holds the same bytes under the names of
    ``fully_reshardable``."""
    folder, _ = stock
    anew = [*RESHARDED.split(), "--override-opt_param-scheduler", BY_NAME, "--save", str(tmp_path)]
    load(folder, *anew, iterations=3)
    want, got = TorchDistReader(folder / SAVED), TorchDistReader(tmp_path / SAVED)
    keys = [key for key in want.tensors if key.startswith("optimizer.state.")]
    assert len(keys) > 3
    for key in keys:
        arrived = got.read(key.replace(".fp32_param.", ".param."))
        assert_bytes_equal(arrived, want.read(key), what=key)


def test_a_master_that_was_not_saved_is_named(stock):
    folder, _ = stock

    class Asked:
        key, global_shape = "optimizer.state.param.of.fp32", (4,)

    with pytest.raises(LayoutError, match=r"fp32_param\.of\.fp32, got none.*--no-load-optim"):
        fit_by_name({0: {"param": Asked()}}, TorchDistReader(folder / SAVED))


LEGACY = ["--ckpt-format", "torch"]


def test_whole_states_of_legacy_checkpoints_are_refused_with_a_way_out(tmp_path):
    train(*LEGACY, "--save", str(tmp_path), iterations=3)
    with pytest.raises(AssertionError, match="--ckpt-convert-format torch_dist"):
        load(tmp_path, *LEGACY)


@pytest.mark.extended
def test_the_way_out_holds(tmp_path):
    """What Megatron makes of whole states of a legacy checkpoint is gone on from."""
    want = train(*LEGACY, "--save", str(tmp_path), "--save-interval", "3")
    target = tmp_path / "converted"
    way_out = ["--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(target)]
    train(*LEGACY, "--load", str(tmp_path), "--ckpt-step", "3", *way_out)
    got = load(target / "torch_dist")
    assert got.losses == {step: loss for step, loss in want.losses.items() if step > 3}
