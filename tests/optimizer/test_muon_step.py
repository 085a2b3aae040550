"""A step of all matrices of a rank, against emerging-optimizers one matrix at a time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon as OneAtATime
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_optim.errors import ConfigError
from moe_optim.formats import FORMATS, QuantizedWeight, get_format, reference
from moe_optim.formats.reference.muon import Orthogonalization
from moe_optim.kernels.fields import HYPER_FIELDS
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.optimizer.muon import MatrixWeight, MuonSettings, hyper_of
from moe_optim.optimizer.muon_step import (
    MuonState,
    MuonTable,
    allocate_workspace,
    check_workspace,
    common_scale_of,
)
from tests.support.bytes import assert_bytes_equal

GROUP: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
DEFAULTS = MuonSettings(
    orthogonalization=Orthogonalization(),
    nesterov=False,
    tp_mode="blockwise",
    splits_qkv=True,
    splits_gate_up=False,
    iteration="auto",
    workspace_bytes=1 << 30,
)


def _weight(rows: int, cols: int, split: tuple[int, ...] = (), name: str = "w") -> MatrixWeight:
    return MatrixWeight(
        name=name,
        shape=(rows, cols),
        split=split,
        is_expert=False,
        partition_dim=None,
        group=None,
    )


def _states(weights: Sequence[tuple[MatrixWeight, int]], seed: int = 0) -> list[MuonState]:
    made = torch.Generator().manual_seed(seed)
    states = []
    for index, (weight, count) in enumerate(weights):
        master, gradient, momentum = (
            torch.randn(count * weight.numel, generator=made) * scale for scale in (0.1, 1e-3, 1e-3)
        )
        states.append(
            MuonState(
                weight=weight,
                master=master,
                gradient=gradient,
                momentum=momentum,
                group=index,
                norm=0,
                copy=master.bfloat16(),
            )
        )
    return states


def _step(
    states: Sequence[MuonState],
    settings: MuonSettings = DEFAULTS,
    clip: float = 1.0,
    members: Sequence[MemberTable] = (),
) -> MuonTable:
    how = settings.orthogonalization
    hyper = torch.zeros(max(len(states), 1), HYPER_FIELDS)
    for state in states:
        scale = common_scale_of(state.weight, settings)
        row = hyper_of(GROUP, scale, how.extra_scale_factor).row()
        hyper[state.group, : len(row)] = torch.tensor(row)
    workspace = allocate_workspace(states, settings, torch.device("cpu"))
    table = MuonTable.build(
        states, settings, hyper, torch.full((1,), clip), workspace, members=members
    )
    table.launch()
    return table


def _expected(state: MuonState, settings: MuonSettings, clip: float) -> tuple[Tensor, Tensor]:
    """Step every matrix apart with emerging-optimizers; return masters and momenta."""
    how, (rows, cols) = settings.orthogonalization, state.weight.shape
    masters, gradients, momenta = (
        one.clone().view(-1, rows, cols) for one in (state.master, state.gradient, state.momentum)
    )
    for number in range(state.count):
        for of_matrix in state.weight.rows:
            taken = of_matrix.indices()
            matrix = torch.nn.Parameter(masters[number, taken])
            matrix.grad = gradients[number, taken] * clip
            stock = OneAtATime(
                [matrix],
                **GROUP,
                nesterov=settings.nesterov,
                fp32_matmul_prec=how.precision,
                coefficient_type=how.coefficient_type,  # type: ignore[arg-type]
                num_ns_steps=how.num_steps,
                scale_mode=how.scale_mode,
                extra_scale_factor=how.extra_scale_factor,
            )
            stock.state[matrix]["momentum_buffer"] = momenta[number, taken]
            stock.step()
            masters[number, taken] = matrix.detach()
            momenta[number, taken] = stock.state[matrix]["momentum_buffer"]
    return masters.view(-1), momenta.view(-1)


SPLITS = [(), (16, 8, 8), (16, 16)]
"""One matrix; queries, keys and values; alternating gate and up: of 64 rows, in periods of 32."""


@settings(max_examples=12)
@given(
    split=st.sampled_from(SPLITS),
    cols=st.sampled_from([32, 64, 96]),
    nesterov=st.booleans(),
    how=st.sampled_from(
        [
            Orthogonalization(),
            Orthogonalization(coefficient_type="deepseekv4", num_steps=10, precision="high"),
            Orthogonalization(scale_mode="unit_rms_norm", extra_scale_factor=0.2, num_steps=3),
        ]
    ),
    clip=st.sampled_from([1.0, 0.3]),
)
def test_a_step_is_that_of_emerging_optimizers(
    split: tuple[int, ...], cols: int, nesterov: bool, how: Orthogonalization, clip: float
):
    """Momentum is equal to the bit. Masters differ by a small part of the update where the norm of
    a matrix, summed in fp64 here and in fp32 there, rounds differently."""
    chosen = replace(DEFAULTS, orthogonalization=how, nesterov=nesterov)
    states = _states([(_weight(64, cols, split), 3), (_weight(64, cols, split), 1)])
    expected = [_expected(state, chosen, clip) for state in states]
    before = [state.master.clone() for state in states]
    _step(states, chosen, clip)
    for state, old, (master, momentum) in zip(states, before, expected, strict=True):
        assert_bytes_equal(state.momentum, momentum, what="momentum")
        moved = (master - old).norm()
        assert (state.master - master).norm() <= 0.02 * moved
        assert state.copy is not None
        assert_bytes_equal(state.copy, state.master.bfloat16(), what="copy")


@pytest.mark.parametrize("split", SPLITS)
def test_batches_and_owners_do_not_change_bits(split: tuple[int, ...]):
    """One table of all weights, one per weight, and a workspace of one weight give equal bits."""
    weight = _weight(64, 96, split)
    whole = _states([(weight, 6)])
    parts = _states([(weight, 6)])
    small = _states([(weight, 6)])
    _step(whole)
    for number in range(6):
        owned = slice(number * weight.numel, (number + 1) * weight.numel)
        (of_all,) = parts
        _step(
            [
                replace(
                    of_all,
                    master=of_all.master[owned],
                    gradient=of_all.gradient[owned],
                    momentum=of_all.momentum[owned],
                    copy=None if of_all.copy is None else of_all.copy[owned],
                )
            ]
        )
    tight = replace(DEFAULTS, workspace_bytes=200_000)
    assert len(_step(small, tight).chunks) > 1
    for others in (parts, small):
        for name in ("master", "momentum", "copy"):
            got, want = getattr(others[0], name), getattr(whole[0], name)
            assert_bytes_equal(got, want, what=name)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bf16"])
def test_quantized_weights_come_from_the_stepped_masters(name: str):
    """Data and scales of every expert are the reference's of the new master."""
    format = get_format(name)
    weight = _weight(128, 256)
    (state,) = _states([(weight, 3)])
    target = QuantizedWeight.empty(format, (3, 128, 256), device="cpu")
    entry = TableEntry(parameter="w", source=state.master, target=target)
    members = MemberTable.build([entry])
    _step([replace(state, copy=None)], members=[members])
    expected = reference.quantize(state.master.view(3, 128, 256), format)
    members.finish.launch()
    for buffer, tensor in expected.gathered_buffers().items():
        assert_bytes_equal(target.gathered_buffers()[buffer], tensor, what=buffer)


def test_a_negative_clip_factor_changes_nothing():
    """A skipped step leaves masters and momentum as they are."""
    states, old = _states([(_weight(64, 96), 2)]), _states([(_weight(64, 96), 2)])
    _step(states, clip=-1.0)
    assert_bytes_equal(states[0].master, old[0].master, what="master")
    assert_bytes_equal(states[0].momentum, old[0].momentum, what="momentum")


def test_a_weight_larger_than_the_workspace_is_refused_by_name():
    """The message names the weight, its shape, and a size that suffices."""
    weight = _weight(512, 1024, name="decoder.layers.0.mlp.experts.linear_fc1.weight")
    tight = replace(DEFAULTS, workspace_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"muon_workspace_mib: expected at least 4 .*linear_fc1"):
        check_workspace([weight], tight)
    check_workspace([weight], replace(DEFAULTS, workspace_bytes=4 << 20))


def test_no_matrices_are_a_step_without_calls():
    """A rank that owns nothing steps nothing."""
    table = _step([])
    assert not table.chunks
    assert not table.written
