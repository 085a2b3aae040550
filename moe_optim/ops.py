"""Quantizing weights, and the one place that calls who performs it.

:func:`quantize` and :func:`dequantize` take tensors. Who requantizes the same weights at every step
builds a table of them once, and calls the rest with it.

A requantization writes what travels; ``finish_gather`` derives the rest, on every rank, from what
has arrived::

    requantize -> all-gather -> finish_gather                        shards of whole blocks
    partial_amax -> MAX all-reduce -> encode -> all-gather -> ...    shards that cut blocks
    step -> MAX all-reduce -> encode_shared -> all-gather -> ...     masters that take a step first
    tensorwise_amax -> MAX all-reduce -> tensorwise_cast -> ...      weights with one scale each
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import cast, overload

import torch
from torch import Tensor

from moe_optim import library
from moe_optim.errors import LayoutError
from moe_optim.formats import BlockScaledFormat, Direction, QuantizedWeight, get_format, reference
from moe_optim.formats.reference import adam, expert_amax, gradient_norm, health, ranges, tensorwise
from moe_optim.kernels.exchange import AMAX_SLOTS
from moe_optim.kernels.finish_table import FinishTable
from moe_optim.kernels.health import HealthTable
from moe_optim.kernels.launch_table import LaunchTable, Planned
from moe_optim.kernels.member_table import Backend, MemberTable
from moe_optim.kernels.norm import NormTable
from moe_optim.kernels.steps.staging import Stage
from moe_optim.kernels.steps.table import StepTable
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.kernels.tensorwise import TensorwiseTable


@overload
def quantize(
    weights: Tensor,
    format: BlockScaledFormat | str,
    *,
    out: QuantizedWeight | None = None,
    backend: Backend = "auto",
) -> QuantizedWeight: ...
@overload
def quantize(
    weights: Sequence[Tensor],
    format: BlockScaledFormat | str,
    *,
    out: Sequence[QuantizedWeight] | None = None,
    backend: Backend = "auto",
) -> list[QuantizedWeight]: ...
def quantize(
    weights: Tensor | Sequence[Tensor],
    format: BlockScaledFormat | str,
    *,
    out: QuantizedWeight | Sequence[QuantizedWeight] | None = None,
    backend: Backend = "auto",
) -> QuantizedWeight | list[QuantizedWeight]:
    """Quantize weights: bytes and scales of both directions, in one launch where kernels run.

    The bytes are those of Transformer Engine: values are rounded to bf16 first, maxima ignore NaN,
    casts round to nearest even and saturate.

    Args:
        weights: fp32 or bf16, [E, R, C] or [R, C] (one expert); or several of them, of any shapes,
            all on one device. Copied only where they are not contiguous.
        format: ``mxfp8``, ``mxfp8_2d``, ``nvfp4`` or ``fp8_block``.
        out: buffers to overwrite, as an earlier call returned them; new ones if not given.
        backend: ``auto`` takes kernels where they run, ``reference`` does without.

    Returns:
        The buffers, on the device of the weights: one record, or one a tensor if there are several.

    Raises:
        ConfigError: no such format or backend.
        LayoutError: a shape that the format cannot hold, another dtype, or buffers that do not fit.
    """
    if isinstance(format, str):
        format = get_format(format)
    sources = [weights] if isinstance(weights, Tensor) else list(weights)
    names = (
        ["weights"]
        if isinstance(weights, Tensor)
        else [f"weights[{i}]" for i in range(len(sources))]
    )
    shapes = [(1, *w.shape) if w.dim() == 2 else tuple(w.shape) for w in sources]
    if out is None:
        targets = [
            QuantizedWeight.empty(format, shape, device=source.device, name=name)
            for source, shape, name in zip(sources, shapes, names, strict=True)
        ]
    else:
        targets = [out] if isinstance(out, QuantizedWeight) else list(out)
    _check_targets(format, shapes, targets)
    if torch.compiler.is_compiling():
        found = _quantize([source.detach() for source in sources], format.name, backend)
        count = len(format.buffer_names)
        parts = [found[first : first + count] for first in range(0, len(found), count)]
        if out is None:
            pairs = zip(shapes, parts, strict=True)
            targets = [QuantizedWeight.of_buffers(format, shape, part) for shape, part in pairs]
        else:
            for target, part in zip(targets, parts, strict=True):
                for buffer, values in zip(target.buffers().values(), part, strict=True):
                    buffer.copy_(values)
        return targets[0] if isinstance(weights, Tensor) else targets
    entries = [
        TableEntry(parameter=name, source=source.detach().contiguous().view(shape), target=target)
        for name, source, shape, target in zip(names, sources, shapes, targets, strict=True)
    ]
    table = MemberTable.build(entries, backend=backend)
    requantize(table)
    finish_gather(table)
    return targets[0] if isinstance(weights, Tensor) else targets


def _empty_buffers(weights: list[Tensor], format: str, backend: str) -> list[Tensor]:  # noqa: ARG001
    shapes = [(1, *w.shape) if w.dim() == 2 else w.shape for w in weights]
    pairs = zip(shapes, weights, strict=True)
    targets = [QuantizedWeight.empty(get_format(format), s, device=w.device) for s, w in pairs]
    return [buffer for target in targets for buffer in target.buffers().values()]


@partial(library.operation, fake=_empty_buffers)
def _quantize(weights: list[Tensor], format: str, backend: str) -> list[Tensor]:
    quantized = quantize(weights, format, backend=cast(Backend, backend))
    return [buffer for one in quantized for buffer in one.buffers().values()]


def dequantize(quantized: QuantizedWeight, direction: Direction = "rowwise") -> Tensor:
    """Return the values of one direction: what a forward product multiplies, or a dgrad.

    Args:
        quantized: buffers, as :func:`quantize` returns them; left alone.
        direction: ``rowwise`` for the forward product, ``columnwise`` for the dgrad.

    Returns:
        [E, R, C] bf16, newly allocated, on the device of the buffers.

    Raises:
        ConfigError: no such direction.
    """
    return reference.dequantize_bf16(
        quantized.data(direction),
        quantized.scale(direction),
        quantized.format,
        direction,
        global_amax=quantized.global_amax,
    )


def _check_targets(
    format: BlockScaledFormat,
    shapes: Sequence[tuple[int, ...]],
    targets: Sequence[QuantizedWeight],
) -> None:
    wanted = [(format.name, shape) for shape in shapes]
    got = [(target.format.name, target.shape) for target in targets]
    if wanted != got:
        raise LayoutError(
            f"quantize: out: expected buffers of {_spell(wanted)}, got {_spell(got)}. Pass what an "
            "earlier call with such weights returned, or leave it out."
        )


def _spell(kinds: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in kinds) or "nothing"


def requantize(table: MemberTable) -> None:
    """Rewrite the buffers of ``table`` that travel, in place, then zero what was consumed.

    The bytes are those of ``reference.quantize``: sources are rounded to bf16 first. Where kernels
    handle the whole table, nothing is planned, allocated or waited for, whatever its size, and a
    CUDA graph can capture the call once it has run outside of one.

    Args:
        table: what to read and write. It knows since it was built which entries kernels handle.
            Where its sources have moved, they handle none until it is built anew.

    Raises:
        LayoutError: some block or expert lies on several ranks; nothing has been written.
    """
    shared = table.exchange.numel()
    if shared:
        raise LayoutError(
            f"requantize: expected shards of whole blocks and experts, got {shared} maxima that "
            "several ranks share. Call partial_amax, reduce table.exchange with MAX "
            "over the ranks, then call encode."
        )
    partial_amax(table)
    encode(table)


def partial_amax(table: MemberTable) -> None:
    """Find this rank's share of the maxima that ``encode`` needs before it can write anything.

    Every rank calls it, then one MAX all-reduce of ``table.exchange``, then ``encode``. NaN counts
    as zero, and maxima of fp32 are exact in any order.

    Args:
        table: whose ``exchange`` is overwritten; its sources and buffers are left alone.
    """
    launches, entries = _split(table)
    if table.exchange.numel():
        table.exchange.zero_()
        _find_amaxes(entries, table.exchange)
    if launches:
        from moe_optim.kernels.launch import launch_amax

        for launch in launches:
            launch_amax(launch)


def encode(table: MemberTable) -> None:
    """Write the owned data of every entry, and the scales of each block that is owned in part.

    Args:
        table: ``partial_amax`` has been called, and its ``exchange`` holds the maxima over all
            ranks.
    """
    launches, entries = _split(table)
    if entries:  # before the launches, which may zero the sources
        _encode(entries, table.exchange)
    if launches:
        from moe_optim.kernels.launch import launch_encode

        for launch in launches:
            launch_encode(launch)
    if table.consumed is not None and not (launches and table.zeroes_in_launch):
        table.consumed.zero_()


@torch.no_grad()
def step(table: StepTable) -> None:
    """Take one step of Adam, and write what becomes of the masters: one launch a kind and format.

    Gradients are multiplied by their clip factor, left alone, and read where they lie. Masters,
    moments and weights are overwritten; of quantized weights the buffers that travel of every block
    that is owned whole, and the maxima of the others, see :func:`encode_shared`. Where kernels
    handle the whole table nothing is planned, allocated or waited for. States of the host pass
    through the device in chunks, and are back when what follows on the current stream begins.

    Args:
        table: what to read and write, with ``hyper`` and ``clips`` filled. The caller has asked it
            whether something has moved, and zeroed buffers that ranks complete by a maximum.
    """
    if table.members is not None:
        table.members.exchange.zero_()  # it holds the maxima of all ranks, of the last step
    with nullcontext() if table.stage is None else table.stage.opened():
        _step_here(table, table.written)
        for chunk in table.chunks:
            assert table.stage is not None
            table.stage.run(
                chunk.copies, chunk.slot, partial(_step_here, chunk.table, table.written)
            )
        if table.members is not None:
            _encode_unshared(table.members, table.stage)


def _step_here(table: StepTable, written: set[bool]) -> None:
    """Step what is on the device, and encode what no other maximum is needed for.

    Args:
        table: without its chunks, or that of one.
        written: given something as soon as some masters have been written.
    """
    if table.ranges or table.encoding:
        from moe_optim.kernels.steps.launch import launch_step

        launch_step(table)
        written.add(True)
    if table.encoded_last:
        from moe_optim.kernels.launch import launch_encode

        for launch in table.encoded_last:
            launch_encode(launch)
    for state in table.remainder:
        adam.step_into(  # version counters tell of writes by hand alone, as where kernels step
            *(state.master.data, state.gradient, state.exp_avg, state.exp_avg_sq),
            hyper=table.hyper[state.group],
            clip=table.clips[state.norm],
            decoupled=table.decoupled,
        )
        written.add(True)
        if state.weight is not None:
            state.weight.copy_(state.master)


def _encode_unshared(table: MemberTable, stage: Stage | None) -> None:
    """Encode what the reference steps whole, and find this rank's share of all other maxima."""
    cut = [launch for launch in table.launches if launch.num_cut_tiles]
    if stage is not None and (cut or table.remainder):
        stage.wait_for_all()  # masters are read where they are at home
    if cut:
        from moe_optim.kernels.launch import launch_cut_amax

        for launch in cut:
            launch_cut_amax(launch)
    _find_amaxes([one for one in table.remainder if one[1].size], table.exchange)
    _encode([one for one in table.remainder if not one[1].size], table.exchange)


