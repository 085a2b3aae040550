"""What Megatron's common state says of states by name, made from what stands beside flat ones.

Beside flat states each data-parallel group has an object with the hyper-parameters of its
optimizer. Beside states by name these are the same for all ranks, and so in the common state.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.state_manifest import MANIFEST
from moe_optim.commands.conversion.flat_groups import refusal
from moe_optim.errors import LayoutError

_OF_GROUP = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+\.(\w+)/.*")
_OF_BUCKETS = ("per_bucket_numel", "per_bucket_numel_unpadded", MANIFEST)
_BY_NAME = "fully_reshardable"
_PLAIN = (bool, int, float, str, type(None))
_MOST_VALUES, _DEEPEST = 100_000, 10
"""More than hyper-parameters have: what has more has another purpose."""


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
        value = _plain(stored, name, stored.read_object(name))
        if of_optimizer.setdefault(match[2], value) != value:
            raise LayoutError(
                refusal(stored.path, "the same hyper-parameters for all ranks", f"others in {name}")
            )
    if not optimizers:
        raise LayoutError(refusal(stored.path, "hyper-parameters beside them", "none"))
    by_name = {
        index: {**entries, "param_state_sharding_type": _BY_NAME}
        for index, entries in sorted(optimizers.items(), key=lambda one: one[0] or 0)
    }
    content = stored.common_state.get("content_metadata") or {}
    return {
        "optimizer": by_name.get(None, by_name),
        "content_metadata": {
            **_plain(stored, "content_metadata", content),
            "distrib_optim_sharding_type": _BY_NAME,
            "distrib_optim_fully_reshardable_mem_efficient": False,
        },
    }


def _plain(stored: TorchDistReader, name: str, value: Any) -> Any:
    """Return a value of numbers and text; LayoutError of anything else, or of very many."""
    waiting, is_plain = [(0, value)], True
    for _ in range(_MOST_VALUES):  # what refers to itself or is shared counts whenever it is met
        if not (waiting and is_plain):
            break
        depth, one = waiting.pop()
        if isinstance(one, dict | list | tuple) and depth < _DEEPEST:
            parts = [*one, *one.values()] if isinstance(one, dict) else one
            waiting += [(depth + 1, part) for part in parts]
        else:
            is_plain = isinstance(one, _PLAIN)
    if waiting or not is_plain:
        raise LayoutError(
            refusal(stored.path, "hyper-parameters in numbers and text", f"others in {name}")
        )
    return value
