"""Narrow moments as files: inspected, compared and converted, flat or by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.commands.cli import main as cli
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.config import MoEOptimConfig
from tests.support.bytes import assert_bytes_equal
from tests.support.ranks import run_ranks
from tests.support.training import pretrain

pytest.importorskip("megatron.core")

STEPS = ["--train-iters", "2", "--eval-interval", "2"]
NARROW = "--use-precision-aware-optimizer --exp-avg-dtype {} --exp-avg-sq-dtype {}"
BY_NAME = "--dist-ckpt-optim-fully-reshardable"
MOMENTS = ("exp_avg", "exp_avg_sq")


def save(folder: Path, moments: tuple[str, str], *flags: str) -> Path:
    """Train two steps on two ranks, and return the one checkpoint of them."""
    options = [*STEPS, *flags, *NARROW.format(*moments).split(), "--save", str(folder)]
    run_ranks(2, pretrain, options, MoEOptimConfig(format="mxfp8"))
    return folder / "iter_0000002"


@pytest.fixture
def run(capsys):
    """Return a function that runs a command; it gives exit code and what was printed."""

    def call(*words: Any) -> tuple[int, str]:
        code = cli.main([*map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


def dtypes_of(run: Any, checkpoint: Path) -> dict[str, Any]:
    code, said = run("inspect", "--json", checkpoint)
    assert code == 0
    found: dict[str, Any] = json.loads(said)["optimizer"]
    return found


def test_flat_states_are_inspected_and_compared_and_converted_without_them(run, tmp_path):
    """Converting them is refused before there is anything at the target; weights go there and back
    to the byte. Scaled moments are saved as the values that they stand for."""
    saved = save(tmp_path / "saved", ("fp8", "fp16"))
    found = dtypes_of(run, saved)
    assert found["sharding"] == "dp_reshardable"
    assert found["dtypes"] == dict.fromkeys(("param", *MOMENTS), ["float32"])

    copy = shutil.copytree(saved, tmp_path / "copy")
    code, said = run("verify", saved, copy)
    assert code == 0
    assert "not compared: the two" not in said  # flat states were
    for to, *more in (("hf", "--format", "safetensors"), ("grouped",)):
        target = tmp_path / f"refused {to}"
        code, said = run("convert", saved, target, "--experts", to, *more)
        assert code == 2
        assert "expected optimizer states by parameter, got whole buckets" in said
        assert "--dist-ckpt-optim-fully-reshardable, or convert with --weights-only" in said
        assert not target.exists()

    there, back = tmp_path / "there", tmp_path / "back"
    to_hf = ("--experts", "hf", "--format", "safetensors", "--weights-only")
    assert run("convert", saved, there, *to_hf)[0] == 0
    assert run("convert", there, back, "--experts", "grouped", "--format", "torch_dist")[0] == 0
    assert run("verify", saved, back, "--weights-only")[0] == 0
    code, said = run("verify", saved, back)
    assert code == 1  # back has no states
    assert "exp_avg_sq: only in A" in said


def test_states_by_name_go_there_and_back(run, tmp_path):
    """Through safetensors in Hugging Face's layout, bit by bit; Megatron gathers all kinds of state
    in fp32."""
    saved = save(tmp_path / "saved", ("bf16", "fp8"), BY_NAME)
    there, back = tmp_path / "there", tmp_path / "back"
    assert run("convert", saved, there, "--experts", "hf", "--format", "safetensors")[0] == 0
    assert run("convert", there, back, "--experts", "indexed", "--format", "torch_dist")[0] == 0
    assert run("verify", saved, there)[0] == run("verify", saved, back)[0] == 0
    for checkpoint in (saved, there, back / saved.name):
        dtypes = dtypes_of(run, checkpoint)["dtypes"]
        assert dtypes == dict.fromkeys(("param", *MOMENTS), ["float32"])


@pytest.mark.extended
def test_a_file_has_the_moments_that_a_rank_held(tmp_path):
    """Of every bucket, both ranks' parts behind each other, in the dtype they were trained in."""
    options = [*STEPS, *NARROW.format("bf16", "bf16").split(), "--save", str(tmp_path)]
    config = MoEOptimConfig(format="mxfp8")
    records = run_ranks(2, pretrain, options, config, True, _shards)
    reader = open_checkpoint(tmp_path / "iter_0000002")
    flat = {key: key.rpartition(".")[2] for key in reader.tensors if ".gbuf_idx_" in key}
    held = {key: reader.read(key) for key in flat}
    assert set(flat.values()) == {"param", *MOMENTS}
    for rank, record in enumerate(records):
        for buffer, bucket, start, kind, shard in record.extra:
            (key,) = (
                key
                for key in flat
                if f".gbuf_idx_{buffer}." in key and key.endswith(f".bucket_idx_{bucket}.{kind}")
            )
            stored = held[key][start:][: shard.numel()]
            assert_bytes_equal(stored, shard, what=f"rank {rank}: {kind} at {start}")


def _shards(_model: list[Any], optimizer: Any) -> list[tuple[int, int, int, str, torch.Tensor]]:
    """Return every shard of this rank with where it starts in its bucket, without padding."""
    found = []
    for part in optimizer.chained_optimizers:
        for number, ranges in enumerate(part.gbuf_ranges):
            (buckets,) = ranges.values()
            for index, bucket in enumerate(buckets):
                for param, places in bucket["param_map"].items():
                    start = places["gbuf_world_in_bucket"].start
                    group, order = part.model_param_group_index_map[param]
                    master = part.optimizer.param_groups[group]["params"][order]
                    state = part.optimizer.state[master]
                    shards = {"param": master} | {kind: state[kind] for kind in MOMENTS}
                    found += [
                        (number, index, start, kind, shard.clone().flatten())
                        for kind, shard in shards.items()
                    ]
    return found
