"""Stacked tensors of a live model's experts, and the plan that sends them to an engine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_optim.buckets.bucket_group import gather_weights
from moe_optim.calibration.linears import require_chunks
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.experts.keys.layouts import LINEARS
from moe_optim.experts.sharding import CUTS
from moe_optim.formats import get_format
from moe_optim.integration.agreement import agree, gather_objects
from moe_optim.rollout.conventions import Convention, ConventionName, find_convention
from moe_optim.rollout.expert_buffers import describe_expert
from moe_optim.rollout.expert_tensors import RowSplit, stack_experts
from moe_optim.rollout.experts import ExportedLinear, local_experts
from moe_optim.rollout.families import expert_prefixes
from moe_optim.rollout.shards import EngineLayout, Shard, StackedTensor
from moe_optim.rollout.transfer_plan import TransferPlan, plan_of_shards
from moe_optim.weights.te.fields import TENSORWISE

Pieces = tuple[Tensor, ...]
"""A stacked tensor [E, R, ...], or one [1, R, ...] of each expert."""
_Record = tuple[list[StackedTensor], Shard]
"""Tensors of a linear, of as many experts as a rank knows of, and its shard of them."""
ENGINE_NAMES = {LINEARS[0]: "w13", LINEARS[1]: "w2"}


def plan_transfers(
    model_chunks: Iterable[torch.nn.Module],
    engine: EngineLayout,
    *,
    convention: ConventionName | None = None,
    beside: Mapping[int, int] | None = None,
) -> TransferPlan:
    """Return the transfers that update the quantized or bf16 experts of an engine.

    Tensors are named as the parameters of vLLM's and SGLang's models are, and have the rows-first
    layout in which these allocate them (``create_weights``), before any kernel's own layout. Shapes
    of INT4 weights (``weight_shape``) never change and are left out. The plan stays valid while
    ranks keep their experts.

    Every rank of the training job must call it with all of its chunks.

    Args:
        model_chunks: model chunks of this rank's pipeline stage.
        engine: layout of the engine's ranks.
        convention: engines' names of data and scales; None for the format's first, as in
            :func:`moe_optim.export_weights`.
        beside: engine rank -> training rank at the same place, such as on the same GPU, which is
            preferred as its sender.

    Returns:
        The same plan on every rank. Training ranks are numbered as in the world of the job.

    Raises:
        ConfigError: the convention is unknown, experts have biases or per-tensor scaling, or
            there are fewer experts than expert-parallel ranks of the engine.
        LayoutError: a part of an expert does not consist of whole blocks of scales, or no rank has
            grouped experts.
    """
    chunks = require_chunks(model_chunks, "plan_transfers")
    held = agree(lambda: [one.record for one in _linears(chunks, convention)], None)
    everywhere: list[list[_Record]] = gather_objects(held, None)
    tensors: dict[str, StackedTensor] = {}
    training: list[dict[str, Shard]] = []
    for records in everywhere:
        training.append({})
        for tensor, shard in ((one, shard) for tensors_of, shard in records for one in tensors_of):
            known = tensors.setdefault(tensor.name, tensor)
            experts = max(known.shape[0], tensor.shape[0])
            tensors[tensor.name] = replace(known, shape=(experts, *known.shape[1:]))
            training[-1][tensor.name] = shard
    if not tensors:
        raise LayoutError(
            "plan_transfers: expected MoE layers with grouped experts, got none on any rank. Build "
            "the model with --num-experts and --moe-grouped-gemm."
        )
    return plan_of_shards(list(tensors.values()), training, engine, beside=beside)


@torch.no_grad()
def stacked_experts(
    model_chunks: Iterable[torch.nn.Module], *, convention: ConventionName | None = None
) -> dict[str, Pieces]:
    """Return this rank's stacked tensors, the sources of :func:`plan_transfers`.

    Stale weights are gathered first: every rank must call it with all of its chunks. Tensors are
    views of the weights, except for scales of square blocks and global scales; read them before the
    next step, and do not write to them.

    Args:
        model_chunks: model chunks of this rank's pipeline stage.
        convention: convention of the plan.

    Returns:
        By name, one tensor [E, R, ...] of all experts, or one [1, R, ...] of each where training
        has one weight per expert. Dtypes are the convention's.

    Raises:
        ConfigError: as for :func:`plan_transfers`.
        StateError: weights are on the host, or their gather would overwrite unused gradients.
    """
    chunks = require_chunks(model_chunks, "stacked_experts")
    for chunk in chunks:
        gather_weights(chunk)
    return agree(
        lambda: {
            name: pieces
            for linear in _linears(chunks, convention)
            for name, pieces in linear.read().items()
        },
        None,
    )


@dataclass(frozen=True, kw_only=True)
class _Linear:
    """An expert linear on this rank."""

    local: ExportedLinear
    prefix: str
    """Prefix of its tensors' names."""
    convention: Convention | None
    """None for bf16."""
    runs: int
    """Row blocks that are cut separately: 2 for gate and up."""

    @property
    def record(self) -> _Record:
        """What this rank tells others of the linear."""
        held, cut = self.local.held, self.local.linear.groups.expt_tp
        shard = Shard(experts=tuple(range(held.first, held.first + held.count)))
        if held.cut_axis is not None:
            shard = replace(shard, part=cut.rank(), parts=held.cuts)
        stacked = self._stack(describe_expert(held))
        return [self._describe(suffix, one) for suffix, one in stacked.items()], shard

    def read(self) -> dict[str, Pieces]:
        """Return this rank's stacked tensors by name; StateError if unreadable."""
        self.local.require_readable()
        count = self.local.held.count
        step = count if len(self.local.linear.weights()) == 1 else 1
        stacked = [
            self._stack(self.local.buffers(start, start + step)) for start in range(0, count, step)
        ]
        return {
            self.prefix + suffix: tuple(one[suffix] for one in stacked) for suffix in stacked[0]
        }

    def _stack(self, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
        held, convention = self.local.held, self.convention
        (stacked,) = stack_experts(buffers, held.format, convention, RowSplit(), held.linear)
        if convention is None:
            return stacked
        if convention.shape is not None:
            del stacked[convention.shape]
        if convention.global_scale is not None:  # one for gate and one for up
            scales = stacked[convention.global_scale].view(-1, 1, 1)
            stacked[convention.global_scale] = scales.repeat(1, self.runs, 1)
        return stacked

    def _describe(self, suffix: str, whole: Tensor) -> StackedTensor:
        """Return the record of a stacked tensor, given that of one whole expert."""
        held, convention = self.local.held, self.convention
        _, rows, columns = whole.shape
        described = StackedTensor(
            name=self.prefix + suffix,
            shape=(held.first + held.count, rows, columns * whole.itemsize),
            itemsize=whole.itemsize,
            axis=CUTS[f"{held.linear.rpartition('.')[2]}.weight"][0],
            runs=self.runs,
            block=whole.itemsize if self.runs == 1 else 1,
            interleave=held.interleave,
        )
        if convention is None:
            return described
        block_rows, block_cols = convention.scale_block
        if held.interleave is not None and held.interleave % block_rows:
            raise LayoutError(
                f"plan_transfers: {held.linear}: expected gate and up to alternate by whole blocks "
                f"of {block_rows} rows, got by {held.interleave}. Set "
                "--moe-mlp-glu-interleave-size to such a multiple."
            )
        if suffix == convention.data:
            line = block_cols * whole.itemsize // convention.elements
            return replace(described, block=line if self.runs == 1 else block_rows)
        if suffix == convention.scale:
            return replace(described, interleave=held.interleave and held.interleave // block_rows)
        return replace(described, axis=None, interleave=None)


def _linears(model_chunks: Any, convention: str | None) -> list[_Linear]:
    """Return the expert linears of chunks in model order; ConfigError for those of no plan."""
    linears = []
    for local in (one for chunk in model_chunks for one in local_experts(chunk)):
        held = local.held
        if held.kind == "bias" or held.format == TENSORWISE:
            what = "biases" if held.kind == "bias" else "per-tensor scaling"
            raise ConfigError(
                f"plan_transfers: {held.linear}: expected experts without biases in a format of "
                f"this package or bf16, got {what}. Call moe_optim.export_weights."
            )
        container, _, linear = held.linear.rpartition(".")
        prefix = f"{container}." if held.hf_layer is None else expert_prefixes(held.hf_layer)[1]
        is_bf16 = held.format == "bf16"
        linears.append(
            _Linear(
                local=local,
                prefix=f"{prefix}{ENGINE_NAMES[linear]}_",
                convention=None
                if is_bf16
                else find_convention(get_format(held.format), convention),
                runs=CUTS[f"{linear}.weight"][1],
            )
        )
    return linears
