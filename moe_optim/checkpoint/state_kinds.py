"""Keys and kinds of states in a checkpoint, by which an optimizer knows those of another one."""

import re
from collections.abc import Collection, Iterable

from moe_optim.errors import LayoutError

FLAT_STATES = ".gbuf_idx_"
"""Key part of states stored bucket by bucket."""
MOMENTUM = "momentum_buffer"
"""Name of Muon's state, as in emerging-optimizers."""
MASTER, WHOLE_MASTER = MASTERS = ("param", "fp32_param")
"""Names of masters: in distributed optimizers, and in all others of Megatron."""
SHARDING_TYPE, BY_NAME = "distrib_optim_sharding_type", "fully_reshardable"
"""Key of the sharding type in Megatron's metadata, and its value for states by name."""
BY_NAME_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>[^.]+)\.(?P<name>.+)")
"""Form of the keys of states by parameter name, of one optimizer or of a chain."""
_FLAT = re.compile(rf".*{re.escape(FLAT_STATES)}\d+\..*\.bucket_idx_\d+\.(?P<kind>[^.]+)")


def is_state(key: str) -> bool:
    """Return whether ``key`` belongs to the optimizer."""
    return key.startswith(("optimizer.", "chained_"))


def state_kinds(keys: Iterable[str]) -> set[str]:
    """Return the kinds of states among the keys of a checkpoint, such as ``exp_avg``."""
    found = [_FLAT.fullmatch(key) or BY_NAME_KEY.fullmatch(key) for key in keys]
    return {match["kind"] for match in found if match is not None}


def require_same_optimizer(
    kinds: Collection[str], where: str, *, is_muon: bool, has_matrices: bool
) -> None:
    """Raise LayoutError for states of Adam in a run with Muon, and for those of Muon without it.

    Args:
        kinds: kinds of the saved states; none if no optimizer was saved.
        where: source in error messages.
        is_muon: whether this is a run with Muon.
        has_matrices: whether Muon steps any parameter of this rank. Where all matrices are frozen,
            a run with Muon has the states of Adam alone.
    """
    if not kinds or is_muon == (MOMENTUM in kinds) or (is_muon and not has_matrices):
        return
    wanted, got = "Muon's", "Adam's alone"
    if not is_muon:
        wanted, got = "Adam's", "Muon's"
    raise LayoutError(
        f"{where}: expected {wanted} optimizer states, got {got} ({', '.join(sorted(kinds))}): one "
        "optimizer cannot go on from states of the other. Give the --optimizer that the checkpoint "
        "was saved with, or take the weights alone (--no-load-optim)."
    )


def flat_groups(keys: Iterable[str]) -> list[str]:
    """Return the prefix of each data-parallel group of flat states among keys, sorted."""
    return sorted({key.partition(FLAT_STATES)[0] for key in keys if FLAT_STATES in key})


def bucket_key(group: str, dtype: str, buffer: int, bucket: int) -> str:
    """Return the key prefix of a bucket's states; the kind of state follows a dot."""
    return f"{group}{FLAT_STATES}{buffer}.dtype_{dtype}.bucket_idx_{bucket}"
