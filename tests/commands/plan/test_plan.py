"""A plan costs what the real thing costs: buffers of ranks that are built."""

import json
import shlex
from math import prod
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import bucket_end_divisor, pad_to_divisor
from megatron.training import training

from moe_optim.buckets.buffer import AlignedDistributedOptimizer
from moe_optim.buckets.layout import Slot
from moe_optim.buckets.states import Event
from moe_optim.commands.cli import main as cli
from moe_optim.commands.plan.answers import (
    explain,
    find_choice,
    flags_to_add,
    recommend,
)
from moe_optim.commands.plan.costs import (
    OPTIMIZER,
    PARTS,
    ROWS,
    STOCK_BF16,
    STOCK_FP8_BLOCK,
    STOCK_MXFP8,
    STOCK_NVFP4,
    copy_bytes,
    left_out,
)
from moe_optim.commands.plan.experts import plan_experts
from moe_optim.commands.plan.gpus import GPUS, Hardware
from moe_optim.commands.plan.report import default_gpus
from moe_optim.commands.plan.rows import plan_rows
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import DIRECTIONS, FORMATS
from moe_optim.integration.arguments import config_from_argv
from moe_optim.integration.argv import spell_format
from moe_optim.rules import config_with_flags
from moe_optim.weights.storage import PortableStorage
from tests.support.formats import REPRESENTATIVE_FORMATS
from tests.support.states.buckets import make_bucket, own_masters

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
    "--sequence-parallel": True,
    "--transformer-impl": "local",
}
LARGE = SMALL | {
    "--num-layers": 4,
    "--hidden-size": 2048,
    "--moe-ffn-hidden-size": 768,
    "--num-experts": 128,
    "--ddp-bucket-size": None,
    "--expert-model-parallel-size": 8,
}
AWARE = {"use_precision_aware_optimizer": True}
TE = {"transformer_impl": "transformer_engine"}
LOCAL_FLAGS = {"--transformer-impl": "local"}
TE_FLAGS = {"--transformer-impl": "transformer_engine"}
NATIVE = TE | {"fp8_recipe": "mxfp8", "fp8_param_gather": True}
DDP_CONFIG = SimpleNamespace(pad_buckets_for_high_nccl_busbw=False)


def argv(flags):
    words = []
    for flag, value in flags.items():
        words += [] if value is None else [flag] if value is True else [flag, str(value)]
    return words


def experts_of(flags=SMALL, *, grouped=True, **changes):
    changed = {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return plan_experts(argv(flags | changed), grouped=grouped)


def rows_of(experts, gpus, **options):
    return {row["format"]: row for row in plan_rows(experts, [gpus], **options)}


def row_of(experts, gpus, name):
    return rows_of(experts, gpus)[name]


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
            sum(buffer.nbytes for buffer in gather.sliced)
            + sum(values.nbytes for values in gather.reduced)
            for gather in self.gathers
        )

    def maxima(self):
        exchanges = [gather.exchange for gather in self.gathers]
        return sum(0 if exchange is None else exchange.numel() for exchange in exchanges)


PLANNED = [name for name in ROWS if name != "int4_g128"]
"""Formats of weights whose rows are 128 and 96 elements long."""
OURS = [name for name in PLANNED if name in FORMATS]


@pytest.mark.parametrize(
    ("name", "expert_layout"),
    [*((name, "grouped") for name in REPRESENTATIVE_FORMATS), ("mxfp8", "indexed")],
)
def test_a_plan_is_what_ranks_that_are_built_hold_and_gather(name, expert_layout):
    """Down to ranks that own a part of one expert."""
    for dp_size in (1, 7):
        ranks = [RealRank(name, expert_layout, rank, dp_size) for rank in range(dp_size)]
        row = row_of(experts_of(grouped=expert_layout == "grouped"), dp_size, name)
        assert row["gathered_bytes_per_step"] == ranks[0].gathered()
        assert row["buckets"] == len(ranks[0].gathers) > 1
        most = max(rank.owned for rank in ranks)
        total = sum(rank.owned for rank in ranks)
        assert total == LAYERS * EXPERTS * 3 * HIDDEN * FFN
        resident = ranks[0].buffer_bytes() + 4 * ranks[0].maxima() + 4 * ranks[0].numel + 12 * most
        assert row["total_bytes_per_rank"] == resident
        assert row["shard_imbalance"] == pytest.approx(most * dp_size / total, rel=1e-15)
        assert row["padding_fraction"] == (ranks[0].numel - total) / ranks[0].numel


