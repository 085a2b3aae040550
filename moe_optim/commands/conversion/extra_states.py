"""Empty extra states: objects that Megatron asks for beside weights, and that mean nothing.

Its linears and Transformer Engine's modules save an ``_extra_state`` each, which holds the scales
of delayed FP8 scaling and is empty otherwise. A load in Megatron's default strictness fails where
one is missing, and takes no notice of one too many: so every module that may have one gets one.
"""

import io
from collections.abc import Iterator

import torch

_WITHOUT = ("embedding.", "output_layer.")
_ROUTER = ".mlp.router."
_CORE = "self_attention.core_attention"


def empty_state() -> bytes:
    """Return what ``torch_dist`` stores for an extra state that is None."""
    content = io.BytesIO()
    torch.save([None], content)
    return content.getvalue()


def extra_state_keys(stored: str, layers: tuple[int, int] | None, experts: int) -> Iterator[str]:
    """Yield the keys of the extra states that may lie beside a stored tensor.

    Args:
        stored: name of the tensor, as ``torch_dist`` has it.
        layers: number of its layer and how many there are, where those of all share a name.
        experts: that are in the tensor; 0 where it is no experts'.
    """
    if stored.startswith(_WITHOUT) or _ROUTER in stored:
        return
    module, _, tail = stored.rpartition(".")
    modules = [module] if tail in ("weight", "layer_norm_weight") else []
    if module.endswith("self_attention.linear_proj"):
        modules.append(f"{module.removesuffix('self_attention.linear_proj')}{_CORE}")
    for name in modules:
        for expert in range(experts) if experts else [None]:
            place = [layers] if layers else []
            place += [] if expert is None else [(expert, experts)]
            offset = ".".join(str(number) for number, _ in place) or "0"
            shape = ".".join(str(count) for _, count in place) or "1"
            yield f"{name}._extra_state/shard_{offset}_{shape}"
