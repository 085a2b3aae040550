"""Reads the buffer layout of flat states from ``.metadata``."""

import re

from torch import Tensor

from moe_optim.checkpoint.derived_manifest import StoredBucket, StoredBuffer
from moe_optim.checkpoint.files.reader import FLAT_STATES
from moe_optim.checkpoint.files.torch_dist import TorchDistReader

_MASTER = r"(\d+)\.dtype_(\(.*\))\.bucket_idx_(\d+)\.param"


def flat_groups(stored: TorchDistReader) -> list[str]:
    """Return the state key prefix of each data-parallel group, sorted."""
    keys = (key.partition(FLAT_STATES) for key in stored.tensors)
    return sorted({before for before, is_flat, _ in keys if is_flat})


def bucket_key(group: str, dtype: str, buffer: int, bucket: int) -> str:
    """Return the key prefix of a bucket's states; the kind of state follows a dot."""
    return f"{group}{FLAT_STATES}{buffer}.dtype_{dtype}.bucket_idx_{bucket}"


def read_buffers(stored: TorchDistReader, group: str) -> list[StoredBuffer]:
    """Return the buffers of a data-parallel group, empty if the checkpoint has none."""
    padded = _padded_sizes(stored, group)
    found: dict[int, tuple[str, dict[int, StoredBucket]]] = {}
    for key, match in _masters(stored, group):
        buffer, bucket = int(match[1]), int(match[3])
        _, buckets = found.setdefault(buffer, (match[2], {}))
        buckets[bucket] = StoredBucket(
            numel=stored.tensors[key].shape[0],
            padded=padded.get((buffer, bucket)),
            edges=frozenset(
                edge
                for blob in stored.blobs[key]
                for edge in (blob.corner[0], blob.corner[0] + blob.shape[0])
            ),
        )
    return [
        StoredBuffer(dtype=dtype, buckets=tuple(bucket for _, bucket in sorted(buckets.items())))
        for _, (dtype, buckets) in sorted(found.items())
    ]


def lower_bits_of_masters(stored: TorchDistReader, group: str) -> str | None:
    """Return a key of a group that stores only the lower bits of masters, None for whole masters.

    ``--use-precision-aware-optimizer`` stores these beside the weights.
    """
    keys = (key for key, _ in _masters(stored, group))
    return next((key for key in keys if not stored.tensors[key].dtype.is_floating_point), None)


def rounds_to(master: Tensor, weight: Tensor) -> bool:
    """Return whether every element of ``master`` rounds to ``weight``, of the same shape."""
    rounded = master.to(weight.dtype)
    return bool(((rounded == weight) | (rounded.isnan() & weight.isnan())).all())


def _masters(stored: TorchDistReader, group: str) -> list[tuple[str, re.Match[str]]]:
    pattern = re.compile(re.escape(group + FLAT_STATES) + _MASTER)
    flat = (key for key, info in stored.tensors.items() if len(info.shape) == 1)
    found = ((key, pattern.fullmatch(key)) for key in flat)
    return [(key, match) for key, match in found if match is not None]


def _padded_sizes(stored: TorchDistReader, group: str) -> dict[tuple[int, int], int]:
    """Return the padded elements of each (buffer, bucket), if saved."""
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
        return {}  # not Megatron's format
