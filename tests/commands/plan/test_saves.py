"""A plan says what a save writes of experts: chunk by chunk, what three ranks write."""

from pathlib import Path

import torch

from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.commands.plan.experts import plan_experts
from moe_optim.commands.plan.saves import count_save
from moe_optim.formats import FORMATS
from tests.support.checkpoints.checkpoint_journey import (
    EXPERTS,
    FFN,
    HIDDEN,
    LAYERS,
    Journey,
    Station,
)
from tests.support.ranks import run_ranks

BUCKET_SIZE = 10_000  # less than a linear's experts: each has a bucket, cut inside of experts


def save(folder: Path, stations: dict[str, Station]) -> None:
    for name, station in stations.items():
        Journey(station).fill().save(folder / name, "fully_reshardable")
        torch.distributed.barrier()


def test_bytes_chunks_and_files_are_those_of_a_real_save(tmp_path):
    """At three ranks, which cut inside of experts, of one parameter for all of them or for each."""
    flags = f"--num-layers {LAYERS} --hidden-size {HIDDEN} --moe-ffn-hidden-size {FFN} --swiglu"
    flags += f" --num-experts {EXPERTS} --ddp-bucket-size {BUCKET_SIZE} --overlap-grad-reduce"
    flags += " --bf16 --use-distributed-optimizer --transformer-impl local --moe-grouped-gemm"
    stations = {
        layout: Station(experts=layout, bucket_size=BUCKET_SIZE)
        for layout in ("grouped", "indexed")
    }
    run_ranks(3, save, tmp_path, stations)
    for layout in stations:
        stored = TorchDistReader(tmp_path / layout)
        expected = {"files": len({b.file for blobs in stored.blobs.values() for b in blobs})}
        for kind, is_kind in (("weight", False), ("state", True)):
            names = [
                name
                for name in stored.tensors
                if ".experts." in name and name.startswith("optimizer.") == is_kind
            ]
            expected[f"{kind}_bytes"] = sum(stored.tensors[name].nbytes for name in names)
            expected[f"{kind}_chunks"] = sum(len(stored.blobs[name]) for name in names)
        planned = count_save(
            plan_experts(flags.split(), grouped=layout == "grouped"), 3, FORMATS["mxfp8"]
        )
        about = planned.pop("metadata_bytes")
        assert planned == expected
        assert expected["state_chunks"] > 3 * LAYERS * EXPERTS * 3  # some experts are cut
        whole = (tmp_path / layout / ".metadata").stat().st_size  # with dense weights and objects
        assert whole / 2 < about < whole