def encode_shared(table: MemberTable) -> None:
    """Write what a step has left, once the maxima over all ranks are known.

    Args:
        table: the members of the :class:`StepTable`, whose ``exchange`` has been reduced with MAX
            over the ranks since the step. Nothing happens where it is empty.
    """
    if not table.exchange.numel():
        return
    if table.launches:
        from moe_optim.kernels.launch import launch_encode, launch_encode_cut

        for launch in table.launches:
            if launch.format.has_global_amax:
                launch_encode(launch)
            else:
                launch_encode_cut(launch)
    _encode([one for one in table.remainder if one[1].size], table.exchange)


def finish_gather(table: MemberTable) -> None:
    """Derive what did not travel: columnwise copies of 2-D formats, and scales in storage.

    The whole of every parameter is read from the buffers that travel, whoever wrote them. Nothing
    happens where nothing is to be derived. No rank communicates.

    Args:
        table: of complete buffers, as after a gather.
    """
    if table.unfinished:
        _derive(table.unfinished)
    if table.finishes:
        from moe_optim.kernels.launch import launch_finish

        for finish in table.finishes:
            launch_finish(finish)


def transpose(table: FinishTable) -> None:
    """Write the copies of a table that ``FinishTable.of_transposes`` made, in one launch.

    Args:
        table: of tensors on a GPU that has kernels.
    """
    from moe_optim.kernels.launch import launch_finish

    launch_finish(table)


