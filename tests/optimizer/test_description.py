"""What was built is described by counting it, and the counts are those of plain torch."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import StateError
from moe_optim.formats import get_format, reference
from tests.support.formats import REPRESENTATIVE_FORMATS
from tests.support.modules import experts
from tests.support.ranks import run_ranks
from tests.support.wrapping import build_optimizer, wrap

HIDDEN, FFN, EXPERTS = 64, 96, 4
SHAPES = ((EXPERTS, 2 * FFN, HIDDEN), (EXPERTS, HIDDEN, FFN))
"""Of all experts of the model."""
EXPERT_PARAMETERS = EXPERTS * 3 * HIDDEN * FFN
CASES = {
    **{f"{format} {layout}": {"format": format, "expert_layout": layout}
       for format in REPRESENTATIVE_FORMATS for layout in ("grouped", "indexed")},
}  # fmt: skip


def quantized_bytes(format: str, local: int) -> int:
    """Return the bytes of the buffers of so many experts, by the plain torch definition."""
    buffers = [
        reference.quantize(torch.zeros(local, *shape[1:]), get_format(format)).buffers()
        for shape in SHAPES
    ]
    return sum(buffer.nbytes for of_linear in buffers for buffer in of_linear.values())


def _describe_all(expert_parallel: int) -> dict[str, dict[str, Any]]:
    """Return the description of every case."""

    import moe_optim

    experts.start_ranks(expert_model_parallel_size=expert_parallel)
    groups = experts._seeded_groups()
    found = {}
    for name, knobs in CASES.items():
        config = experts.make_config(
            hidden_size=HIDDEN,
            moe_ffn_hidden_size=FFN,
            num_moe_experts=EXPERTS,
            expert_model_parallel_size=expert_parallel,
            add_bias_linear=True,
        )
        moe_optim.install(MoEOptimConfig(**knobs))
        model = Model(config, groups, EXPERTS // expert_parallel, MoEOptimConfig(**knobs))
        ddp = wrap(config, model)
        optimizer = build_optimizer(ddp)
        found[name] = asdict(moe_optim.describe([ddp], optimizer))
        moe_optim.uninstall()
    with pytest.raises(StateError, match="wrapped with DDP, got Model"):
        moe_optim.describe([model], optimizer)
    return found


class Model(torch.nn.Module):
    """Experts, a dense matrix, a norm, and a matrix that is not trained."""

    def __init__(self, config: Any, groups: Any, local: int, knobs: MoEOptimConfig) -> None:
        from moe_optim.experts.module import GroupedExperts

        super().__init__()
        self.config = config
        self.experts = GroupedExperts(
            local, config, moe_optim_config=knobs, pg_collection=groups, name="experts"
        )
        self.dense = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)
        self.norm = torch.nn.RMSNorm(HIDDEN, dtype=torch.bfloat16)
        self.frozen = torch.nn.Linear(HIDDEN, 32, bias=False, dtype=torch.bfloat16)
        self.frozen.requires_grad_(False)


@pytest.fixture(scope="module")
def described() -> dict[int, list[dict[str, Any]]]:
    """Return what every rank saw, by expert parallel size."""
    return {1: run_ranks(2, _describe_all, 1), 2: run_ranks(2, _describe_all, 2)}


def of(described: Any, parallel: int, case: str, rank: int = 0) -> dict[str, Any]:
    return described[parallel][rank][case]


def row_of(description: dict[str, Any], kind: str, reason: str | None) -> dict[str, Any]:
    (row,) = (r for r in description["weights"] if (r["kind"], r["unmanaged"]) == (kind, reason))
    return row


both_sizes = pytest.mark.parametrize("parallel", [1, 2], ids=["data parallel", "expert parallel"])


@both_sizes
@pytest.mark.parametrize("layout", ["grouped", "indexed"])
@pytest.mark.parametrize("format", REPRESENTATIVE_FORMATS)
def test_managed_weights_are_counted_in_the_buffers_that_lie_there(
    described, format, layout, parallel
):
    """One weight an expert and linear in both expert layouts; only tails of buckets are more than
    the buffers of the plain definition, by 1% at most."""
    row = row_of(of(described, parallel, f"{format} {layout}"), "expert", None)
    assert row["format"] == format
    assert row["weights"] == 2 * EXPERTS // parallel
    assert row["parameters"] == EXPERT_PARAMETERS // parallel
    assert row["stock_weight_bytes"] == 2 * row["parameters"]
    buffers = quantized_bytes(format, EXPERTS // parallel)
    assert buffers <= row["weight_bytes"] <= 1.01 * buffers


@both_sizes
@pytest.mark.parametrize("format", REPRESENTATIVE_FORMATS)
def test_gathered_bytes_are_those_of_the_buffers_that_travel(described, format, parallel):
    """And stock's, 2 a parameter up to the end that Megatron gives a bucket."""
    description = of(described, parallel, f"{format} grouped")
    local = EXPERTS // parallel
    buffers = [
        buffer
        for shape in SHAPES
        for buffer in reference.quantize(torch.zeros(local, *shape[1:]), get_format(format))
        .gathered_buffers()
        .values()
    ]
    travelling = sum(buffer.nbytes for buffer in buffers)
    assert travelling <= description["gathered_bytes"] <= 1.01 * travelling
    used = EXPERT_PARAMETERS // parallel
    assert description["stock_gathered_bytes"] == 2 * (-(-used // 128) * 128)
    assert (description["wire"], description["layout"]) == ("quantized", "aligned")
    assert (description["buckets"], description["ranks"]) == (1, (2 // parallel,))


@both_sizes
def test_what_is_not_managed_is_listed_with_the_reason(described, parallel):
    """Everything else of the model, by plain counting: no parameter is in no row."""
    description = of(described, parallel, "mxfp8 grouped")
    local = EXPERTS // parallel
    want = {
        ("expert", None): (2 * local, EXPERT_PARAMETERS // parallel),
        ("expert", "bias or norm"): (2 * local, local * (2 * FFN + HIDDEN)),
        ("dense", "bf16 primary weights"): (1, HIDDEN * HIDDEN),
        ("dense", "bias or norm"): (1, HIDDEN),
        ("dense", "frozen"): (1, HIDDEN * 32),
    }
    assert {
        (row["kind"], row["unmanaged"]): (row["weights"], row["parameters"])
        for row in description["weights"]
    } == want
    others = [row for row in description["weights"] if row["unmanaged"]]
    assert all(row["format"] == "bf16" for row in others)
    assert all(row["weight_bytes"] == 2 * row["parameters"] for row in others)
