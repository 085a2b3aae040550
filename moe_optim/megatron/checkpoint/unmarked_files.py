"""What a checkpoint without manifests tells of its flat states, and what loads them otherwise."""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from moe_optim.checkpoints.manifests.derived_manifest import StoredBucket, StoredBuffer
from moe_optim.checkpoints.manifests.state_manifest import listed
from moe_optim.checkpoints.stores.reader import FLAT_STATES
from moe_optim.checkpoints.stores.stored_metadata import Blob
from moe_optim.checkpoints.stores.torch_dist import TorchDistReader, blob_start
from moe_optim.errors import LayoutError

WEIGHTS_ALONE = "take the weights alone (--no-load-optim)"
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
_SHAPING = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention",
    "kv_channels", "num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "moe_layer_freq", "mtp_num_layers", "swiglu", "add_bias_linear", "qk_layernorm",
    "normalization", "untie_embeddings_and_output_weights", "padded_vocab_size",
    "transformer_impl", "fp8_param_gather", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
"""Arguments from which names, shapes and places of parameters follow."""


def stored_buffers(stored: TorchDistReader, group: str) -> list[StoredBuffer]:
    """Return what ``.metadata`` says of the buffers of a data-parallel group.

    Raises:
        LayoutError: it has none of this group, or keeps parts of masters in it.
    """
    pattern = re.compile(
        re.escape(group + FLAT_STATES) + r"(\d+)\.dtype_(\(.*\))\.bucket_idx_(\d+)\.param"
    )
    padded = _padded_sizes(stored, group)
    found: dict[int, tuple[str, dict[int, StoredBucket]]] = {}
    for key, info in stored.tensors.items():
        match = pattern.fullmatch(key)
        if match is not None:
            if not info.dtype.is_floating_point:
                raise LayoutError(
                    f"{stored.path}: {key}: expected whole masters, got {info.dtype}: their lower "
                    "bits, as --use-precision-aware-optimizer keeps them beside the weights. "
                    f"{WEIGHTS_ALONE.capitalize()}."
                )
            buffer, bucket = int(match[1]), int(match[3])
            _, buckets = found.setdefault(buffer, (match[2], {}))
            buckets[bucket] = StoredBucket(
                numel=info.shape[0],
                padded=padded.get((buffer, bucket)),
                edges=frozenset(edge for blob in stored.blobs[key] for edge in _edges(blob)),
            )
    if not found:
        raise LayoutError(_no_such_group(stored, group))
    return [
        StoredBuffer(dtype=dtype, buckets=tuple(bucket for _, bucket in sorted(buckets.items())))
        for _, (dtype, buckets) in sorted(found.items())
    ]


def _padded_sizes(stored: TorchDistReader, group: str) -> dict[tuple[int, int], int]:
    """Return the elements of each bucket of each buffer with padding, where they were saved."""
    names = [key for key in stored.objects if key.startswith(f"{group}.per_bucket_numel/")]
    try:
        return {
            (buffer, bucket): int(numel)
            for name in names
            for buffer, by_dtype in enumerate(stored.read_object(name))
            for numels in by_dtype.values()
            for bucket, numel in enumerate(numels)
        }
    except (AttributeError, TypeError, ValueError):
        return {}  # something else, which tells nothing


def _edges(blob: Blob) -> tuple[int, int]:
    (start,) = blob_start(blob)
    return start, start + blob.shape[0]


def _no_such_group(stored: TorchDistReader, group: str) -> str:
    keys = (key.partition(FLAT_STATES) for key in stored.tensors)
    groups = sorted({before for before, is_flat, _ in keys if is_flat})
    differing = differing_arguments(stored)
    return (
        f"{stored.path}: expected flat optimizer states of {group}, got "
        f"{f'those of {listed(groups)}' if groups else 'none'}. Load with the tensor, pipeline "
        "and expert parallel sizes they were saved with"
        f"{f' ({listed(differing)})' if differing else ''}: what is saved from there with "
        f"{_RESHARDABLE} loads at any sizes. Or {WEIGHTS_ALONE}."
    )


def whole_masters(states: Mapping[Any, Any], where: str) -> list[tuple[str, Tensor]]:
    """Return dtype and masters [elements] of each buffer of a legacy state.

    Raises:
        LayoutError: it is of before February 2024.
    """
    found = []
    for number in sorted(key for key in states if isinstance(key, int)):
        ((dtype, tensors),) = states[number].items()
        if not isinstance(tensors["param"], Tensor):
            raise LayoutError(
                f"{where}: expected one tensor a state and buffer, got one a bucket, as Megatron "
                f"saved before February 2024, in another order. {WEIGHTS_ALONE.capitalize()}."
            )
        found.append((str(dtype), tensors["param"]))
    return found


def remedy(stored: TorchDistReader, buffers: Sequence[StoredBuffer]) -> str:
    """Return what loads states of an unknown order: no more than what works."""
    differing = differing_arguments(stored)
    if differing:
        return (
            f"Start with the arguments it was saved with ({listed(differing)}), or {WEIGHTS_ALONE}."
        )
    before_others = (bucket for buffer in buffers for bucket in buffer.buckets[:-1])
    if (  # Megatron 0.19 then saves states by name shifted, or not at all
        any(bucket.padded != bucket.numel for bucket in before_others)
        or stored.arguments.get("moe_single_grouped_weight")
    ):
        return f"{WEIGHTS_ALONE.capitalize()}."
    return f"Have what wrote it load it and save it with {_RESHARDABLE}, or {WEIGHTS_ALONE}."


def differing_arguments(stored: TorchDistReader) -> list[str]:
    """Return arguments that shapes follow from and that a checkpoint was saved with other ones of.

    None where a checkpoint has no arguments, or where Megatron's own loop does not run.
    """
    saved = stored.arguments
    loop = sys.modules.get("megatron.training.global_vars")
    here = vars(getattr(loop, "_GLOBAL_ARGS", None) or argparse.Namespace())
    return [
        f"{name}={saved[name]}, here {here[name]}"
        for name in _SHAPING
        if name in saved and name in here and saved[name] != here[name]
    ]
