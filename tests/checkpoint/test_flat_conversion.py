"""``moe-optim convert`` makes of stock's flat states what stock saves by name, to the bit."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.commands.cli import main as cli
from moe_optim.commands.conversion.opening import open_checkpoint
from tests.support.bytes import assert_same_tensors
from tests.support.checkpoints import hf_models
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

FLAT, BY_NAME = "dp_reshardable", "fully_reshardable"
LEFT_OUT = {*(f"--no-{what}" for what in ("save-optim", "load-optim")), "--use-cpu-initialization"}


def _save_both(folder: Path, expert_parallel: int) -> None:
    """Take a step with Megatron's own optimizer, and save it in both ways. Every rank calls."""
    from megatron.core.enums import ModelType
    from megatron.training import checkpointing, training

    hf_models.install_runtime()
    common = [flag for flag in hf_models.COMMON if flag not in LEFT_OUT]
    more = ["--bf16", "--use-distributed-optimizer", "--no-check-for-nan-in-loss-and-grad"]
    more += ["--global-batch-size", "2", "--expert-model-parallel-size", str(expert_parallel)]
    args = hf_models.start_megatron([*common, *hf_models.QWEN3_MOE, *more])
    model, optimizer, scheduler = training.setup_model_and_optimizer(
        ModelType.encoder_or_decoder, lambda **_: hf_models.build_model(args)
    )
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    for param in model[0].parameters():
        param.main_grad.copy_(torch.randn(param.shape, generator=generator))
    for chunk in model:
        chunk.finish_grad_sync()
    optimizer.step()
    scheduler.step(2)
    for sharding in (FLAT, BY_NAME):
        args.save = str(folder / sharding)
        args.dist_ckpt_optim_fully_reshardable = sharding == BY_NAME
        checkpointing.save_checkpoint(5, model, optimizer, scheduler, 0)
    torch.distributed.barrier()


def common_state(reader: TorchDistReader) -> dict[str, Any]:
    """Return what Megatron would load, but for its arguments, which say where it was saved."""
    assert reader.common_key is not None
    content = io.BytesIO(reader.read_bytes(reader.blobs[reader.common_key][0]))
    (state,) = torch.load(content, weights_only=False)
    del state["args"]
    return state


@pytest.mark.parametrize(
    "expert_parallel", [pytest.param(1, marks=pytest.mark.extended), 2], ids=str
)
def test_states_by_name_are_those_that_megatron_saves(expert_parallel: int, tmp_path: Path):
    """Of two ranks: every tensor, the names of all objects, and the common state with the
    hyper-parameters of every optimizer."""
    run_ranks(2, _save_both, tmp_path, expert_parallel)
    words = [str(tmp_path / FLAT), str(tmp_path / "converted"), "--experts", "grouped"]
    assert cli.main(["convert", *words]) == 0
    got, want = (open_checkpoint(tmp_path / name) for name in ("converted", BY_NAME))
    assert isinstance(got, TorchDistReader)
    assert isinstance(want, TorchDistReader)
    assert any(name.startswith("optimizer.state.exp_avg_sq.") for name in want.tensors)
    assert_same_tensors(
        {name: got.read(name) for name in got.tensors},
        {name: want.read(name) for name in want.tensors},
    )
    assert got.objects.keys() == want.objects.keys()
    assert common_state(got) == common_state(want)
