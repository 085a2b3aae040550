"""What a checkpoint without manifests tells of its flat states, and what loads them otherwise."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from moe_optim.checkpoint.derived_manifest import StoredBuffer
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.flat_buffers import flat_groups, lower_bits_of_masters, read_buffers
from moe_optim.checkpoint.state_manifest import listed
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
    if (key := lower_bits_of_masters(stored, group)) is not None:
        raise LayoutError(
            f"{stored.path}: {key}: expected whole masters, got {stored.tensors[key].dtype}: their "
            "lower bits, as --use-precision-aware-optimizer keeps them beside the weights. "
            f"{WEIGHTS_ALONE.capitalize()}."
        )
    found = read_buffers(stored, group)
    if not found:
        raise LayoutError(_no_such_group(stored, group))
    return found


def _no_such_group(stored: TorchDistReader, group: str) -> str:
    groups = flat_groups(stored)
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