def test_parts_are_the_buffers_by_name_and_add_up():
    """At one rank nothing is padded: the buffers are those that the format describes."""
    rows, numel = rows_of(experts_of(ddp_bucket_size=1), 1), LAYERS * EXPERTS * 3 * HIDDEN * FFN
    for name in OURS:
        row, format = rows[name], FORMATS[name]
        parts = row["parts"]
        assert set(parts) == set(PARTS)
        assert sum(parts.values()) == row["total_bytes_per_rank"]
        params = RealRank(name, "grouped", 0, 1).params
        for buffer in ("rowwise_data", "rowwise_scale", "columnwise_scale", "global_amax"):
            buffers = [p.quantized_storage.quantized.buffers().get(buffer) for p in params]
            assert parts[buffer] == sum(0 if p is None else p.nbytes for p in buffers)
        copies = 0 if format.is_row_only or format.columnwise_copy == "shared" else 1
        assert parts["columnwise_data"] == copies * parts["rowwise_data"]
        assert (parts["gradients"], parts["masters"]) == (4 * numel, 4 * numel)
        assert (parts["moments"], parts["parameter_buffer"], parts["exchange"]) == (8 * numel, 0, 0)


def test_gradients_moments_and_masters_have_the_dtypes_of_the_flags():
    """A precision-aware Adam keeps two bytes of the master of a bf16 weight, and of no other."""
    plain = {row["format"]: row["parts"] for row in plan_rows(experts_of(), [2])}
    narrow = AWARE | {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16"}
    for flags, part, share in (
        ({"grad_reduce_in_bf16": True}, "gradients", 1 / 2),
        (AWARE | {"main_grads_dtype": "bf16"}, "gradients", 1 / 2),
        (AWARE | {"main_grads_dtype": "fp32"}, "gradients", 1),
        (narrow, "moments", 3 / 8),
    ):
        row = row_of(experts_of(**flags), 2, "mxfp8")
        assert row["parts"][part] == share * plain["mxfp8"][part]
    for dtype in ("fp32", "fp16"):
        for flags in (AWARE, AWARE | NATIVE):
            for row in plan_rows(experts_of(**flags, main_params_dtype=dtype), [2]):
                share = 0.5 if row["format"] == STOCK_BF16 else 1
                assert row["parts"]["masters"] == share * plain[row["format"]]["masters"]


@pytest.mark.parametrize("busbw", [None, True])
def test_stock_rows_are_megatrons_own_layout(busbw):
    """NVFP4's packed buffer is padded once more, in bytes, by the rules of unpacked ones."""
    shapes = [(EXPERTS, 2 * FFN, HIDDEN), (EXPERTS, HIDDEN, FFN)] * LAYERS
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    config = SimpleNamespace(pad_buckets_for_high_nccl_busbw=bool(busbw))
    experts = experts_of(ddp_pad_buckets_for_high_nccl_busbw=busbw)
    apart = experts_of(ddp_pad_buckets_for_high_nccl_busbw=busbw, ddp_bucket_size=1)
    linears = [prod(shape) for shape in shapes]
    for dp_size in (1, 7, 24):
        layout = DistributedOptimizer._compute_per_buffer_param_layout(
            params, BUCKET_SIZE, dp_size, config
        )
        numel = layout.bucket_indices[-1][1]
        for name in (STOCK_MXFP8, STOCK_BF16):
            row = row_of(experts, dp_size, name)
            assert row["padding_fraction"] == (numel - sum(linears)) / numel
            assert row["buckets"] == len(layout.bucket_indices)
            assert row["gathered_bytes_per_step"] == 2 * numel
            assert row["parts"]["gradients"] == 4 * numel
        assert row_of(experts, dp_size, STOCK_BF16)["parts"]["parameter_buffer"] == 2 * numel
        divisor = bucket_end_divisor(dp_size, bool(busbw))
        for name, per_byte in ((STOCK_FP8_BLOCK, 1), (STOCK_NVFP4, 2)):
            row = row_of(apart, dp_size, name)
            gathered = sum(pad_to_divisor(numel // per_byte, divisor) for numel in linears)
            assert row["gathered_bytes_per_step"] == row["parts"]["parameter_buffer"] == gathered
            assert row["parts"]["columnwise_data"] == sum(linears) // per_byte
            assert row["parts"]["rowwise_data"] == 0


def test_stock_mxfp8_quantizes_expert_by_expert_into_padded_storage():
    """Rows of scales are padded to 128 and columns to 4: [192, 4] and [8, 128], [128, 4] twice."""
    row, experts = row_of(experts_of(), 1, STOCK_MXFP8), LAYERS * EXPERTS
    data, rowwise, columnwise = 3 * HIDDEN * FFN, 256 * 4 + 128 * 4, 8 * 128 + 4 * 128
    sizes = [row["parts"][buffer] / experts for buffer in PARTS[:4]]
    assert sizes == [data, rowwise, data, columnwise]


def test_weights_of_transformer_engine_have_padded_scales_besides_the_buffers():
    """And columnwise scales of 2-D blocks are a view of rowwise ones."""
    planned = [rows_of(experts_of(**flags), 1) for flags in ({}, NATIVE)]
    for name, format in FORMATS.items():
        if format.is_row_only:
            continue
        portable, native = (rows[name]["parts"] for rows in planned)
        padded = sum(
            LAYERS * EXPERTS * prod(format.storage_scale_shape(rows, cols, way))
            for rows, cols in ((2 * FFN, HIDDEN), (HIDDEN, FFN))
            for way in DIRECTIONS
        )
        assert native["storage_scales"] == padded * format.scale_dtype.itemsize
        assert (portable["storage_scales"], native["columnwise_scale"] == 0) == (0, format.is_2d)
        same = set(PARTS) - {"storage_scales", "columnwise_scale"}
        assert {part: portable[part] for part in same} == {part: native[part] for part in same}


def test_states_on_the_host_take_no_memory_of_the_device():
    """Of our rows by the knob, of bf16 weights by Megatron's flag; no time of a step is known."""
    without = list(plan_rows(experts_of(), [2]))
    on_host = AWARE | {"optimizer_cpu_offload": True}
    for flags, knob, ours, stocks in (
        ({}, 0.25, 0.75, 1),
        ({}, 1, 0, 1),
        (on_host | {"optimizer_offload_fraction": 0.25}, 0, 0.75, 0.75),
        (on_host | {"optimizer_offload_fraction": 1.5}, 0, 0, 0),
    ):
        experts = experts_of(**flags)
        config = config_with_flags(MoEOptimConfig(offload_states=knob), experts.optimizer)
        assert config.offload_states == 1 - ours
        rows = plan_rows(experts, [2], config, Hardware(memory_tb_per_s=3.0))
        for row, whole in zip(rows, without, strict=True):
            is_ours = row["format"] in FORMATS
            left = ours if is_ours else stocks if row["format"] == STOCK_BF16 else 1
            for name in OPTIMIZER:
                assert row["parts"][name] == pytest.approx(left * whole["parts"][name], abs=8)
            assert not is_ours or not knob or row["step_ms"] is None


def test_formats_that_weights_do_not_fit_have_no_row_and_are_named():
    reason = "experts.linear_fc2.weight: int4_g128 needs columns divisible by 128, got [128, 96]"
    assert left_out(experts_of()) == {"int4_g128": reason}
    assert left_out(experts_of(LARGE)) == {}
    native = experts_of(LARGE, **NATIVE)
    assert left_out(native).keys() == {n for n, format in FORMATS.items() if format.is_row_only}
    for experts in (experts_of(), native):
        planned = {row["format"] for row in plan_rows(experts, [8])}
        assert planned == {*ROWS} - left_out(experts).keys()


# Answers


def choice_of(argv, *, gpus=2, gpu=None, **knobs):
    """Return the choice of formats, the recommended row, and all rows."""
    recipe = SimpleNamespace(moe_optim=MoEOptimConfig(**knobs), path="a recipe")
    experts = plan_experts(argv, grouped=True)
    rows = list(plan_rows(experts, [gpus]))
    choice = find_choice(recipe, argv, experts, gpu)
    return choice, recommend(choice, rows), rows


def advice(argv, **knobs):
    return explain(*choice_of(argv, **knobs))


@pytest.mark.parametrize(
    ("flags", "knobs", "gpu", "added"),
    [
        ({"--fp8-recipe": "blockwise", "--fp8-param-gather": True}, {}, None, ""),
        ({"--fp8-recipe": "mxfp8", "--fp8-param-gather": True}, {}, None, "format=mxfp8_2d"),
        ({"--fp4-recipe": "nvfp4", "--fp4-param-gather": True}, {}, None, ""),
        (LOCAL_FLAGS, {"format": "nvfp4", "health_interval": 10}, None, "format=nvfp4"),
        (LOCAL_FLAGS, {"format": "bf16", "compute": "int4"}, None, "format=bf16"),
        ({}, {}, "h200", "--fp8-recipe blockwise --fp8-param-gather"),
        (
            {"--fp8-recipe": "mxfp8", "--fp8-param-gather": True},
            {"format": "mxfp8"},
            "h200",
            "--fp8-recipe blockwise --fp8-param-gather --use-moe-grouped-optim",
        ),
        ({}, {}, "gb300", "--fp8-recipe mxfp8 --fp8-param-gather"),
    ],
)
def test_flags_to_add_give_the_recommended_format(flags, knobs, gpu, added):
    """Read back, they are the configuration that was planned, in the recommended format."""
    words = argv(SMALL | TE_FLAGS | flags)
    choice, best, _ = choice_of(words, gpu=gpu, **knobs)
    config = MoEOptimConfig(**knobs)
    found = flags_to_add(choice, best, config, GPUS.get(gpu))
    assert added in shlex.join(found)
    again = config_from_argv(found)
    assert spell_format(again.format, [*words, *found]) == (
        best["format"] if best else {None: "bf16", "h200": "fp8_block", "gb300": "mxfp8"}[gpu]
    )
    for knob in knobs.keys() - {"format"}:
        assert getattr(again, knob) == knobs[knob]


@pytest.mark.parametrize("compute", ["int4", "mxfp8", "int8_per_expert"])
def test_copies_of_compute_are_what_its_modules_hold(compute):
    """Portable experts keep quantized bytes of every linear, and one linear's values for a GEMM."""
    config = MoEOptimConfig(format="bf16", compute=compute)
    rows = rows_of(experts_of(), 2, config=config)
    copies = rows["bf16"]["parts"]["compute_copies"]
    totals = [rows[name]["total_bytes_per_rank"] for name in ("bf16", STOCK_BF16)]
    assert totals[0] - totals[1] == copies
    shapes = [(EXPERTS, 2 * FFN, HIDDEN), (EXPERTS, HIDDEN, FFN)]
    held = 0
    if compute in FORMATS:
        storages = [PortableStorage(FORMATS[compute], shape, name="weight") for shape in shapes]
        buffers = [b for one in storages for b in one.quantized.buffers().values()]
        held = LAYERS * sum(buffer.nbytes for buffer in buffers)
    assert copies == held + 2 * max(map(prod, shapes))
    # Those of Transformer Engine keep values of all layers while a step runs
    values, of_te = 2 * LAYERS * sum(map(prod, shapes)), copy_bytes(experts_of(**TE), compute)
    assert of_te > values if compute == "mxfp8" else of_te == values


# Ranks, stages and buckets


def test_buckets_are_as_large_as_megatrons_training_makes_them(monkeypatch):
    """``dp_size`` ranks hold the same dense weights, those of one context-parallel group too."""
    monkeypatch.setattr(training, "get_pg_size", lambda group: group)
    parallel = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    for dp_size in (2, 42, 12_500):
        for size, overlap in ((None, True), (12_345, True), (None, None), (12_345, None)):
            flags = {"ddp_bucket_size": size, "overlap_grad_reduce": overlap}
            ((_, found),) = experts_of(**parallel, **flags)._chunks(2 * dp_size)
            config = SimpleNamespace(num_buckets=None, bucket_size=size)
            assert found == training.resolve_ddp_bucket_size(config, dp_size, bool(overlap), 0)


def test_the_stage_with_most_experts_is_planned():
    """Only the first chunk of the first stage has several buckets."""
    two = {"pipeline_model_parallel_size": 2}
    for flags, stage, chunks, buckets in (
        ({}, 0, (8,), 8),
        (two, 0, (4,), 4),
        (two | {"moe_layer_freq": "([0]*1+[1]*7)"}, 1, (4,), 1),
        (two | {"num_virtual_stages_per_pipeline_rank": 2}, 0, (2, 2), 2 + 1),
        (two | {"num_layers_per_virtual_pipeline_stage": 1}, 0, (1, 1, 1, 1), 1 + 3),
        (two | {"mtp_num_layers": 1}, 1, (5,), 1),
    ):
        experts = experts_of(num_layers=8, **flags)
        assert (experts.stage, experts.chunks) == (stage, chunks)
        assert experts.buckets(2).total() == buckets


HUGE = 999_999_999_999_999_999_999
REFUSED = [  # changes -> message
    ({"num_experts": None}, "expected --num-experts, got none"),
    (
        {"tensor_model_parallel_size": 2, "sequence_parallel": None},
        "expected --sequence-parallel with --tensor-model-parallel-size above 1, got none",
    ),
    (
        {"pipeline_model_parallel_size": 2},
        "--pipeline-model-parallel-size 2: expected stages .* --num-layers 3",
    ),
    (
        {"pipeline_model_parallel_layout": "Ett|L", "pipeline_model_parallel_size": 2},
        r"-layout Ett.L: expected one that Megatron takes, got t \(decoder layer\) 2 times, not 3",
    ),
    (
        {"moe_layer_freq": "[[1],1,0]"},
        r"moe_layer_freq: expected a number or 3 zeros and ones, got \[\[1\], 1, 0\]",
    ),
    ({"pipeline_model_parallel_layout": f"E(t|)*{HUGE}L"}, "expected repetitions up to 999"),
]


def test_what_cannot_be_planned_is_named():
    for changes, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            list(plan_rows(experts_of(**changes), [1]))


def test_shapes_and_gpus_that_do_not_fit_are_refused():
    for format, ffn, message in (
        ("mxfp8", 100, r"a recipe: experts.linear_fc1.weight: mxfp8 needs rows .* by 32"),
        ("int4_g128", 96, r"a recipe: experts.linear_fc2.weight: int4_g128 needs columns .* 128"),
    ):
        with pytest.raises(LayoutError, match=message):
            advice([*argv(SMALL), "--moe-ffn-hidden-size", str(ffn)], format=format)
    experts = experts_of(
        tensor_model_parallel_size=2, expert_model_parallel_size=4, context_parallel_size=2
    )
    for gpus in (0, -8, 4, 12):
        with pytest.raises(ConfigError, match=rf"--gpus: expected multiples of 8, .* got {gpus}\."):
            experts.buckets(gpus)


@pytest.mark.parametrize(
    ("flags", "fitting", "unfit"),
    [
        ({"--global-batch-size": 16, "--micro-batch-size": 4}, [1, 2, 4], [3, 8]),
        ({"--global-batch-size": 12, "--micro-batch-size": 2}, [1, 2, 3, 6], [4, 12]),
        (
            {
                "--global-batch-size": 12,
                "--micro-batch-size": 2,
                "--eval-global-batch-size": 8,
                "--decrease-batch-size-if-needed": True,
            },
            [1, 2, 4],
            [3, 6],
        ),
        ({"--global-batch-size": 12}, [1, 5], []),
    ],
)
def test_gpus_that_do_not_divide_a_batch_are_refused(flags, fitting, unfit):
    experts = plan_experts(argv(SMALL | flags), grouped=True)
    for gpus in fitting:
        assert experts.expert_dp_size(gpus) == gpus
    for gpus in unfit:
        with pytest.raises(ConfigError, match=rf"^--gpus: .* got {gpus}: --(eval-)?global-batch"):
            experts.expert_dp_size(gpus)
    assert set(default_gpus(experts, 1)).isdisjoint(unfit)


def test_flags_that_keep_bf16_are_counted_as_those_that_the_plan_proposes():
    """Transformer Engine's GEMMs read padded scales, besides those that are gathered."""
    bf16, mxfp8 = (row_of(experts_of(**flags), 2, "mxfp8") for flags in (TE, NATIVE))
    assert bf16 == mxfp8


# The command


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.yaml"
    flags = "".join(f"  {flag}: {str(value).lower()}\n" for flag, value in SMALL.items())
    path.write_text(f"requires:\n  ranks: 2\nmegatron_args:\n{flags}")
    return path


def test_json_holds_every_row_with_the_same_keys(recipe, capsys):
    """Flags after two dashes win over the recipe, and --set changes it."""
    words = ["--gpus", "4", "2", "2", "--json", "--set", "moe_optim.expert_layout=indexed"]
    assert cli.main(["plan", str(recipe), *words, "--", "--num-experts", "8"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["step"] == "fused"
    assert report["not_counted"] == "--num-attention-heads is not given"
    rows = plan_rows(experts_of(num_experts=8, grouped=False), [2, 4])
    assert report["rows"] == json.loads(json.dumps(list(rows)))
    assert "8 experts per rank of [192, 128] and [128, 96], indexed" in report["planned"]
    assert len({tuple(row) for row in report["rows"]}) == 1


def test_flags_alone_are_planned_like_a_recipe_of_them(recipe, capsys):
    """The plug-in's own flags among them, as of a script; experts of Transformer Engine apart."""
    words = ["--gpus", "2", "--json", "--set", "moe_optim.format=mxfp8"]
    assert cli.main(["plan", str(recipe), *words]) == 0
    from_recipe = json.loads(capsys.readouterr().out)["rows"]
    own = ["--use-moe-grouped-optim", "--moe-optim-set", "expert_layout=grouped"]
    assert cli.main(["plan", *words, "--", *argv(SMALL), *own]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == from_recipe
    assert cli.main(["plan", "--gpus", "2", "--json", "--", *argv(SMALL | TE_FLAGS)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["planned"].endswith("indexed")
    assert report["flags"][-1] == "--use-moe-grouped-optim"
