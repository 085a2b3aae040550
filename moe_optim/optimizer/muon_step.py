"""The step of matrices that Muon updates: momentum, iteration in batches, update and encoding."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.errors import ConfigError
from moe_optim.formats.reference.newton_schulz import Precision, matmul_precision
from moe_optim.kernels.adam_state import MasterState
from moe_optim.kernels.cutting import Carver
from moe_optim.kernels.matrices import MatrixShard, Piece
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.momentum import Momentum
from moe_optim.kernels.newton_schulz import NewtonSchulz, scratch_numel
from moe_optim.kernels.plan import Call, Plan
from moe_optim.kernels.update import Updates
from moe_optim.optimizer.muon import MatrixWeight, MuonSettings
from moe_optim.places import Places

ALIGNMENT = 128
"""Elements that tensors in the workspace start at multiples of."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MuonState(MasterState):
    """Whole matrices of one parameter that a rank owns, and every tensor that their step uses."""

    matrix: MatrixWeight
    gradient: Tensor
    """Reduced gradient, [n] fp32 or bf16."""
    momentum: Tensor
    """Momentum, [n] fp32."""

    @property
    def count(self) -> int:
        """Number of weights."""
        return self.master.numel() // self.matrix.numel


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Matrices of one shape that are iterated together."""

    rows: int | None
    """Index into ``MatrixWeight.rows``; None for all matrices of each weight."""
    number: int
    """Matrices per weight."""
    shape: tuple[int, int]
    """Rows and columns of a matrix on this rank."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MuonTable(Plan):
    """Step of all matrices of one optimizer. Build it once with :meth:`build`.

    A launch updates the momentum of all matrices at once. Then chunks of weights pass through the
    workspace one after another: their directions are normalized and packed, orthogonalized in
    batches of equal shapes, and applied to the masters, which are encoded in the same launch.
    """

    momentum: Momentum
    chunks: tuple[Plan, ...]
    """One plan per chunk of weights, with its directions, [count, R, C], as its only place."""
    updates: Updates[MuonState]
    precision: Precision
    """Precision of fp32 GEMMs."""
    num_batches: int
    """Number of batches over all chunks."""
    stage: None = None
    """Placeholder: states are never staged."""

    @property
    def written(self) -> set[bool]:
        """Nonempty once a step has written masters, until the caller clears it."""
        return self.updates.written

    def launch(self) -> None:
        """Step all masters, without a device synchronization. Tensor-parallel ranks must call it.

        Every rank of the tensor-parallel groups must call it if matrices are cut.
        """
        with matmul_precision(self.precision):
            Plan.launch(self)

    @classmethod
    def build(
        cls,
        states: Sequence[MuonState],
        settings: MuonSettings,
        hyper: Tensor,
        clips: Tensor,
        workspace: Tensor,
        *,
        members: Sequence[MemberTable] = (),
        backend: Any = "auto",
    ) -> "MuonTable":
        """Plan the step of ``states``, with arguments as of :meth:`Updates.build`.

        ``workspace`` is the memory that matrices pass through, [bytes] uint8 on the device of the
        states, of :func:`needed_bytes` or more, after :func:`check_workspace`.
        """
        planner = _Planner(states, settings, hyper, clips, workspace, members, backend)
        momentum, updates, chunks = planner.momentum, planner.updates, tuple(planner.plan())
        calls: list[Call] = [momentum.launch, *planner.reductions()]
        calls += [chunk.launch for chunk in chunks]
        calls += updates.finish.calls
        # no tensors of states, so that moving them frees their memory: callers track their places
        return cls(
            device=hyper.device,
            calls=tuple(calls),
            momentum=replace(momentum, shards=()),
            chunks=chunks,
            updates=replace(updates, shards=()),
            precision=settings.orthogonalization.precision,
            num_batches=planner.num_batches,
        )


def _shard(state: MuonState) -> MatrixShard:
    weight = state.matrix
    return MatrixShard(
        parameter=state.parameter,
        gradient=state.gradient,
        momentum=state.momentum,
        shape=(state.count, *weight.shape),
        rows=weight.rows,
        group=state.group,
        norm=state.norm,
    )


