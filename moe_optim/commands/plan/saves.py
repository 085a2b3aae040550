"""What a save of optimizer states by name writes of all experts, counted by what writes them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from moe_optim.buckets.layout import Slot
from moe_optim.checkpoint.boxes import OwnedBox, cut_into_boxes, owned_boxes
from moe_optim.commands.plan.experts import PlannedExperts
from moe_optim.commands.plan.stages import count_moe_layers
from moe_optim.formats import BlockScaledFormat
from moe_optim.spelling import spell_bytes, spell_number

_FP32, _BF16 = 4, 2  # bytes
_METADATA_BYTES = 145
"""Bytes of ``.metadata`` per chunk, as torch pickles them."""


def count_save(
    experts: PlannedExperts, gpus: int, format: BlockScaledFormat | None
) -> dict[str, int]:
    """Return what ``--dist-ckpt-optim-fully-reshardable`` writes of the experts of all ranks.

    Chunks are exact where buckets hold experts alone; dense weights move cuts in others. ``format``
    is None for stock Megatron's buckets.
    """
    args, dp_size = experts.args, experts.expert_dp_size(gpus)
    cut = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    copies, kinds = args.expert_model_parallel_size * cut, 2 if experts.has_muon else 3
    numel = chunks = tensors = 0
    for stage, of_chunks in enumerate(count_moe_layers(args)):
        staged = replace(experts, stage=stage, chunks=of_chunks)
        for bucket, count in staged.buckets(gpus, format).items() if any(of_chunks) else ():
            end = bucket.numel if format is None else bucket.aligned_numel(format)
            for slot in bucket.slots:
                stored = _stored(slot, is_split=not args.moe_mlp_glu_interleave_size)
                numel += count * slot.numel
                tensors += count * len(stored)
                chunks += count * sum(1 for _ in _boxes(slot, stored, end // dp_size))
    state_chunks, weight_chunks = kinds * copies * chunks, copies * tensors
    return {
        "state_bytes": kinds * _FP32 * copies * numel,
        "state_chunks": state_chunks,
        "weight_bytes": _BF16 * copies * numel,
        "weight_chunks": weight_chunks,
        "files": gpus // args.num_distributed_optimizer_instances,
        "metadata_bytes": _METADATA_BYTES * (state_chunks + weight_chunks),
    }


def _stored(slot: Slot, *, is_split: bool) -> list[OwnedBox]:
    """Return the tensors that a weight is stored as: gate and up apart, unless they alternate."""
    count, rows, cols = slot.shape
    parts = 2 if is_split and "linear_fc1" in slot.name else 1
    size = (count, rows // parts, cols)
    starts = ((0, part * size[1], 0) for part in range(parts))
    return [OwnedBox(None, start, size, start) for start in starts]


def _boxes(slot: Slot, stored: list[OwnedBox], shard: int) -> Iterator[OwnedBox]:
    """Yield the boxes of a weight that all ranks own; each has ``shard`` elements of the bucket."""
    edges = (0, *slot.cuts(shard), slot.numel)
    for start, end in zip(edges, edges[1:], strict=False):
        yield from owned_boxes(stored, cut_into_boxes(start, end, slot.shape, by_matrix=True))


def explain_save(save: Mapping[str, int]) -> str:
    """Return what a save writes of experts, as a sentence."""
    return (
        f"With --dist-ckpt-optim-fully-reshardable, a save on {spell_number(save['gpus'], 'GPU')} "
        f"writes {spell_bytes(save['state_bytes'])} of experts' masters and moments "
        f"({save['state_chunks']:,} chunks) and {spell_bytes(save['weight_bytes'])} of their "
        f"weights ({save['weight_chunks']:,} chunks) to {spell_number(save['files'], 'file')}, and "
        f"about {spell_bytes(save['metadata_bytes'])} of metadata."
    )