@torch.no_grad()
def sum_squares(table: NormTable) -> None:
    """Rewrite ``table.squares``, and ``table.zeros`` if the table counts them, from its gradients.

    Squares are exact in fp64 and summed there in a fixed order: as fp32 the result is the same for
    every cut of the same elements into tensors. NaN and Inf show in the sum of their group only.
    Where kernels sum, nothing is allocated or waited for, and a CUDA graph can capture the call
    once it has run outside of one.

    Args:
        table: where its gradients have moved, kernels sum none until it is built anew.
    """
    if table.has_kernels and not table.has_moved:
        from moe_optim.kernels.norm.launch import launch_norm

        launch_norm(table)
        return
    table.squares.zero_()
    table.zeros.zero_()
    for gradients in table.gradients:
        table.squares[gradients.group] += gradient_norm.sum_squares(gradients.values)
        if table.counts_zeros:
            table.zeros.add_(gradient_norm.count_zeros(gradients.values))


@torch.no_grad()
def tensorwise_amax(table: TensorwiseTable) -> None:
    """Find this rank's share of the amaxes that ``tensorwise_cast`` needs.

    Every rank calls it, then one MAX all-reduce of ``table.amaxes``, then ``tensorwise_cast``. NaN
    counts as zero. Where kernels run, neither of them allocates or waits for anything.

    Args:
        table: whose ``amaxes``, [num_weights] fp32, are overwritten. Where its masters have moved,
            the reference reads them until it is built anew.
    """
    if table.has_kernels and not table.has_moved:
        from moe_optim.kernels.tensorwise.launch import launch_amax

        launch_amax(table)
        return
    table.amaxes.zero_()
    for amax, one in zip(torch.split(table.amaxes, 1), table.weights, strict=True):
        expert_amax.expert_amax_into(amax, one.master, 0, one.master.numel())