# Chunks


def batches_of(weight: MatrixWeight) -> list[Batch]:
    """Return the batches that the matrices of a weight belong to: one if all have one shape."""
    shapes = [(rows.rows, weight.shape[1]) for rows in weight.rows]
    if len(set(shapes)) == 1:
        return [Batch(rows=None, number=len(shapes), shape=shapes[0])]
    return [Batch(rows=index, number=1, shape=shape) for index, shape in enumerate(shapes)]


def is_in_order(weight: MatrixWeight) -> bool:
    """Return whether the packed matrices of a weight are the weight: equal blocks of its rows."""
    return len(batches_of(weight)) == 1 and all(rows.groups == 1 for rows in weight.rows)


def chunk_numel(weight: MatrixWeight, count: int, settings: MuonSettings) -> int:
    """Return the elements of the iteration's dtype that ``count`` weights need in the workspace."""
    batches = batches_of(weight)
    total = 0
    if not is_in_order(weight):
        width = torch.float32.itemsize // settings.dtype.itemsize  # of unpacked and scaled batches
        total += 2 * count * weight.numel * width
    for batch in batches:
        total += _batch_numel(weight, batch, count, settings)
    most_tensors = 5 * len(batches) + 1  # each may end behind a multiple of ALIGNMENT
    return total + most_tensors * ALIGNMENT


def _batch_numel(weight: MatrixWeight, batch: Batch, count: int, settings: MuonSettings) -> int:
    number = count * batch.number
    rows, cols = batch.shape
    numel = number * rows * cols
    gathered = _is_duplicated(weight, settings)
    if gathered:
        assert weight.partition_dim is not None and weight.group is not None
        numel *= 1 + 2 * weight.group.size()
        whole = list(batch.shape)
        whole[weight.partition_dim] *= weight.group.size()
        rows, cols = whole
    return numel + scratch_numel(
        number, rows, cols, form=_form(weight, settings), transpose=_transpose(weight, settings)
    )


def check_workspace(weights: Iterable[MatrixWeight], settings: MuonSettings) -> None:
    """Raise ConfigError if a weight needs more than the configured bytes of workspace."""
    needs = {chunk_numel(weight, 1, settings): weight for weight in weights}
    least = max(needs, default=0)
    if least * settings.dtype.itemsize > settings.workspace_bytes:
        weight, mib = needs[least], -(-least * settings.dtype.itemsize >> 20)
        raise ConfigError(
            f"muon_workspace_mib: expected at least {mib} for {weight.name} of "
            f"{list(weight.shape)}, got {settings.workspace_bytes >> 20}. Set "
            f"moe_optim.muon_workspace_mib={mib}, or more."
        )


def needed_bytes(weights: Iterable[tuple[MatrixWeight, int]], settings: MuonSettings) -> int:
    """Return the bytes that all weights of a class need at once, at most the configured ones."""
    counts: dict[Any, int] = defaultdict(int)
    of_kind: dict[Any, MatrixWeight] = {}
    for weight, count in weights:
        kind = _class_of(weight)
        counts[kind] += count
        of_kind[kind] = weight
    numel = max((chunk_numel(of_kind[kind], counts[kind], settings) for kind in counts), default=0)
    return min(settings.workspace_bytes, numel * settings.dtype.itemsize)


