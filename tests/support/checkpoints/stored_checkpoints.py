"""Small checkpoints of experts as files, written by torch, not by what reads them."""

import argparse
import enum
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

LAYERS, EXPERTS, HIDDEN, FFN = 3, 4, 6, 8
STATES = ("param", "exp_avg", "exp_avg_sq")
FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
FC2 = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
ROUTER = "decoder.layers.mlp.router.weight"
EMBEDDING = "embedding.word_embeddings.weight"
SHAPES = {
    FC1: (LAYERS, EXPERTS, 2 * FFN, HIDDEN),
    FC2: (LAYERS, EXPERTS, HIDDEN, FFN),
    ROUTER: (LAYERS, EXPERTS, HIDDEN),
    EMBEDDING: (32, HIDDEN),
}
FLAT = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16).bucket_idx_0.param"


class Backend(enum.Enum):
    """Stands for enumerations of Megatron in its arguments."""

    FLASH = 2


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random bits: NaNs with payloads, both zeros and subnormals included."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return values.view(dtype).reshape(shape)


def stored_tensors(*, states: bool = True) -> dict[str, torch.Tensor]:
    """Return the tensors of a small model, stacked over layers as Megatron stores them."""
    prefixes = {"": torch.bfloat16}
    if states:
        prefixes |= {f"optimizer.state.{state}.": torch.float32 for state in STATES}
    named = [
        (prefix + key, shape, dtype)
        for prefix, dtype in prefixes.items()
        for key, shape in SHAPES.items()
    ]
    return {key: random_bits(shape, dtype, seed) for seed, (key, shape, dtype) in enumerate(named)}


def common_state(interleave: int | None = None, **args: Any) -> dict[str, Any]:
    """Return a common state with arguments that name a class of the program that trained."""
    known = {"num_experts": EXPERTS, "moe_mlp_glu_interleave_size": interleave}
    return {
        "args": argparse.Namespace(attention_backend=Backend.FLASH, **known, **args),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
    }


def write_torch_dist(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    common: dict[str, Any] | None = None,
    *,
    one_file: bool = True,
) -> Path:
    """Write a torch_dist checkpoint through torch's own writer: in one file, or in many."""
    folder.mkdir(parents=True)
    objects = {"common_state/shard_0_1": [common or common_state()], "rng_state/shard_0_1": [b"x"]}
    state: dict[str, Any] = {**tensors, **objects}
    with warnings.catch_warnings(action="ignore"):  # it takes a single process for a mistake
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)  # a list stays an object
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=one_file)
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(config))
    return folder


def interleaved(fc1: torch.Tensor, rows: int) -> torch.Tensor:
    """Return gate and up rows in alternating blocks: [..., 2F, H], all of gate first before."""
    gate, up = fc1.chunk(2, dim=-2)
    blocks = [
        half
        for g, u in zip(gate.split(rows, dim=-2), up.split(rows, dim=-2), strict=True)
        for half in (g, u)
    ]
    return torch.cat(blocks, dim=-2)


def read_with_torch(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a torch_dist checkpoint, read by torch."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    with warnings.catch_warnings(action="ignore"):
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors


def read_object(folder: Path, key: str) -> bytes:
    """Return the bytes of an object of a torch_dist checkpoint."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    (place,) = [info for index, info in metadata.storage_data.items() if index.fqn == key]
    content = (folder / place.relative_path).read_bytes()
    return content[place.offset : place.offset + place.length]