@torch.no_grad()
def tensorwise_cast(table: TensorwiseTable) -> None:
    """Write the scale of every weight, and the codes of what this rank owns.

    Args:
        table: whose ``amaxes``, [num_weights] fp32, hold the maxima over all ranks.
    """
    if table.has_kernels and not table.has_moved:
        from moe_optim.kernels.tensorwise.launch import launch_cast

        launch_cast(table)
        return
    table.scales.copy_(tensorwise.encode_scale(table.amaxes))
    for scale, one in zip(torch.split(table.scales, 1), table.weights, strict=True):
        one.scale_inv.copy_(scale.reciprocal())
        tensorwise.cast_into(one.data, one.master, scale)


@torch.no_grad()
def measure_health(table: HealthTable) -> None:
    """Rewrite ``table.sums`` and ``table.amaxes``: what experts have lost by being quantized.

    Two or three launches a format where kernels measure; nothing is waited for then. The same
    weights give the same bits again. Counts and maxima of shards add up to those of whole weights
    to the bit, other sums but for their last bits.

    Args:
        table: buffers of whole weights, and the masters that they were made of. Where something has
            moved, the reference measures until it is built anew.
    """
    table.sums.zero_()
    table.amaxes.zero_()
    moved = table.has_moved
    if table.launches and not moved:
        from moe_optim.kernels.health.launch import launch_health

        launch_health(table)
    for one in table.entries if moved else table.remainder:
        rows = one.rows.to(table.sums.device)
        sums, amaxes = table.sums[rows], table.amaxes[rows]
        health.measure_into(sums, amaxes, one.entry.source, one.entry.start, one.entry.target)
        table.sums[rows], table.amaxes[rows] = sums, amaxes


@torch.no_grad()
def _find_amaxes(entries: Sequence[Planned], exchange: Tensor) -> None:
    for entry, shared in entries:
        if shared.size and entry.source.numel():
            ranges.partial_amax_into(
                entry.source,
                entry.start,
                entry.target,
                exchange,
                block_rows=shared.block_rows,
                experts=shared.experts,
            )


@torch.no_grad()
def _encode(entries: Sequence[Planned], exchange: Tensor) -> None:
    for entry, shared in entries:
        if entry.is_whole:
            values = entry.source.view(entry.target.shape)
            reference.quantize_gathered_into(
                values, entry.target.format, entry.target, name=entry.parameter
            )
        elif entry.source.numel():
            ranges.encode_into(
                entry.source,
                entry.start,
                entry.target,
                exchange,
                block_rows=shared.block_rows,
                experts={e: (slot, slot + AMAX_SLOTS) for e, slot in shared.experts.items()},
            )


@torch.no_grad()
def _derive(entries: Sequence[TableEntry]) -> None:
    for entry in entries:
        reference.derive_into(entry.target)
        for direction, scale in entry.storage_scales.items():
            reference.expand_scale_into(entry.target, direction, scale)


def _split(table: MemberTable) -> tuple[tuple[LaunchTable, ...], tuple[Planned, ...]]:
    """Return the launches to make, and the entries left to the reference."""
    if table.has_moved:
        return (), tuple(zip(table.entries, table.exchanges, strict=True))
    return table.launches, table.remainder