class Workspace:
    """Memory that the matrices of all optimizers of a chain pass through, one after another."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._memory: Tensor | None = None

    def reserve(self, nbytes: int) -> None:
        """Let :meth:`allocated` have ``nbytes`` or more. Call before it."""
        self._nbytes = max(self._nbytes, nbytes)

    def allocated(self, device: torch.device) -> Tensor:
        """Return the memory, [bytes] uint8 on ``device``, the same until it is freed."""
        if self._memory is None:
            self._memory = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
        return self._memory

    def free(self) -> None:
        """Drop the memory, which lives on in the plans that use it."""
        self._memory = None


def _class_of(weight: MatrixWeight) -> tuple[Any, ...]:
    return weight.shape, weight.split, weight.partition_dim, weight.group


def _form(weight: MatrixWeight, settings: MuonSettings) -> Any:
    return "plain" if settings.iteration != "gram" or _is_reduced(weight, settings) else "gram"


def _is_duplicated(weight: MatrixWeight, settings: MuonSettings) -> bool:
    """Return whether every tensor-parallel rank orthogonalizes whole matrices."""
    return weight.ranks is not None and settings.tp_mode == "duplicated"


def _is_reduced(weight: MatrixWeight, settings: MuonSettings) -> bool:
    """Return whether tensor-parallel ranks sum Gram matrices of their parts."""
    return weight.ranks is not None and settings.tp_mode == "distributed"


def _transpose(weight: MatrixWeight, settings: MuonSettings) -> bool | None:
    """Return which side is iterated: the uncut one if Gram matrices are summed."""
    return weight.partition_dim == 0 if _is_reduced(weight, settings) else None


class _Planner:
    def __init__(
        self,
        states: Sequence[MuonState],
        settings: MuonSettings,
        hyper: Tensor,
        clips: Tensor,
        workspace: Tensor,
        members: Sequence[MemberTable],
        backend: Any,
    ) -> None:
        groups = list(dict.fromkeys([None, *(one.matrix.ranks for one in states)]))
        self.states = sorted(states, key=lambda one: groups.index(one.matrix.ranks))
        self.settings, self.hyper, self.clips = settings, hyper, clips
        self.workspace, self.backend, self.num_batches = workspace, backend, 0
        self.momentum = Momentum.build(
            [_shard(state) for state in self.states],
            *(hyper, clips),
            nesterov=settings.nesterov,
            backend=backend,
        )
        self.updates = Updates.build(
            self.states,
            *(hyper, clips),
            rule="direction",
            members=members,
            backend=backend,
        )

    def reductions(self) -> Iterator[Call]:
        """Yield the sums over ranks of the squares of matrices, one per tensor-parallel group.

        States of one group follow one another.
        """
        start = 0
        for group, members in groupby(self.states, lambda one: one.matrix.ranks):
            end = start + sum(one.count * len(one.matrix.rows) for one in members)
            if group is not None:
                yield partial(dist.all_reduce, self.momentum.squares[start:end], group=group)
            start = end

    def plan(self) -> Iterator[Plan]:
        """Yield one plan per chunk."""
        by_class: dict[Any, list[int]] = defaultdict(list)
        for index, state in enumerate(self.states):
            if state.count:
                by_class[_class_of(state.matrix)].append(index)
        for indices in by_class.values():
            weight = self.states[indices[0]].matrix
            for pieces in self._cut(weight, indices):
                yield self._plan_chunk(weight, pieces)

    def _cut(self, weight: MatrixWeight, indices: Sequence[int]) -> Iterator[list[Piece]]:
        """Yield the pieces of each chunk of weights of one class, of about equal sizes."""
        total = sum(self.states[index].count for index in indices)
        room = self.workspace.numel() // self.settings.dtype.itemsize
        needed = partial(chunk_numel, weight, settings=self.settings)
        most = bisect_right(range(1, total + 1), room, key=needed)  # that fit at once
        chunks = -(-total // max(most, 1))
        ends = [total * number // chunks for number in range(chunks + 1)]
        for first, last in pairwise(ends):
            pieces, at = [], 0
            for index in indices:
                count = self.states[index].count
                low, high = max(first, at), min(last, at + count)
                if low < high:
                    pieces.append(self.momentum.piece(index, low - at, high - at))
                at += count
            yield pieces

    def _plan_chunk(self, weight: MatrixWeight, pieces: Sequence[Piece]) -> Plan:
        space = Carver(self.workspace, ALIGNMENT * self.settings.dtype.itemsize)
        count = sum(piece.count for piece in pieces)
        calls: list[Call] = []
        results: list[tuple[Batch, list[Piece], Tensor]] = []
        for batch in batches_of(weight):
            taken = [replace(piece, rows=batch.rows) for piece in pieces]
            made, result = self._plan_batch(weight, batch, taken, space)
            calls += made
            results.append((batch, taken, result))
        if is_in_order(weight):
            ((_, _, direction),) = results
        else:
            direction = space.take((count, *weight.shape), torch.float32)
            for batch, taken, result in results:
                scaled = space.take(result.shape, torch.float32)
                scale = scale_of(weight, batch.rows or 0, self.settings)
                calls += [partial(scaled.copy_, result), partial(scaled.mul_, scale)]
                calls += self.momentum.plan_unpack(scaled, taken, direction.view(-1)).calls
        flat, numel, at = direction.reshape(-1), weight.numel, 0
        ranges = []
        for piece in pieces:
            end = at + piece.numel
            ranges.append((piece.index, piece.first * numel, piece.last * numel, flat[at:end]))
            at = end
        calls += self.updates.plan_along(ranges).calls
        return Plan(device=self.hyper.device, calls=tuple(calls), places=Places([direction]))

    def _plan_batch(
        self, weight: MatrixWeight, batch: Batch, pieces: Sequence[Piece], space: Carver
    ) -> tuple[list[Call], Tensor]:
        """Return the calls that orthogonalize a batch, and its result on this rank, [B, M, N]."""
        settings, how = self.settings, self.settings.orthogonalization
        self.num_batches += 1
        number = sum(piece.num_matrices for piece in pieces)
        packed = space.take((number, *batch.shape), settings.dtype)
        calls: list[Call] = [*self.momentum.plan_pack(pieces, packed).calls]
        whole = packed
        if _is_duplicated(weight, settings):
            made, whole = _gather(weight, packed, space)
            calls += made
        form, transpose = _form(weight, settings), _transpose(weight, settings)
        numel = scratch_numel(number, *whole.shape[1:], form=form, transpose=transpose)
        scratch = space.take([numel], settings.dtype)
        iteration = NewtonSchulz.build(
            whole,
            scratch,
            coefficients=how.coefficients(),
            form=form,
            transpose=transpose,
            reduce=partial(dist.all_reduce, group=weight.group)
            if _is_reduced(weight, settings)
            else None,
            backend=self.backend,
        )
        calls += iteration.calls
        result = iteration.result
        if whole is not packed:
            assert weight.partition_dim is not None and weight.group is not None
            size = batch.shape[weight.partition_dim]
            own = result.narrow(weight.partition_dim + 1, weight.group.rank() * size, size)
            calls.append(partial(packed.copy_, own))
            result = packed
        return calls, result


def _gather(weight: MatrixWeight, packed: Tensor, space: Carver) -> tuple[list[Call], Tensor]:
    """Return the calls that put tensor-parallel parts of matrices together, and the result."""
    assert weight.partition_dim is not None and weight.group is not None
    ranks = weight.group.size()
    parts = space.take((ranks, *packed.shape), packed.dtype)
    shape = list(packed.shape)
    shape[weight.partition_dim + 1] *= ranks
    whole = space.take(shape, packed.dtype)
    targets = whole.unflatten(weight.partition_dim + 1, (ranks, -1))
    return [
        partial(dist.all_gather_into_tensor, parts.view(-1), packed.view(-1), group=weight.group),
        partial(targets.copy_, parts.movedim(0, weight.partition_dim + 1)),
    ], whole


# Scales


def scale_of(weight: MatrixWeight, index: int, settings: MuonSettings) -> float:
    """Return the scale of the update of the matrix ``weight.rows[index]``."""
    return settings.orthogonalization.scale(*weight.whole_shape(weight.rows[index]))


def common_scale_of(weight: MatrixWeight, settings: MuonSettings) -> float:
    """Return the scale that is left to the update: 1 if unpacking scales each matrix by its own."""
    return scale_of(weight, 0, settings) if is_in_order(weight) else 1.0
