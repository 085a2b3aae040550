"""Replaces Transformer Engine's kernels by this package's, with the same arguments.

Covers casts of master shards into quantized weights, over ranks, and Adam over lists of tensors.
Other cases (per-tensor scales, FSDP's shards, fp16 or 8-bit moments, CUDA graphs) stay Transformer
Engine's. Imported by its bare name, like ``outcome_lines``.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_optim.formats.reference.adam import Hyper
from moe_optim.kernels.adam_state import AdamState
from moe_optim.kernels.member_table import MemberTable, TableEntry
from moe_optim.kernels.step_table import StepTable
from moe_optim.weights.te.fields import te_formats_of
from moe_optim.weights.te.storage import TransformerEngineStorage

NOTES = "MOE_OPTIM_ENGINE_NOTES"
"""Variable with the path of a file that gets a line per call of our kernels."""

CASTS = (
    "_cast_master_weights_to_fp8_blockwise_scaling",
    "_cast_master_weights_to_fp8_mxfp8_scaling",
    "_cast_master_weights_to_nvfp4_2d",
)


def replace() -> None:
    """Install the replacements in Transformer Engine's modules, for the rest of this process."""
    from transformer_engine.pytorch.optimizers import fused_adam
    from transformer_engine.pytorch.tensor import utils

    for name in CASTS:
        setattr(utils, name, partial(cast, getattr(utils, name)))
    build = fused_adam.FusedAdam.__init__

    def build_with_ours(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.multi_tensor_adam = partial(step, self.multi_tensor_adam)

    fused_adam.FusedAdam.__init__ = build_with_ours


def cast(
    theirs: Callable[..., None],
    params: Sequence[tuple[Any, Any, int | None, Any]],
    group: Any,
    sharded_by_fsdp: bool = False,
    finishes_by_hand: bool = False,
) -> None:
    """Cast master shards, the part of ``quantize_master_weights`` for one kind of weights.

    Args:
        theirs: original function, called for FSDP.
        params: weight, master [n] or None, its first element in the weight, FSDP's shard or None.
        group: ranks that own the other shards; every rank gets all scales, as in the original.
        sharded_by_fsdp: whether bytes go into FSDP's shards.
        finishes_by_hand: whether the caller derives columnwise data after a gather; if not, the
            next GEMM does.
    """
    if sharded_by_fsdp:
        theirs(params, group, sharded_by_fsdp, finishes_by_hand)
        return
    _note("cast")
    mine = [None if m is None else (start, start + m.numel()) for _, m, start, _ in params]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    entries, storages = [], []
    for index, (weight, master, start, _) in enumerate(params):
        storage = TransformerEngineStorage(weight, te_formats_of(weight)[0])
        ends = {end for ranges in everyone for end in ranges[index] or ()}
        source = torch.empty(0, device=weight.device) if master is None else master.view(-1)
        entry = TableEntry(
            parameter=f"weight {index}",
            source=source.contiguous(),
            target=storage.quantized,
            start=start or 0,
            cuts=tuple(sorted(ends - {0, weight.numel()})),
        )
        entries.append(entry)
        storages.append(storage)
    table = MemberTable.build(entries)
    table.find_maxima.launch()
    if table.exchange.numel():
        dist.all_reduce(table.exchange, dist.ReduceOp.MAX, group=group)
    scales = [
        buffer
        for entry in entries
        for name, buffer in entry.target.gathered_buffers().items()
        if "data" not in name
    ]
    for scale in scales:  # the maximum is the owner's: scales are not negative
        scale.view(torch.uint8).zero_()
    table.encode.launch()
    values = [one if one.dtype == torch.float32 else one.view(torch.uint8) for one in scales]
    everyones = torch.cat([one.float().flatten() for one in values])  # a byte is exact in fp32
    dist.all_reduce(everyones, dist.ReduceOp.MAX, group=group)
    for value, whole in zip(values, everyones.split([one.numel() for one in values]), strict=True):
        value.copy_(whole.view_as(value))
    for storage, (weight, *_) in zip(storages, params, strict=True):
        storage.note_write()
        if not finishes_by_hand and storage.format.columnwise_copy == "transposed":
            weight.update_usage(rowwise_usage=True, columnwise_usage=False)


def step(  # noqa: PLR0913  # arguments are Transformer Engine's
    theirs: Callable[..., None],
    chunk: int,
    skips: Any,
    lists: Sequence[Sequence[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    number: int,
    decoupled: bool,
    corrects_bias: int,
    weight_decay: float,
) -> None:
    """Run one Adam step over lists of gradients, parameters, moments, and optionally masters."""
    gradients, params, exp_avgs, exp_avg_sqs, *masters = lists
    flat = [
        [one.detach().reshape(-1) for one in tensors]
        for tensors in (gradients, params, exp_avgs, exp_avg_sqs, *masters)
    ]
    known = {torch.float32, torch.bfloat16}
    takes = (
        all(one.dtype in known and one.is_contiguous() for tensors in lists for one in tensors)
        and all(one.dtype == torch.float32 for one in (masters[0] if masters else params))
        and all(m.dtype == v.dtype for m, v in zip(exp_avgs, exp_avg_sqs, strict=True))
    )
    if not takes:
        theirs(
            *(chunk, skips, lists, lr, beta1, beta2, eps, number, decoupled, corrects_bias),
            weight_decay,
        )
        return
    _note("step")
    device = params[0].device
    states = [
        AdamState(
            parameter=f"parameter {index}",
            master=rest[0] if rest else param,
            gradient=gradient,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            weight=param if rest else None,
        )
        for index, (gradient, param, exp_avg, exp_avg_sq, *rest) in enumerate(
            zip(*flat, strict=True)
        )
    ]
    hyper = Hyper(
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        step=int(number),
        bias_correction=bool(corrects_bias),
    )
    table = StepTable.build(
        states,
        torch.tensor([hyper.row()], device=device),
        torch.ones(1, device=device),
        members=None,
        decoupled=bool(decoupled),
    )
    table.launch()


def _note(call: str) -> None:
    if path := os.environ.get(NOTES):
        with Path(path).open("a") as file:
            file.write(f"{call}\n")
