"""Amaxes are saved under global expert ids, and loaded wherever their experts go."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import LayoutError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import MXFP8, NVFP4
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights
from tests.support.modules import experts
from tests.support.modules.amax import amax_of, linears_of, save_module
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_tensors

LAYOUTS = ("grouped", "indexed")
GLOBAL_EXPERTS = 6
PREFIX = "layer."


def distinct_values(shape: tuple[int, int, int], first: int, seed: int) -> torch.Tensor:
    """Return bf16 values whose amax is another for each global expert, and none of E4M3's."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(shape, generator=generator) * 2 - 1
    values[:, 3, 5] = 1 + 2**-5
    return (values * (1 + torch.arange(shape[0]) + first).view(-1, 1, 1)).bfloat16()


def _make_experts(ep: int, **knobs: Any) -> torch.nn.Module:
    from moe_optim.experts.module import GroupedExperts

    config = experts.make_config(
        num_moe_experts=GLOBAL_EXPERTS, expert_model_parallel_size=ep, moe_ffn_hidden_size=96
    )
    return GroupedExperts(
        GLOBAL_EXPERTS // ep,
        config,
        moe_optim_config=MoEOptimConfig(record_amax=True, **knobs),
        pg_collection=experts._seeded_groups(),
        name="experts",
    )


def _load(module: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Load strictly, and return the amaxes that the linears then know of."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(module.sharded_state_dict(prefix=PREFIX), str(folder))
    module.load_state_dict({name.removeprefix(PREFIX): value for name, value in state.items()})
    return {name: linear.whole_amax for name, linear in linears_of(module).items()}


def _save_on_two_ranks(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    experts.start_ranks(expert_model_parallel_size=2)
    saved = {}
    for format in ("mxfp8", "nvfp4"):
        module = _make_experts(2, format=format)
        for seed, linear in enumerate(linears_of(module).values()):
            first = dist.get_rank() * GLOBAL_EXPERTS // 2
            linear.load_values(distinct_values(linear.shape, first, seed))
        save_module(module, folder / format / "two", PREFIX)
        saved[format] = {name: linear.amax() for name, linear in linears_of(module).items()}
    return saved


def _load_on_one_rank(folder: Path) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    from megatron.core import dist_checkpointing

    experts.start_ranks()
    loaded = {}
    for format in ("mxfp8", "nvfp4"):
        for layout in LAYOUTS:
            module = _make_experts(1, format=format, expert_layout=layout)
            loaded[format, layout] = _load(module, folder / format / "two")
            own = {name: linear.amax() for name, linear in linears_of(module).items()}
            loaded[format, f"own {layout}"] = own
        save_module(module, folder / format / "one", PREFIX)
    experts.EXPERTS = GLOBAL_EXPERTS  # in this process alone
    stock = experts.make_stock(experts.make_config(num_moe_experts=GLOBAL_EXPERTS))
    state = dist_checkpointing.load(
        stock.sharded_state_dict(prefix=PREFIX), str(folder / "mxfp8" / "two")
    )
    stock.load_state_dict({name.removeprefix(PREFIX): value for name, value in state.items()})
    ours = _make_experts(1, format="mxfp8")
    _load(ours, folder / "mxfp8" / "two")
    mine = {name: weight.dequantize() for name, weight in ours.named_parameters()}
    assert_same_tensors(experts.values_of(stock), experts.by_expert(mine), what="stock")
    return loaded


def _load_on_two_ranks(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    experts.start_ranks(expert_model_parallel_size=2)
    return {
        format: _load(_make_experts(2, format=format), folder / format / "one")
        for format in ("mxfp8", "nvfp4")
    }


@pytest.fixture(scope="module")
def resharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """Return what two ranks saved, what one loaded of it, and two of what that one saved."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return (
        run_ranks(2, _save_on_two_ranks, folder),
        run_ranks(1, _load_on_one_rank, folder)[0],
        run_ranks(2, _load_on_two_ranks, folder),
    )


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_amaxes_follow_their_experts_over_expert_parallel_sizes(resharded: Any, format: str):
    """Two ranks with three experts each, one with six in either layout, and two again. All differ,
    so that no other order would do; Megatron's own experts load the same files."""
    two, one, again = resharded
    for linear in ("linear_fc1", "linear_fc2"):
        saved = torch.cat([rank[format][linear] for rank in two])
        assert len(saved.unique()) == GLOBAL_EXPERTS
        for layout in LAYOUTS:
            assert_bytes_equal(one[format, layout][linear], saved, what=layout)
        back = torch.cat([rank[format][linear] for rank in again])
        assert_bytes_equal(back, saved, what="back on two ranks")


def test_what_is_loaded_is_the_amax_of_the_masters(resharded: Any):
    """MXFP8 rounds the largest weights: of the weights in the checkpoint it would be another."""
    two, one, _ = resharded
    for layout in LAYOUTS:
        assert one["mxfp8", layout]
        for linear, amax in one["mxfp8", layout].items():
            assert (amax != one["mxfp8", f"own {layout}"][linear]).all()


# Entries and their values by themselves


def test_plain_state_dicts_hold_no_amax_and_load_with_or_without_one():
    """Whoever saved does not matter: without the key, or where the values were not known, an amax
    is that of the weights that were loaded; another number of experts is refused."""
    values = wide_range_weights(3, 64, 32).bfloat16()
    for format in (MXFP8, NVFP4):
        linear = GroupedLinear(3, 64, 32, format=format, record_amax=True)
        linear.load_values(values)
        assert set(linear.state_dict()) == {"weight"}
        state = {"weight": linear.weight.dequantize()}
        linear.load_state_dict(state | {"weight_amax": torch.arange(1.0, 4).view(3, 1, 1)})
        assert linear.whole_amax.tolist() == [1, 2, 3]
        linear.load_state_dict(state)
        assert linear.whole_amax is None
        assert_bytes_equal(linear.amax(), amax_of(state["weight"]), what=format.name)
        linear.load_state_dict(state | {"weight_amax": torch.full((3, 1, 1), torch.nan)})
        assert linear.whole_amax is None
        with pytest.raises(LayoutError, match="weight_amax: expected one value for each of 3"):
            linear.load_state_dict(state | {"weight_amax": torch.ones(2, 1, 1)})
