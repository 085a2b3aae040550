"""What was built is described by counting it, and the counts are those of plain torch."""

import json
import math
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.buckets.layout import side_by_side
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import DIRECTIONS, get_format, reference
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
    "compute": {"format": "bf16", "compute": "nvfp4"},
}  # fmt: skip


def quantized_bytes(format: str, local: int) -> int:
    """Return the bytes of the buffers of so many experts, by the plain torch definition."""
    buffers = [
        reference.quantize(torch.zeros(local, *shape[1:]), get_format(format)).buffers()
        for shape in SHAPES
    ]
    return sum(buffer.nbytes for of_linear in buffers for buffer in of_linear.values())


def _describe_all(expert_parallel: int) -> dict[str, tuple[dict[str, Any], str, str]]:
    """Return the description of every case, with repr of optimizer and experts."""

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
        described = moe_optim.describe([ddp], optimizer)
        shown = repr(optimizer.chained_optimizers[-1]), str(described)
        found[name] = (asdict(described), *shown)
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
    return described[parallel][rank][case][0]


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


def test_products_of_another_format_are_part_of_the_reason(described):
    row_of(of(described, 1, "compute"), "expert", "bf16 primary weights, multiplied in nvfp4")


def test_it_prints_in_one_line_and_as_json(described):
    description, shown, line = described[1][0]["nvfp4 grouped"]
    assert shown.startswith("GroupedDistributedOptimizer(8 expert weights in nvfp4 (73,728 param")
    assert shown.endswith("1 bucket, wire quantized, layout aligned)")
    assert line.startswith(
        "GroupedDistributedOptimizer, step stock; 8 expert weights in nvfp4 (73,"
    )
    assert "; gathered per step: " in line and " over 2 ranks (stock 144 KiB); " in line
    assert "\n" not in line
    assert json.loads(json.dumps(description))["buckets"] == 1


def test_a_linear_shows_shape_format_and_layout():
    linear = GroupedLinear(2, 48, 32, format=get_format("nvfp4"), expert_layout="indexed")
    assert repr(linear) == (
        "GroupedLinear(experts=2, [48, 32], format=nvfp4, expert_layout=indexed, bias=False)"
    )
    copied = GroupedLinear(2, 48, 32, format=None, compute=get_format("nvfp4"))
    assert "format=bf16, compute=nvfp4" in repr(copied)


@pytest.mark.parametrize("grouped", [False, True], ids=["a tensor an expert", "one tensor"])
@pytest.mark.parametrize(
    "format", [name for name, format in REPRESENTATIVE_FORMATS.items() if not format.is_row_only]
)
def test_weights_of_transformer_engine_are_counted_with_their_padded_scales(format, grouped):
    """Data once where directions share it; and the scales that travel beside those of products."""
    from moe_optim.optimizer.description import describe

    kind, count, (rows, cols) = get_format(format), 3, (64, 96)
    params = te_params(kind, count, rows, cols, grouped=grouped)
    description = describe(*te_chunk({1: params}))
    (row,) = description.weights
    assert (row.kind, row.format, row.unmanaged) == ("expert", format, None)
    assert (row.weights, row.parameters) == (count, count * rows * cols)
    data = rows * cols * kind.element_bits // 8 * (1 if kind.columnwise_copy == "shared" else 2)
    padded = sum(math.prod(kind.storage_scale_shape(rows, cols, way)) for way in DIRECTIONS)
    travelling = sum(
        math.prod(kind.scale_shape((1, rows, cols), way)) for way in kind.gathered_directions
    )
    scales = (padded + travelling) * kind.scale_dtype.itemsize
    assert row.weight_bytes == count * (data + scales + 4 * kind.has_global_amax)


def te_params(kind: Any, count: int, rows: int, cols: int, *, grouped: bool) -> list[Any]:
    """Return stand-ins for weights of Transformer Engine, with our storage behind them."""
    from moe_optim.weights.te.storage import TransformerEngineStorage
    from tests.support.te import te_stand_ins

    cls = {
        "fp8_block": te_stand_ins.Float8BlockwiseQTensor,
        "fp8_block_fp32": te_stand_ins.Float8BlockwiseQTensor,
        "nvfp4": te_stand_ins.NVFP4Tensor,
    }.get(kind.name, te_stand_ins.MXFP8Tensor)
    masters = torch.randn(count, rows, cols)
    weights = [te_stand_ins.GroupedTensor(cls, kind, masters)] if grouped else [
        cls(kind, master) for master in masters
    ]  # fmt: skip
    for index, weight in enumerate(weights):
        name = f"experts.linear_fc1.weight{'' if grouped else index}"
        weight.quantized_storage = TransformerEngineStorage(weight, kind, name)
        weight.requires_grad = True
        weight.dim = lambda weight=weight: len(weight.shape)
        weight.numel = lambda weight=weight: weight.shape.numel()
    return weights


@pytest.mark.parametrize(
    ("sizes", "said"),
    [((1,), "over 1 rank "), ((4,), "over 4 ranks "), ((4, 1), "over 1 or 4 ranks ")],
)
def test_it_says_how_many_ranks_share_a_bucket(sizes, said):
    """Expert parallelism divides experts, and not the other weights, which are quantized, too."""
    from moe_optim.optimizer.description import describe

    kind = get_format("fp8_block")
    params = {size: te_params(kind, 1, 128, 256, grouped=False) for size in sizes}
    description = describe(*te_chunk(params))
    assert description.ranks == tuple(sorted(sizes))
    assert said in str(description)


def te_chunk(params: dict[int, list[Any]]) -> tuple[list[Any], Any]:
    """Return one chunk and an optimizer around managed buckets.

    Args:
        params: of each bucket, by how many ranks share it.
    """
    from moe_optim.buckets.managed_bucket import ManagedBucket

    named = [(one.quantized_storage.name, one) for held in params.values() for one in held]
    buckets = []
    for size, held in params.items():
        slots = side_by_side([param.quantized_storage.shape for param in held])
        grads = torch.zeros(-(-slots[-1].end // 512) * 512)
        starts = [slot.start for slot in slots]
        managed = ManagedBucket(f"bucket of {size}", held, starts, grads, dp_size=size)
        buckets.append(SimpleNamespace(managed=managed, params_list=held))
    chunk = SimpleNamespace(
        bucket_groups=[],
        ddp_config=SimpleNamespace(pad_buckets_for_high_nccl_busbw=False),
        modules=lambda: [],
        named_parameters=lambda: named,
    )
    return [chunk], SimpleNamespace(buffers=[SimpleNamespace(buckets=buckets)])
