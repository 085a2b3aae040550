"""Parameters of each group of flat states, and their possible orders given the sizes.

Reads ``.metadata`` and the saved arguments, no tensor values. Flat states are in the reverse of the
order in which modules of Megatron 0.19.2 register parameters in ``__init__``: ``GPTModel``,
``TransformerLayer``, ``SelfAttention``, ``MLASelfAttention``, ``MLP`` and ``MoELayer``. Callers
must verify it against values.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_optim.checkpoint.derived_manifest import (
    Parameter,
    derive_manifests,
    lower_bits_of_masters,
    read_buffers,
)
from moe_optim.checkpoint.files.reader import is_state
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.state_kinds import MOMENTUM, flat_groups, state_kinds
from moe_optim.checkpoint.state_manifest import StateManifest
from moe_optim.commands.conversion.layer_view import LayerView
from moe_optim.errors import LayoutError, listed
from moe_optim.experts.keys.finding import MAX_EXPERTS

_EXPERTS = ".mlp.experts."
_UNCUT = ("tensor", "pipeline", "virtual pipeline", "expert tensor")

_LAYER = re.compile(r"decoder\.layers\.(0|[1-9][0-9]{0,3})\.(.+)")
_INPUT_NORM = "self_attention.linear_qkv.layer_norm_weight"
_ATTENTION = (
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_q_proj.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attention.linear_kv_up_proj.weight",
    _INPUT_NORM,
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "self_attention.kv_layernorm.weight",
)
_NETWORK = (
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
    "mlp.router.weight",
    "mlp.router.bias",
    "mlp.experts.linear_fc1.weight",
    "mlp.experts.linear_fc1.bias",
    "mlp.experts.linear_fc2.weight",
    "mlp.experts.linear_fc2.bias",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
)
_FUSED = ("input_layernorm.weight", *_ATTENTION, *_NETWORK)
# Megatron's local layers store the first norm as part of the next module
_APART = (
    "input_layernorm.weight",
    _INPUT_NORM,
    *(name for name in _ATTENTION if name != _INPUT_NORM),
    *_NETWORK,
)
_FIRST = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
_LAST = (
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatGroup:
    """A data-parallel group, whose ranks shared buckets."""

    name: str
    """Prefix of its keys."""
    parameters: tuple[Parameter, ...]
    """Parameters in registration order; experts are numbered from 0 in each group."""
    first_expert: int
    candidates: tuple[StateManifest, ...]


def read_groups(stored: TorchDistReader) -> list[FlatGroup]:
    """Return the data-parallel groups with the orders that sizes permit; LayoutError if none."""
    where, sizes = stored.path, stored.recorded.parallel_sizes
    if not stored.arguments:
        raise refusal(where, "Megatron's arguments beside them", "none")
    if MOMENTUM in state_kinds(stored.tensors):
        raise refusal(where, "states of Adam alone", f"Muon's ({MOMENTUM}), laid out otherwise")
    cut = [f"{name} {sizes[name]}" for name in _UNCUT if sizes.get(name, 1) > 1]
    if cut:
        raise refusal(where, "no parallel sizes but data and expert", ", ".join(cut))
    view = LayerView(stored, num_layers=num_layers_of(stored))
    names = [key for key in view.tensors if not is_state(key) and _is_parameter(key)]
    order = _registration_order(names, str(stored.arguments.get("transformer_impl")))
    if order is None:
        unknown = [name for name in names if _registration_order([name], "local") is None]
        raise refusal(where, "modules whose order is known", listed(unknown))
    parameters = [
        Parameter(name=name, shape=view.tensors[name].shape, dtype=str(view.tensors[name].dtype))
        for name in order
    ]
    counts = [one.shape[0] for one in parameters if _EXPERTS in one.name and one.shape]
    if max(counts, default=0) > MAX_EXPERTS:
        raise refusal(where, f"at most {MAX_EXPERTS:,} experts", f"{max(counts):,}")
    groups = _shares(stored, parameters, sizes.get("expert", 1))
    for group in groups:
        if not group.candidates:
            numel = sum(parameter.numel for parameter in group.parameters)
            found = sum(buffer.numel for buffer in read_buffers(stored, group.name))
            expected = (
                f"{group.name} to be laid out as Megatron lays out {numel:,} elements of these "
                "weights"
            )
            raise refusal(where, expected, f"{found:,} elements, laid out otherwise")
    return groups


def _shares(
    stored: TorchDistReader, parameters: Sequence[Parameter], expert_parallel: int
) -> list[FlatGroup]:
    names = flat_groups(stored.tensors)
    count = 1 if expert_parallel == 1 else 1 + expert_parallel
    if len(names) != count:
        got = f"{len(names)}: {listed(names)}"
        raise refusal(stored.path, f"{count:,} groups of ranks", got)
    for name in names:
        if (key := lower_bits_of_masters(stored, name)) is not None:
            raise refusal(stored.path, "whole masters", f"lower bits of them: {key}")
        if any(buffer.is_quantized for buffer in read_buffers(stored, name)):
            raise refusal(stored.path, "weights in high precision", "quantized ones")
    wanted: list[tuple[Sequence[Parameter], int]] = [(parameters, 0)]
    if expert_parallel > 1:
        dense = [one for one in parameters if _EXPERTS not in one.name]
        experts = [one for one in parameters if _EXPERTS in one.name]
        of_layer = {one.shape[0] if one.shape else 0 for one in experts}
        local = (of_layer.pop() if len(of_layer) == 1 else 0) // expert_parallel
        mine = [replace(one, shape=(local, *one.shape[1:])) for one in experts]
        wanted = [(dense, 0), *((mine, local * rank) for rank in range(expert_parallel))]
    interleave = stored.recorded.glu_interleave or None
    return [
        FlatGroup(
            name=name,
            parameters=tuple(of_group),
            first_expert=first_expert,
            candidates=tuple(derive_manifests([of_group], read_buffers(stored, name), interleave)),
        )
        for name, (of_group, first_expert) in zip(names, wanted, strict=True)
    ]


def _registration_order(names: Iterable[str], transformer_impl: str) -> list[str] | None:
    """Return parameter names in the order in which a model registers them.

    Args:
        names: parameter names in ``torch_dist``, one per layer, experts in layout ``grouped``.
        transformer_impl: Megatron's argument.

    Returns:
        Ordered names; None if one belongs to an unknown module.
    """
    within = _APART if transformer_impl == "local" else _FUSED
    places: dict[str, tuple[int, int, int]] = {}
    for name in names:
        layer = _LAYER.fullmatch(name)
        if layer and layer[2] in within:
            places[name] = (1, int(layer[1]), within.index(layer[2]))
        elif name in _FIRST:
            places[name] = (0, 0, _FIRST.index(name))
        elif name in _LAST:
            places[name] = (2, 0, _LAST.index(name))
        else:
            return None
    return sorted(places, key=lambda name: places[name])


def _is_parameter(key: str) -> bool:
    """Return whether a key is a trained tensor, not an amax or a routing bias."""
    return "experts.experts." not in key and not key.endswith(".router.expert_bias")


def num_layers_of(stored: TorchDistReader) -> int | None:
    """Return the number of layers in the saved arguments, or None."""
    layers = stored.arguments.get("num_layers")
    return layers if type(layers) is int and layers > 0 else None


def refusal(where: Path, expected: str, got: str) -> LayoutError:
    """Return the error for flat states whose layout is uncertain."""
    return LayoutError(
        f"{where}: expected flat optimizer states that can be told apart by parameter: "
        f"{expected}, got {got}. Load it at its own sizes and save with "
        "--dist-ckpt-optim-fully-reshardable, or convert with --weights-only."
    )
