"""A plan costs what the real thing costs: buffers, launches and maxima of ranks that are built."""

import json
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import bucket_end_divisor, pad_to_divisor
from megatron.training import training

from benchmarks import requantize
from benchmarks.cases import Case
from moe_optim.buckets.buffer_plan import Slot
from moe_optim.buckets.layout import AlignedDistributedOptimizer
from moe_optim.buckets.states import Event
from moe_optim.commands.cli import main as cli
from moe_optim.commands.plan import experts as planned_experts
from moe_optim.commands.plan.answers import find_choice, recommend
from moe_optim.commands.plan.costs import (
    OPTIMIZER,
    PARTS,
    ROWS,
    STOCK_BF16,
    STOCK_FP8_BLOCK,
    STOCK_MXFP8,
    STOCK_NVFP4,
    STOCKS,
    plan_rows,
)
from moe_optim.commands.plan.experts import plan_experts
from moe_optim.commands.plan.picture import spread
from moe_optim.commands.plan.report import default_gpus
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import DIRECTIONS, FORMATS
from moe_optim.kernels.finish_table import FinishTable
from moe_optim.kernels.launch_table import LaunchTable, can_launch, own_slots
from moe_optim.rules import Setup, config_with_flags, why_stock_step
from moe_optim.spelling import spell_bytes, spell_count, spell_difference
from tests.support.states.buckets import make_bucket, own_masters

ROOT = Path(__file__).parents[3]
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)
KEYS = {
    "format",
    "gpus",
    "weight_bytes_per_rank",
    "gradient_bytes_per_rank",
    "optimizer_bytes_per_rank",
    "step_memory_bytes_per_rank",
    "total_bytes_per_rank",
    "against_stock_bf16_bytes",
    "against_stock_bytes",
    "gathered_bytes_per_step",
    "gather_ms",
    "launches_per_step",
    "padding_fraction",
    "path",
    "shard_imbalance",
}
STEP = {
    "norm_bytes_per_rank",
    "update_bytes_per_rank",
    "step_bytes_per_parameter",
    "step_floor_ms",
}
FIGURES = KEYS | STEP | {"exchanged_maxima", "parts", "expert_data_parallel_size", "buckets"}
HIDDEN, FFN, EXPERTS, LAYERS = 128, 96, 4, 3
BUCKET_SIZE = 100_000  # more than one linear's experts, less than those of a layer
SMALL = {
    "--num-layers": LAYERS,
    "--hidden-size": HIDDEN,
    "--moe-ffn-hidden-size": FFN,
    "--num-experts": EXPERTS,
    "--ddp-bucket-size": BUCKET_SIZE,
    "--swiglu": True,
    "--bf16": True,
    "--use-distributed-optimizer": True,
    "--overlap-grad-reduce": True,
}
LARGE = SMALL | {
    "--num-layers": 4,
    "--hidden-size": 2048,
    "--moe-ffn-hidden-size": 768,
    "--num-experts": 128,
    "--ddp-bucket-size": None,
    "--expert-model-parallel-size": 8,
}
LOCAL = {"transformer_impl": "local"}
NATIVE = {"fp8_recipe": "mxfp8", "fp8_param_gather": True}
DDP_CONFIG = SimpleNamespace(pad_buckets_for_high_nccl_busbw=False)


def argv(flags):
    words = []
    for flag, value in flags.items():
        words += [] if value is None else [flag] if value is True else [flag, str(value)]
    return words


