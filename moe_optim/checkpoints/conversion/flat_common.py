"""What Megatron's common state says of states by name, made from what stands beside flat ones.

Beside flat states each data-parallel group has an object with the hyper-parameters of its
optimizer. Beside states by name these are the same for all ranks, and so in the common state.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from moe_optim.checkpoints.conversion.flat_groups import refusal
from moe_optim.checkpoints.manifests.state_manifest import MANIFEST
from moe_optim.checkpoints.stores.torch_dist import TorchDistReader
from moe_optim.errors import LayoutError

_OF_GROUP = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+\.(\w+)/.*")
_OF_BUCKETS = ("per_bucket_numel", "per_bucket_numel_unpadded", MANIFEST)
_BY_NAME = "fully_reshardable"
_PLAIN = (bool, int, float, str, type(None))


def named_common_entries(stored: TorchDistReader) -> Mapping[str, Any]:
    """Return the entries of the common state that states by name have otherwise.

    Raises:
        LayoutError: there are no hyper-parameters, other ones than numbers and text, or others from
            rank to rank.
        StateError: an object is missing or damaged.
    """
    optimizers: dict[int | None, dict[str, Any]] = defaultdict(dict)
    for name in sorted(stored.objects):
        match = _OF_GROUP.fullmatch(name)
        if match is None or match[2] in _OF_BUCKETS:
            continue
        of_optimizer = optimizers[None if match[1] is None else int(match[1])]
        value = stored.read_object(name)
        if not _is_plain(value) or of_optimizer.setdefault(match[2], value) != value:
            raise LayoutError(
                refusal(
                    stored.path,
                    "the same hyper-parameters for all ranks, in numbers and text",
                    f"others in {name}",
                )
            )
    if not optimizers:
        raise LayoutError(refusal(stored.path, "hyper-parameters beside them", "none"))
    by_name = {
        index: {**entries, "param_state_sharding_type": _BY_NAME}
        for index, entries in optimizers.items()
    }
    content = stored.common_state.get("content_metadata") or {}
    return {
        "optimizer": by_name[None] if None in by_name else dict(sorted(by_name.items())),
        "content_metadata": {
            **content,
            "distrib_optim_sharding_type": _BY_NAME,
            "distrib_optim_fully_reshardable_mem_efficient": False,
        },
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(one) for entry in value.items() for one in entry)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