def experts_of(flags=SMALL, *, grouped=True, **changes):
    changed = {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return plan_experts(argv(flags | changed), grouped=grouped)


def row_of(experts, gpus, name):
    (row,) = [row for row in plan_rows(experts, [gpus]) if row["format"] == name]
    return row


class RealRank:
    """The experts of one rank as a run builds them, laid out by the function a run lays them by."""

    def __init__(self, name, expert_layout, rank, dp_size):
        linears = [
            GroupedLinear(EXPERTS, *shape, format=FORMATS[name], expert_layout=expert_layout)
            for _ in range(LAYERS)
            for shape in ((2 * FFN, HIDDEN), (HIDDEN, FFN))
        ]
        params = [param for linear in linears for param in linear.parameters()]
        layout = AlignedDistributedOptimizer._compute_per_buffer_param_layout(
            params, BUCKET_SIZE, dp_size, DDP_CONFIG
        )
        self.params, self.gathers, self.owned, self.numel = params, [], 0, 0
        for number, (start, end) in enumerate(layout.bucket_indices):
            places = {p: at for p, at in layout.param_index_map.items() if at[2] == number}
            self._add_bucket(places, start, end - start, rank, dp_size)

    def _add_bucket(self, places, start, numel, rank, dp_size):
        slots = [
            Slot(name="weight", start=first - start, shape=param.quantized_storage.shape)
            for param, (first, _, _) in places.items()
        ]
        params = list(places)
        wholes = [torch.zeros(slot.shape) for slot in slots]
        masters = own_masters(params, slots, wholes, rank, numel // dp_size)
        grads = torch.empty(numel, dtype=torch.bfloat16, device="meta")
        bucket = make_bucket(params, slots, grads, dp_size=dp_size, masters=masters)
        bucket.state.record(Event.SETTLE)
        bucket.open_gather()
        self.gathers.append(bucket.gather)
        self.owned += sum(one.master.numel() for one in masters)
        self.numel += numel

    def buffer_bytes(self):
        """Return the bytes of all memory behind the buffers, each piece of it once."""
        buffers = [
            buffer
            for p in self.params
            for buffer in p.quantized_storage.quantized.buffers().values()
        ]
        memory = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in buffers}
        return sum(memory.values())

    def gathered(self):
        return sum(
            sum(buffer.data.nbytes for buffer in gather.sliced)
            + sum(values.nbytes for values in gather.reduced)
            for gather in self.gathers
        )

    def maxima(self):
        exchanges = [gather.exchange for gather in self.gathers]
        return sum(0 if exchange is None else exchange.numel() for exchange in exchanges)

    def launches(self):
        """Return how many kernels the tables start, built as on a GPU but with CPU addresses."""
        return sum(map(launches_of, self.gathers))


def launches_of(gather):
    table = gather._table
    planned = [one for one in table.remainder if can_launch(one[0])]
    finish = FinishTable.build(table.entries) is not None
    if not planned:
        return int(finish)
    slots = table.exchange.numel()
    amax = torch.zeros(slots + own_slots(planned))
    return LaunchTable.build(planned, amax, first_free_slot=slots).num_launches + finish


@EVERY_FORMAT
@pytest.mark.parametrize("expert_layout", ["grouped", "indexed"])
@pytest.mark.parametrize("dp_size", [1, 2, 7, 24])
def test_a_plan_is_what_ranks_that_are_built_hold_gather_and_launch(name, expert_layout, dp_size):
    ranks = [RealRank(name, expert_layout, rank, dp_size) for rank in range(dp_size)]
    row = row_of(experts_of(grouped=expert_layout == "grouped"), dp_size, name)
    assert row["gathered_bytes_per_step"] == ranks[0].gathered()
    assert row["launches_per_step"] == max(rank.launches() for rank in ranks)
    assert row["exchanged_maxima"] == ranks[0].maxima()
    assert row["buckets"] == len(ranks[0].gathers) > 1
    most = max(rank.owned for rank in ranks)
    total = sum(rank.owned for rank in ranks)
    assert total == LAYERS * EXPERTS * 3 * HIDDEN * FFN
    resident = ranks[0].buffer_bytes() + 4 * ranks[0].maxima() + 4 * ranks[0].numel + 12 * most
    assert row["total_bytes_per_rank"] == resident
    assert row["shard_imbalance"] == pytest.approx(most * dp_size / total, rel=1e-15)
    assert row["padding_fraction"] == (ranks[0].numel - total) / ranks[0].numel


@EVERY_FORMAT
def test_parts_are_the_buffers_by_name_and_add_up(name):
    """At one rank nothing is padded: the buffers are those that the format describes."""
    row = row_of(experts_of(ddp_bucket_size=1), 1, name)
    parts = row["parts"]
    assert set(parts) == set(PARTS)
    assert sum(parts.values()) == row["total_bytes_per_rank"]
    rank = RealRank(name, "grouped", 0, 1)
    for buffer in ("rowwise_data", "rowwise_scale", "columnwise_scale", "global_amax"):
        buffers = [p.quantized_storage.quantized.buffers().get(buffer) for p in rank.params]
        assert parts[buffer] == sum(0 if p is None else p.nbytes for p in buffers)
    copies = {"mxfp8": 1, "mxfp8_2d": 0, "nvfp4": 1, "fp8_block": 1}[name]
    assert parts["columnwise_data"] == copies * parts["rowwise_data"]
    numel = LAYERS * EXPERTS * 3 * HIDDEN * FFN
    assert (parts["gradients"], parts["masters"], parts["moments"]) == (
        4 * numel,
        4 * numel,
        8 * numel,
    )
    assert (parts["parameter_buffer"], parts["exchange"]) == (0, 0)


def test_gradients_have_the_dtype_they_are_reduced_in():
    """bf16 by the flag of the reduction, or by that of precision-aware optimizers."""
    aware = {"use_precision_aware_optimizer": True}
    cases = (
        ({}, 4),
        ({"grad_reduce_in_bf16": True}, 2),
        (aware | {"main_grads_dtype": "fp32"}, 4),
        (aware | {"main_grads_dtype": "bf16"}, 2),
    )
    for flags, itemsize in cases:
        row = row_of(experts_of(**flags), 2, STOCK_BF16)
        assert row["parts"]["gradients"] * 2 == row["parts"]["parameter_buffer"] * itemsize


def test_moments_have_the_dtypes_they_are_held_in():
    """The flags of precision-aware optimizers: fp8 and bf16 take 3 of 8 bytes."""
    narrow = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8"}
    held = row_of(experts_of(**narrow, exp_avg_sq_dtype="bf16"), 2, "mxfp8")["parts"]["moments"]
    assert held * 8 == row_of(experts_of(), 2, "mxfp8")["parts"]["moments"] * 3


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_precision_aware_adam_keeps_two_bytes_of_the_master_of_a_bf16_weight(dtype):
    """The half of fp32 that bf16 lacks, or fp16; masters of quantized weights are fp32 anyway.

    The row of bf16 weights is of a run without FP8: a recipe of FP8 does not change it.
    """
    aware = {"use_precision_aware_optimizer": True, "main_params_dtype": dtype}
    for flags in (aware, aware | NATIVE):
        plain_rows = list(plan_rows(experts_of(), [2]))
        assert len(plain_rows) == len(ROWS)
        for row, plain in zip(plan_rows(experts_of(**flags), [2]), plain_rows, strict=True):
            part = 0.5 if row["format"] == STOCK_BF16 else 1
            assert row["parts"]["masters"] == part * plain["parts"]["masters"]


def stock_layout(dp_size, busbw=False):
    """Return Megatron's layout of the small model as ordinary bf16 parameters."""
    shapes = [(EXPERTS, 2 * FFN, HIDDEN), (EXPERTS, HIDDEN, FFN)] * LAYERS
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    config = SimpleNamespace(pad_buckets_for_high_nccl_busbw=busbw)
    return DistributedOptimizer._compute_per_buffer_param_layout(
        params, BUCKET_SIZE, dp_size, config
    )


@pytest.mark.parametrize("busbw", [None, True])
@pytest.mark.parametrize("dp_size", [2, 7, 24])
def test_stock_rows_are_megatrons_own_layout(dp_size, busbw):
    layout = stock_layout(dp_size, bool(busbw))
    numel = layout.bucket_indices[-1][1]
    used = sum(layout.per_bucket_numel_unpadded)
    experts = experts_of(ddp_pad_buckets_for_high_nccl_busbw=busbw)
    for name in (STOCK_MXFP8, STOCK_BF16):
        row = row_of(experts, dp_size, name)
        assert row["padding_fraction"] == (numel - used) / numel
        assert row["buckets"] == len(layout.bucket_indices)
        assert (row["gathered_bytes_per_step"], row["parts"]["gradients"]) == (2 * numel, 4 * numel)
        assert (row["path"], row["exchanged_maxima"]) == ("bf16 wire", 0)
    assert row_of(experts, dp_size, STOCK_BF16)["parts"]["parameter_buffer"] == 2 * numel


def test_stock_mxfp8_quantizes_expert_by_expert_into_padded_storage():
    """Rows of scales are padded to 128 and columns to 4: [192, 4] and [8, 128], [128, 4] twice."""
    row = row_of(experts_of(), 1, STOCK_MXFP8)
    experts = LAYERS * EXPERTS
    assert row["launches_per_step"] == 2 * experts
    data = experts * 3 * HIDDEN * FFN
    rowwise = experts * (256 * 4 + 128 * 4)
    columnwise = experts * (8 * 128 + 4 * 128)
    assert [row["parts"][buffer] for buffer in PARTS[:4]] == [data, rowwise, data, columnwise]


@pytest.mark.parametrize("busbw", [None, True])
@pytest.mark.parametrize("dp_size", [1, 7])
def test_stock_blocks_and_nvfp4_gather_rowwise_data_which_is_the_parameter_buffer(dp_size, busbw):
    """NVFP4's packed buffer is padded once more, in bytes, by the rules of unpacked ones."""
    experts = experts_of(ddp_pad_buckets_for_high_nccl_busbw=busbw, ddp_bucket_size=1)
    linears = [EXPERTS * 2 * FFN * HIDDEN, EXPERTS * FFN * HIDDEN]
    divisor = bucket_end_divisor(dp_size, bool(busbw))
    for name, per_byte in ((STOCK_FP8_BLOCK, 1), (STOCK_NVFP4, 2)):
        row = row_of(experts, dp_size, name)
        wire = LAYERS * sum(pad_to_divisor(numel // per_byte, divisor) for numel in linears)
        assert (row["gathered_bytes_per_step"], row["parts"]["parameter_buffer"]) == (wire, wire)
        assert row["parts"]["columnwise_data"] == LAYERS * sum(linears) // per_byte
        assert (row["parts"]["rowwise_data"], row["launches_per_step"]) == (0, None)


@EVERY_FORMAT
def test_weights_of_transformer_engine_have_padded_scales_besides_the_buffers(name):
    """And columnwise scales of 2-D blocks are a view of rowwise ones."""
    portable, native = (row_of(experts_of(**flags), 1, name)["parts"] for flags in (LOCAL, NATIVE))
    format = FORMATS[name]
    padded = sum(
        LAYERS * EXPERTS * prod(format.storage_scale_shape(rows, cols, way))
        for rows, cols in ((2 * FFN, HIDDEN), (HIDDEN, FFN))
        for way in DIRECTIONS
    )
    assert native["storage_scales"] == padded * format.scale_dtype.itemsize
    assert (portable["storage_scales"], native["columnwise_scale"] == 0) == (0, format.is_2d)
    same = set(PARTS) - {"storage_scales", "columnwise_scale"}
    assert {part: portable[part] for part in same} == {part: native[part] for part in same}


def test_megatrons_step_copies_gradients_in_bf16_and_a_fused_one_does_not():
    experts = experts_of(grad_reduce_in_bf16=True)
    for is_fused in (True, False):
        for row in plan_rows(experts, [2], is_fused=is_fused):
            copies = not (is_fused and row["format"] in FORMATS)
            masters = row["parts"]["masters"]
            assert row["step_memory_bytes_per_rank"] == copies * masters
    aware = experts_of(grad_reduce_in_bf16=True, use_precision_aware_optimizer=True)
    assert row_of(aware, 2, STOCK_BF16)["step_memory_bytes_per_rank"] == 0
    assert row_of(experts_of(), 2, STOCK_BF16)["step_memory_bytes_per_rank"] == 0


@pytest.mark.parametrize("fraction", [0.25, 1])
def test_states_on_the_host_take_no_memory_of_the_device(fraction):
    """In our rows; how long a step then takes is not known."""
    speeds = {"memory_tb_per_s": 3.0}
    all_here = list(plan_rows(experts_of(), [2], **speeds))
    assert len(all_here) == len(ROWS)
    for row, without in zip(
        plan_rows(experts_of(), [2], offload_states=fraction, **speeds), all_here, strict=True
    ):
        is_ours = row["format"] in FORMATS
        for name in OPTIMIZER:
            left = 1 - fraction if is_ours else 1
            assert row["parts"][name] == pytest.approx(left * without["parts"][name], abs=8)
        saved = without["optimizer_bytes_per_rank"] - row["optimizer_bytes_per_rank"]
        assert row["total_bytes_per_rank"] == without["total_bytes_per_rank"] - saved
        assert row["step_floor_ms"] is None if is_ours else True


def test_megatrons_flag_puts_states_of_bf16_weights_on_the_host_in_its_rows_too():
    """Megatron takes it with bf16 weights alone; of what is more than all, all is meant."""
    flags = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
    without = list(plan_rows(experts_of(), [2]))
    for fraction, left in ((0.25, 0.75), (1.5, 0.0)):
        experts = experts_of(**flags, optimizer_offload_fraction=fraction)
        knobs = config_with_flags(MoEOptimConfig(), experts)
        assert knobs.offload_states == 1 - left
        rows = plan_rows(experts, [2], offload_states=knobs.offload_states)
        for row, whole in zip(rows, without, strict=True):
            part = left if row["format"] in {*FORMATS, STOCK_BF16} else 1
            for name in OPTIMIZER:
                assert row["parts"][name] == pytest.approx(part * whole["parts"][name], abs=8)


@pytest.mark.parametrize("knob", ["step", "layout"])
def test_states_on_the_host_are_not_planned_where_a_run_would_refuse_them(knob, capsys):
    plan = ["plan", f"{ROOT}/recipes/quickstart.yaml", "--set", f"moe_optim.{knob}=stock"]
    flags = ["--use-precision-aware-optimizer", "--optimizer-cpu-offload"]
    assert cli.main([*plan, "--", *flags]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"states on the host: expected a fused step, got {knob}: stock. Remove that" in said


def test_differences_are_those_of_totals_to_stock_in_bf16_and_in_the_same_format():
    rows = {row["format"]: row for row in plan_rows(experts_of(), [2])}
    for name, row in rows.items():
        total = row["total_bytes_per_rank"]
        assert row["against_stock_bf16_bytes"] == total - rows[STOCK_BF16]["total_bytes_per_rank"]
        stock = rows.get(f"stock {name}")
        expected = None if stock is None else total - stock["total_bytes_per_rank"]
        assert row["against_stock_bytes"] == expected
    assert rows["mxfp8_2d"]["against_stock_bytes"] is None


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_gather_takes_its_bytes_of_others_at_the_bus_bandwidth(gpus):
    """As nccl-tests define it: 3 of 4 parts come from others, and none of one rank."""
    rows = list(plan_rows(experts_of(), [gpus], network_gb_per_s=100))
    assert len(rows) == len(ROWS)
    for row in rows:
        seconds = row["gathered_bytes_per_step"] * (gpus - 1) / gpus / 100e9
        assert row["gather_ms"] == pytest.approx(1e3 * seconds)


# Answers


def advice(argv, *, gpu_memory=None, gpus=2, **knobs):
    recipe = SimpleNamespace(moe_optim=MoEOptimConfig(**knobs))
    experts = plan_experts(argv, grouped=True)
    rows = list(plan_rows(experts, [gpus]))
    return recommend(find_choice(recipe, argv, experts), rows, gpu_memory)


def test_portable_experts_are_told_the_format_of_as_many_bits_with_the_least_memory():
    local = argv(SMALL | {"--transformer-impl": "local", "--moe-grouped-gemm": True})
    said = advice(local, format="mxfp8")
    assert said.startswith("Recommended: mxfp8_2d, the least memory of formats of 8 bits")
    assert said.endswith(
        "The recipe has mxfp8, which continues a run of it: for a new one add "
        "--set moe_optim.format=mxfp8_2d."
    )
    row, bf16 = (row_of(plan_experts(local, grouped=True), 2, n) for n in ("mxfp8_2d", STOCK_BF16))
    saved = bf16["total_bytes_per_rank"] - row["total_bytes_per_rank"]
    assert f"At 2 GPUs its experts take {spell_bytes(row['total_bytes_per_rank'])} a rank" in said
    assert f"{spell_bytes(saved)} less than stock bf16" in said
    assert advice(local, format="nvfp4").startswith("Recommended: nvfp4, the only format of 4 bits")


def test_native_weights_are_told_what_their_recipe_can_have():
    def native(recipe):
        bits = "fp4" if recipe == "nvfp4" else "fp8"
        return argv(SMALL | {f"--{bits}-recipe": recipe, f"--{bits}-param-gather": True})

    assert advice(native("blockwise")).startswith("Recommended: fp8_block, the only format that")
    assert advice(native("mxfp8")).startswith("Recommended: mxfp8_2d, the least memory of formats")
    assert advice(native("nvfp4")).startswith(
        "Recommended: nvfp4, the only format that --fp4-recipe"
    )


def test_flags_that_keep_bf16_weights_are_told_what_to_add():
    said = advice(argv(SMALL))
    assert said.startswith(
        "Recommended: none of these as the recipe stands, as its flags keep bf16"
    )
    assert "--fp8-recipe blockwise --fp8-param-gather for fp8_block on Hopper" in said
    delayed = argv(SMALL | {"--fp8-param-gather": True})
    assert "as weights of --fp8-recipe delayed stay Megatron's. Add" in advice(delayed)


def test_whether_a_gpu_holds_the_experts_is_said_with_what_they_leave_or_miss():
    local = argv(LARGE | {"--transformer-impl": "local"})
    total = row_of(plan_experts(local, grouped=True), 8, "mxfp8_2d")["total_bytes_per_rank"]
    for gpu_memory, said in ((80, "It fits 80 GiB and leaves"), (1, "It does not fit 1 GiB:")):
        left = spell_bytes(abs(gpu_memory * 2**30 - total))
        assert f"{said} {left}" in advice(local, gpu_memory=gpu_memory, gpus=8, format="mxfp8")


# Steps


@EVERY_FORMAT
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_step_moves_what_the_benchmark_holds_it_against(name, moments):
    """Of the rank with most masters; both count by one function."""
    case = Case(format=FORMATS[name], shape_set="small", shard=1, device="cpu")
    job = requantize._step(case, None, moments)
    flags = {"use_precision_aware_optimizer": True}
    flags |= {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    row = row_of(experts_of(**flags), 7, name)
    most = row["parts"]["masters"] // 4
    assert row["update_bytes_per_rank"] == round(job.floor_bytes / sum(case.owned) * most)
    assert row["step_bytes_per_parameter"] == float(job.floor_bytes / sum(case.owned))
    norm = requantize._norm(case, None)
    assert row["norm_bytes_per_rank"] == norm.floor_bytes / sum(case.owned) * most


def test_floors_of_measured_steps_are_those_of_a_plan():
    """The bytes of the file, at the speed of its copies."""
    report = json.loads((ROOT / "recipes" / "results" / "requantize-h200.json").read_text())
    measured = {
        (row["format"], row["work"]): row
        for row in report["rows"]
        if row["shard"] == "1/1" and row["shape_set"] == "w1, 8 layers"
    }
    speed = report["copy_tb_per_s"]
    for name in FORMATS:
        (row,) = [
            row
            for row in plan_rows(experts_of(), [1], memory_tb_per_s=speed)
            if row["format"] == name
        ]
        most = row["parts"]["masters"] // 4
        step = measured[name, "step to wire planes, fp32 moments"]
        norm = measured[name, "gradient norm"]
        per_parameter = (step["floor_ms"] + norm["floor_ms"]) / step["parameters"]
        assert row["step_floor_ms"] == pytest.approx(per_parameter * most, rel=1e-3)


def test_gradients_in_bf16_are_read_in_half_the_bytes():
    wide, narrow = (
        row_of(experts_of(grad_reduce_in_bf16=flag), 2, "mxfp8") for flag in (None, True)
    )
    most = wide["parts"]["masters"] // 4
    assert (wide["norm_bytes_per_rank"], narrow["norm_bytes_per_rank"]) == (4 * most, 2 * most)
    assert wide["update_bytes_per_rank"] - narrow["update_bytes_per_rank"] == 2 * most


def test_of_megatrons_own_formats_no_step_is_estimated():
    for name in STOCKS:
        row = row_of(experts_of(), 2, name)
        assert {row[figure] for figure in STEP} == {None}


NARROW = {"use_precision_aware_optimizer": True}
STOCKS_STEPS = {  # knobs, flags -> why the step is stock's
    "asked for": ({"step": "stock"}, {}, "step: stock"),
    "stock's layout": ({"layout": "stock"}, {}, "layout: stock"),
    "no kernels": ({"backend": "reference"}, {}, "backend: reference"),
    "fused in stock's layout": ({"layout": "stock", "step": "fused"}, {}, None),
    "moments in fp16": (
        {},
        NARROW | {"exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16"},
        "moments in torch.float16 and torch.float16 (--exp-avg-dtype, --exp-avg-sq-dtype)",
    ),
    "moments that differ": (
        {},
        NARROW | {"exp_avg_dtype": "bf16"},
        "moments in torch.bfloat16 and torch.float32 (--exp-avg-dtype, --exp-avg-sq-dtype)",
    ),
    "a loss scale": ({}, {"loss_scale": 128}, "a loss scale (--loss-scale, --fp16)"),
    "nothing": ({}, {}, None),
}


@pytest.mark.parametrize(("knobs", "flags", "reason"), STOCKS_STEPS.values(), ids=STOCKS_STEPS)
def test_a_step_that_is_stocks_is_not_estimated_and_the_reason_is_said(
    knobs, flags, reason, recipe, capsys
):
    config, experts = MoEOptimConfig(**knobs), experts_of(**flags)
    setup = Setup(config=config, optimizer=experts, masters_of_adam=False)
    assert why_stock_step(setup) == reason
    sets = [word for knob in knobs.items() for word in ("--set", "moe_optim.{}={}".format(*knob))]
    passed = argv({f"--{name.replace('_', '-')}": value for name, value in flags.items()})
    command = ["plan", str(recipe), "--gpus", "2", "--details", *sets, "--", *passed]
    assert cli.main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ("step: fused" if reason is None else f"step: stock, not estimated: {reason}") in text
    assert ("B/param" in text) is (reason is None)


@pytest.mark.parametrize("speed", ["0", "-1", "fast", "inf", "nan"])
@pytest.mark.parametrize("option", ["--bandwidth", "--memory-bandwidth", "--gpu-memory"])
def test_speeds_and_memory_are_positive_numbers(option, speed, recipe, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", str(recipe), option, speed])
    assert f"{option}: expected a number above 0, got '{speed}'" in capsys.readouterr().err


@EVERY_FORMAT
def test_blocks_lie_on_one_rank_where_the_path_says_aligned(name):
    """Each rank an expert and more: no maxima but those of experts. A hundred ranks cut blocks."""
    few, many = (row_of(experts_of(), gpus, name) for gpus in (2, 96))
    assert (few["path"], many["path"]) == ("aligned", "partial amax")
    assert (few["exchanged_maxima"] > 0) <= FORMATS[name].has_global_amax
    assert many["exchanged_maxima"] > 0


def test_quantized_bytes_follow_the_format_and_more_ranks_hold_less():
    experts = experts_of(LARGE)
    gpus = [8, 16, 64, 256]
    rows = list(plan_rows(experts, gpus))
    for count in gpus:
        gathered = {r["format"]: r["gathered_bytes_per_step"] for r in rows if r["gpus"] == count}
        numel = gathered[STOCK_BF16] // 2
        for name, format in FORMATS.items():
            amaxes = 4 * experts.num_experts if format.has_global_amax else 0
            expected = numel * format.gathered_bytes_per_element + amaxes
            assert gathered[name] == pytest.approx(float(expected), rel=0.01)
    for name in ROWS:
        resident = [r["total_bytes_per_rank"] for r in rows if r["format"] == name]
        assert sorted(resident, reverse=True) == resident
        assert len(set(resident)) == len(resident)


def test_a_hundred_thousand_gpus_can_be_planned():
    rows = list(plan_rows(experts_of(LARGE), [100_000]))
    assert [row["expert_data_parallel_size"] for row in rows] == [12_500] * len(ROWS)
    used = 4 * 16 * 3 * 2048 * 768
    for row in rows:
        assert row["parts"]["masters"] >= 4 * used / 12_500
        assert row["shard_imbalance"] >= 1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("size", [None, 12_345])
@pytest.mark.parametrize("dp_size", [2, 40, 42, 12_500])
def test_buckets_are_as_large_as_megatrons_training_makes_them(monkeypatch, dp_size, size, overlap):
    """``dp_size`` ranks hold the same dense weights, those of one context-parallel group too."""
    monkeypatch.setattr(training, "get_pg_size", lambda group: group)
    config = SimpleNamespace(num_buckets=None, bucket_size=size)
    expected = training.resolve_ddp_bucket_size(config, dp_size, overlap, 0)
    seen = []
    lay_buckets = planned_experts.lay_buckets

    def note(params, bucket_numel, divisor):
        seen.append(bucket_numel)
        return lay_buckets(params, bucket_numel, divisor)

    monkeypatch.setattr(planned_experts, "lay_buckets", note)
    flags = {"ddp_bucket_size": size, "overlap_grad_reduce": overlap or None}
    parallel = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    experts_of(**parallel, **flags).buckets(2 * dp_size)
    assert seen == [expected]


def test_the_ranks_of_an_expert_follow_from_the_parallel_sizes():
    """32 GPUs, two stages: experts over 4 and cut in 2, so that 2 ranks share each."""
    experts = experts_of(
        num_layers=4,
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=2,
    )
    assert experts.expert_dp_size(32) == 2
    assert [shape for _, shape in experts.weights] == [(1, FFN, HIDDEN), (1, HIDDEN, FFN // 2)]


def test_experts_are_cut_as_dense_weights_are_unless_flags_say_otherwise():
    experts = experts_of(tensor_model_parallel_size=2)
    assert (experts.expert_dp_size(8), experts.weights[0][1]) == (4, (EXPERTS, FFN, HIDDEN))


def test_each_optimizer_instance_has_its_own_copy_of_the_masters():
    one, two = (experts_of(num_distributed_optimizer_instances=n) for n in (1, 2))
    assert (one.expert_dp_size(8), two.expert_dp_size(8)) == (8, 4)
    assert row_of(two, 8, "mxfp8")["parts"] == row_of(one, 4, "mxfp8")["parts"]


STAGES = {  # flags -> planned stage, MoE layers of its chunks
    "one stage": ({}, 0, (8,)),
    "every second layer": ({"moe_layer_freq": 2}, 0, (4,)),
    "equal stages": ({"pipeline_model_parallel_size": 2}, 0, (4,)),
    "dense layers at the front": (
        {"pipeline_model_parallel_size": 4, "moe_layer_freq": "([0]*3+[1]*5)"},
        2,
        (2,),
    ),
    "a short first stage": (
        {"pipeline_model_parallel_size": 3, "decoder_first_pipeline_num_layers": 2},
        1,
        (3,),
    ),
    "virtual stages": (
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
        0,
        (2, 2),
    ),
    "virtual stages by their layers": (
        {
            "pipeline_model_parallel_size": 2,
            "num_layers_per_virtual_pipeline_stage": 1,
            "moe_layer_freq": "([0]*1+[1]*7)",
        },
        1,
        (1, 1, 1, 1),
    ),
    "a stage with the embedding": (
        {
            "num_layers": 7,
            "pipeline_model_parallel_size": 2,
            "account_for_embedding_in_pipeline_split": True,
        },
        1,
        (4,),
    ),
    "a layer for a further token": (
        {"pipeline_model_parallel_size": 2, "mtp_num_layers": 1},
        1,
        (5,),
    ),
    "a layout": (  # the first layer has no experts, that for a further token is as the last
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "Ett|tt|tt|ttmL",
            "mtp_num_layers": 1,
            "moe_layer_freq": "([0]*1+[1]*7)",
        },
        1,
        (2, 3),
    ),
}


@pytest.mark.parametrize(("flags", "stage", "chunks"), STAGES.values(), ids=STAGES)
def test_the_stage_with_most_experts_is_planned(flags, stage, chunks):
    experts = experts_of(**({"num_layers": 8} | flags))
    assert (experts.stage, experts.chunks) == (stage, chunks)


def test_only_the_first_chunk_of_the_first_stage_has_several_buckets():
    pipeline = {"num_layers": 8, "pipeline_model_parallel_size": 2}
    first = experts_of(**pipeline)
    assert first.buckets(2).total() == 4  # one a layer
    chunks = experts_of(**pipeline, num_virtual_stages_per_pipeline_rank=2)
    assert chunks.buckets(2).total() == 2 + 1
    second = experts_of(**pipeline, moe_layer_freq="([0]*1+[1]*7)")
    assert second.buckets(2).total() == 1


REFUSED = {  # changes -> error, what it names
    "no experts": ({"num_experts": None}, ConfigError, "expected --num-experts, got none"),
    "no width": ({"moe_ffn_hidden_size": None}, ConfigError, "expected --moe-ffn-hidden-size"),
    "no layers": ({"num_layers": None}, ConfigError, "expected --num-layers, got none"),
    "no hidden size": ({"hidden_size": None}, ConfigError, "expected --hidden-size, got none"),
    "no gate": ({"swiglu": None}, ConfigError, "expected --swiglu or --quick-geglu"),
    "no bf16": ({"bf16": None}, ConfigError, "expected --bf16"),
    "experts that do not divide": (
        {"expert_model_parallel_size": 3},
        ConfigError,
        "expected --expert-model-parallel-size to divide --num-experts 4, got 3",
    ),
    "rows that do not divide": (
        {"expert_tensor_parallel_size": 5},
        ConfigError,
        "expected --expert-tensor-parallel-size to divide --moe-ffn-hidden-size 96, got 5",
    ),
    "layers that do not divide": (
        {"pipeline_model_parallel_size": 2},
        ConfigError,
        "--pipeline-model-parallel-size 2: expected stages .* --num-layers 3",
    ),
    "a size below one": (
        {"tensor_model_parallel_size": 0},
        ConfigError,
        "--tensor-model-parallel-size: expected 1 or more, got 0",
    ),
    "virtual stages of one": (
        {"num_virtual_stages_per_pipeline_rank": 3},
        ConfigError,
        "--num-virtual-stages-per-pipeline-rank: expected --pipeline-model-parallel-size above 1",
    ),
    "a pattern of another length": (
        {"moe_layer_freq": "([1]*4)"},
        ConfigError,
        "--moe-layer-freq: expected a pattern of --num-layers 3, got 4",
    ),
    "no layer with experts": (
        {"moe_layer_freq": "([0]*3)"},
        ConfigError,
        "--moe-layer-freq: expected a layer with experts",
    ),
    "a flag Megatron does not know": (
        {"num_expert": 4},
        ConfigError,
        "unrecognized arguments: --num-expert",
    ),
    "other optimizers": ({"optimizer": "sgd"}, ConfigError, "--optimizer sgd"),
    "a layout of other layers": (
        {"pipeline_model_parallel_layout": "Ett|L", "pipeline_model_parallel_size": 2},
        ConfigError,
        r"-layout Ett.L: expected one that Megatron takes, got t \(decoder layer\) 2 times, not 3",
    ),
    "a shape no block fits": (
        {"moe_ffn_hidden_size": 100},
        LayoutError,
        r"experts.linear_fc2.weight: mxfp8 needs rows .* by 32, got \[128, 100\]",
    ),
}


HUGE = 999_999_999_999_999_999_999
REFUSED |= {
    "layers without end": (
        {"num_layers": 100_000_000},
        ConfigError,
        "--num-layers: expected at most 4,096, got 100000000",
    ),
    "experts that no machine word counts": (
        {"num_experts": HUGE},
        ConfigError,
        f"--num-experts: expected at most 1,048,576, got {HUGE}",
    ),
    "experts of all layers": (
        {"num_layers": 4096, "num_experts": 512},
        ConfigError,
        "--num-layers 4096 with --num-experts 512: expected at most 1,048,576 experts in all",
    ),
    "a width beyond machine words": (
        {"moe_ffn_hidden_size": 2**62},
        ConfigError,
        f"--moe-ffn-hidden-size: expected at most 262,144, got {2**62}",
    ),
    "ranks of a stage": (
        {"context_parallel_size": HUGE},
        ConfigError,
        f"--context-parallel-size: expected at most 1,048,576, got {HUGE}",
    ),
    "negative layers of further tokens": (
        {"mtp_num_layers": -1},
        ConfigError,
        "--mtp-num-layers: expected 0 or more, got -1",
    ),
    "a pattern without end": (
        {"moe_layer_freq": f"[1]*{HUGE}"},
        ConfigError,
        "--moe-layer-freq: expected a pattern of --num-layers 3, got more than 4,096",
    ),
    "a pattern of other numbers": (
        {"moe_layer_freq": "[1,2,0]"},
        ConfigError,
        "--moe-layer-freq: expected zeros and ones, got 2",
    ),
    "a pattern of patterns": (
        {"moe_layer_freq": "[[1],1,0]"},
        ConfigError,
        r"--moe-layer-freq: expected zeros and ones, got \[1\]",
    ),
    "brackets that stay open": (
        {"moe_layer_freq": "[["},
        ConfigError,
        r"expected values that Megatron takes, got: '\[' was never closed",
    ),
    "brackets in brackets": (
        {"moe_layer_freq": 500 * "["},
        ConfigError,
        "expected values that Megatron takes, got: too many nested parentheses",
    ),
    "a layout without end": (
        {"pipeline_model_parallel_layout": f"E(t|)*{HUGE}L"},
        ConfigError,
        "--pipeline-model-parallel-layout E.*: expected at most 65,536 letters",
    ),
    "a layout of long numbers": (
        {"pipeline_model_parallel_layout": f"Et*{'9' * 5000}L"},
        ConfigError,
        "--pipeline-model-parallel-layout E.*: expected at most 65,536 letters",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_planned_is_named(changes, error, message):
    with pytest.raises(error, match=message):
        list(plan_rows(experts_of(**changes), [1]))


@pytest.mark.parametrize("gpus", [0, -8, 4, 12])
def test_gpus_that_cannot_be_cut_are_refused_with_the_multiple_they_need(gpus):
    experts = experts_of(
        tensor_model_parallel_size=2, expert_model_parallel_size=4, context_parallel_size=2
    )
    with pytest.raises(ConfigError, match=rf"--gpus: expected multiples of 8, .* got {gpus}\."):
        experts.buckets(gpus)


GLOBAL_BATCH = 64
DEFAULTS = {  # flags, ranks of the recipe -> numbers planned
    "until a rank has one micro-batch": (
        {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": 4},
        2,
        [1, 2, 4, 16],
    ),
    "no batch is named": ({}, 1, [1, 4, 16, 64, 256]),
    "ranks that do not fit are left out": (
        {"tensor_model_parallel_size": 2, "global_batch_size": 4, "micro_batch_size": 1},
        3,
        [2, 8],
    ),
    "a batch for less than the model": (
        {"expert_model_parallel_size": 4, "global_batch_size": 1, "micro_batch_size": 1},
        1,
        [4],
    ),
}


@pytest.mark.parametrize(("flags", "ranks", "expected"), DEFAULTS.values(), ids=DEFAULTS)
def test_numbers_of_gpus_by_default(flags, ranks, expected):
    assert sorted(set(default_gpus(experts_of(**flags), ranks))) == expected


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.yaml"
    flags = "".join(
        f"  {flag}: {str(value).lower()}\n" for flag, value in SMALL.items() if value is not None
    )
    path.write_text(f"requires:\n  ranks: 2\nmegatron_args:\n{flags}")
    return path


def test_json_holds_every_row_with_the_same_keys(recipe, capsys):
    assert cli.main(["plan", str(recipe), "--gpus", "4", "2", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {
        "command",
        "commit",
        "planned",
        "recommended",
        "step",
        "gpu_memory_gib",
        "bandwidth_gb_per_s",
        "memory_bandwidth_tb_per_s",
        "rows",
    }
    assert (report["step"], report["bandwidth_gb_per_s"]) == ("fused", None)
    assert [(row["gpus"], row["format"]) for row in report["rows"]] == [
        (gpus, name) for gpus in (2, 4) for name in ROWS
    ]
    for row in report["rows"]:
        assert row.keys() == FIGURES
        assert row["parts"].keys() == set(PARTS)
    assert report["rows"] == list(plan_rows(experts_of(), [2, 4]))


def test_the_tables_show_the_rows_of_the_file(recipe, tmp_path, capsys):
    """What is no terminal gets one table of all columns; one rank waits for no gather."""
    path = tmp_path / "rows.json"
    words = ["--gpus", "1", "2", "96", "--bandwidth", "400", "--memory-bandwidth", "3.35"]
    words += ["--gpu-memory", "80", "--details", "--json", str(path)]
    assert cli.main(["plan", str(recipe), *words]) == 0
    text = capsys.readouterr().out
    assert "96 GPUs, expert data parallel 96, 3 buckets" in text
    shown = [line.split() for line in text.splitlines() if line.startswith(tuple(FORMATS))]
    rows = [row for row in json.loads(path.read_text())["rows"] if row["format"] in FORMATS]
    assert len(shown) == len(rows) == 12
    for words, row in zip(shown, rows, strict=True):
        left = spell_bytes(80 * 2**30 - row["total_bytes_per_rank"])
        against = row["against_stock_bytes"]
        cells = [
            row["format"],
            *(spell_bytes(row[f"{part}_bytes_per_rank"]) for part in MEMORY),
            spell_difference(row["against_stock_bf16_bytes"]),
            "-" if against is None else spell_difference(against),
            f"yes, {left}",
            spell_bytes(row["gathered_bytes_per_step"]),
            f"{row['gathered_bytes_per_step'] / bf16_of(row, path):.2f}",
            "none" if row["gpus"] == 1 else f"{row['gather_ms']:.3f} ms",
            str(row["launches_per_step"]),
            f"{row['padding_fraction']:.2%}",
            f"{row['shard_imbalance']:.3f}",
            row["path"],
            spell_count(row["exchanged_maxima"]),
            *(spell_bytes(row[f"{part}_bytes_per_rank"]) for part in ("norm", "update")),
            f"{row['step_bytes_per_parameter']:.2f}",
            f"{row['step_floor_ms']:.3f} ms",
        ]
        assert words == " ".join(cells).split()


MEMORY = ("weight", "gradient", "optimizer", "total")


def bf16_of(row, path):
    (found,) = [
        one["gathered_bytes_per_step"]
        for one in json.loads(path.read_text())["rows"]
        if (one["format"], one["gpus"]) == (STOCK_BF16, row["gpus"])
    ]
    return found


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (0.0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1008 * 2**10, "0.98 MiB"),
        (999.7 * 2**10, "0.98 MiB"),
        (1023 * 2**20, "1.00 GiB"),
        (3 * 2**30, "3.00 GiB"),
        (2**50, "1.00 PiB"),
    ],
)
def test_bytes_are_spelled_with_three_digits(count, text):
    assert spell_bytes(count) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999_999, "999,999"),
        (40_354_816, "40.4M"),
        (322_920_960, "323M"),
        (1_234_567_890, "1,235M"),
    ],
)
def test_large_numbers_of_maxima_are_short(number, text):
    assert spell_count(number) == text


def test_flags_after_two_dashes_win_over_the_recipe_and_set_changes_it(recipe, capsys):
    words = ["--gpus", "2", "--set", "moe_optim.expert_layout=indexed", "--json"]
    assert cli.main(["plan", str(recipe), *words, "--", "--num-experts", "8"]) == 0
    report = json.loads(capsys.readouterr().out)
    expected = experts_of(num_experts=8, grouped=False)
    assert report["rows"] == list(plan_rows(expected, [2]))
    assert "8 experts a rank of [192, 128] and [128, 96], indexed" in report["planned"]


MAGIC = {"png": b"\x89PNG", "jpg": b"\xff\xd8\xff", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("kind", MAGIC)
def test_a_picture_is_what_its_name_says_even_of_one_number(kind, recipe, tmp_path):
    for name, gpus in (("one", ["2"]), ("several", ["1", "2", "8"])):
        path = tmp_path / f"{name}.{kind}"
        command = ["plan", str(recipe), "--gpus", *gpus, "--gpu-memory", "80", "--out", str(path)]
        assert cli.main(command) == 0
        assert path.read_bytes().startswith(MAGIC[kind])


def test_labels_that_would_touch_are_spread_and_keep_their_order():
    assert spread({"a": 1.0, "b": 5.0}, 0.5) == {"a": 1.0, "b": 5.0}
    assert spread({"b": 3.0, "a": 3.0, "c": 4.0}, 1.0) == pytest.approx(
        {"b": 7 / 3, "a": 10 / 3, "c": 13 / 3}
    )
    assert min(spread({"a": 0.0, "b": 0.0}, 1.0).values()) == 0


@pytest.mark.parametrize("option", ["--out", "--json"])
def test_a_file_that_cannot_be_written_is_named(recipe, tmp_path, capsys, option):
    path = tmp_path / "nowhere" / "file.png"
    assert cli.main(["plan", str(recipe), "--gpus", "2", option, str(path)]) == cli.BAD_INPUT
    assert f"{path}: expected a file to write" in capsys.readouterr().err


def test_fewer_than_one_gpu_are_refused_as_such(recipe, capsys):
    """They are multiples of everything, so that it is not the multiple that is wrong."""
    for number in ("0", "-8"):
        assert cli.main(["plan", str(recipe), "--gpus", "2", number]) == cli.BAD_INPUT
        said = f"error: --gpus: expected 1 or more, got {number}.\n"
        assert capsys.readouterr().err == said


def test_more_gpus_than_there_are_are_refused(recipe, capsys):
    """Whether they are given, or follow from parallel sizes."""
    sizes = ("--context-parallel-size", "1048576", "--pipeline-model-parallel-size", "3")
    for words in (["--gpus", str(HUGE)], ["--gpus", str(2**20 + 1)], ["--", *sizes]):
        assert cli.main(["plan", str(recipe), *words]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: --gpus: expected at most 1,048,576, got "), said


def test_an_error_is_one_line(recipe, capsys):
    assert cli.main(["plan", str(recipe), "--gpus", "2", "--", "--num-experts", "0"]) == 2
    assert capsys.readouterr().err == (
        f"error: {recipe}: megatron_args: expected --num-experts, got none. Add it to the recipe, "
        "or after `--`.\n"
    )
