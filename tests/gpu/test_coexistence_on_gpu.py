"""What MoE runs turn on, around Transformer Engine's experts and around the portable ones, on GPUs.

Every run is a small MoE in processes of its own, several at a time; see ``tests/support``. Reports
and logs go to ``$SIDE_RUN_LOGS/coexistence`` where that is set.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.step import DETERMINISTIC_ENVIRONMENT
from moe_optim.weights.te import recipe as quantizer
from tests.support.training_runs.observed_run import Report
from tests.support.training_runs.side_runs import EAGER, Flags, Machine, Run, missing_settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(quantizer.import_error() is not None, reason="needs Transformer Engine"),
]
ITERATIONS = 4
SMALL: Flags = {  # FP8 blocks of 128, over two micro-batches
    "--num-layers": 2,
    "--hidden-size": 512,
    "--ffn-hidden-size": 512,
    "--moe-ffn-hidden-size": 512,
    "--num-attention-heads": 4,
    "--num-experts": 8,
    "--moe-router-topk": 2,
    "--seq-length": 256,
    "--max-position-embeddings": 256,
    "--vocab-size": 1000,
    "--train-iters": ITERATIONS,
    "--eval-iters": 0,
    "--lr": "1e-3",
    "--min-lr": "1e-4",
    "--clip-grad": 0,
    "--deterministic-mode": True,
}
OVERLAP: Flags = {"--overlap-grad-reduce": True, "--overlap-param-gather": True}
SHARED: Flags = {"--moe-shared-expert-intermediate-size": 512}
SELECTIVE: Flags = {"--recompute-granularity": "selective"}
DROP_AND_PAD: Flags = {
    "--moe-expert-capacity-factor": 1.0,
    "--moe-pad-expert-input-to-capacity": True,
}
OP_FUSER: Flags = {"--use-transformer-engine-op-fuser": True}
OP_FUSER_ENVIRONMENT = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}  # Megatron asks for it on any GPU
GROUPED_ENVIRONMENT = OP_FUSER_ENVIRONMENT | {"NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"}
QUICK_GEGLU: Flags = {"--swiglu": False, "--quick-geglu": True}
BIASES: Flags = {
    "--disable-bias-linear": False,
    "--no-bias-swiglu-fusion": True,
    "--no-bias-dropout-fusion": True,
}
FUSED_GRADIENTS: Flags = {"--no-gradient-accumulation-fusion": False}
TE_GRAPHS: Flags = {"--cuda-graph-impl": "transformer_engine", "--cuda-graph-warmup-steps": 2}
LOCAL_GRAPHS: Flags = {"--cuda-graph-impl": "local", "--cuda-graph-warmup-steps": 2}


@dataclass(frozen=True)
class Case:
    """Something turned on.

    Args:
        flags: that turn it on.
        settings: what Megatron's configuration then says.
        graphs: whether layers then hold CUDA graphs.
        ranks: GPUs.
        switches: see :mod:`tests.support.training_runs.observed_run`.
        environment: that it needs.
        parameter: one that experts then have.
    """

    flags: Flags
    settings: dict[str, Any] = field(default_factory=dict)
    graphs: bool = False
    ranks: int = 1
    switches: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    parameter: str = "linear_fc1.weight0"


def graphing(flags: Flags, *modules: str) -> Case:
    """Return a case that holds ``modules`` of layers in CUDA graphs."""
    impl = flags["--cuda-graph-impl"]
    settings = {"cuda_graph_impl": impl, "cuda_graph_modules": list(modules)}
    if impl == "local" and "moe_router" in modules:  # Megatron takes them together
        settings["cuda_graph_modules"] = [*modules, "moe_preprocess"]
    return Case(flags | {"--cuda-graph-modules": list(modules)}, settings, graphs=True)


CASES = {
    "nothing": Case({}),
    "gathers and reductions overlapped": Case(
        OVERLAP, {"overlap_grad_reduce": True, "overlap_param_gather": True}
    ),
    "shared experts overlapped": Case(
        SHARED | {"--moe-shared-expert-overlap": True}, {"moe_shared_expert_overlap": True}
    ),
    "fused permutation": Case({"--moe-permute-fusion": True}, {"moe_permute_fusion": True}),
    "padded routing": Case(
        {"--moe-router-padding-for-quantization": True},
        {"moe_router_padding_for_quantization": True},
    ),
    "experts padded to a capacity": Case(DROP_AND_PAD, {"moe_expert_capacity_factor": 1.0}),
    "fused quick-GeGLU with biases": Case(  # Megatron's flags fuse it with biases only
        QUICK_GEGLU | {"--disable-bias-linear": False, "--no-bias-dropout-fusion": True},
        {"activation_func": "quick_gelu", "bias_activation_fusion": True, "add_bias_linear": True},
    ),
    "interleaved rows": Case(
        {"--moe-mlp-glu-interleave-size": 32}, {"moe_mlp_glu_interleave_size": 32}
    ),
    "biases": Case(BIASES, {"add_bias_linear": True}),
    "one bias of all experts": Case(
        BIASES | OP_FUSER | {"--moe-single-grouped-bias": True},
        {"moe_single_grouped_bias": True},
        environment=GROUPED_ENVIRONMENT,
        parameter="linear_fc1.bias",
    ),
    "one weight of all experts": Case(
        OP_FUSER | {"--moe-single-grouped-weight": True},
        {"moe_single_grouped_weight": True},
        environment=GROUPED_ENVIRONMENT,
        parameter="linear_fc1.weight",
    ),
    "layers recomputed": Case(
        {
            "--recompute-granularity": "full",
            "--recompute-method": "uniform",
            "--recompute-num-layers": 1,
        },
        {"recompute_granularity": "full"},
    ),
    "experts recomputed": Case(
        SELECTIVE | {"--recompute-modules": ["moe"]},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ),
    "op fuser": Case(
        OP_FUSER, {"use_transformer_engine_op_fuser": True}, environment=OP_FUSER_ENVIRONMENT
    ),
    "gradients accumulated by products": Case(
        FUSED_GRADIENTS, {"gradient_accumulation_fusion": True}, switches=("plain-head",)
    ),
    "weight gradients while tokens are sent back": Case(
        {"--overlap-dispatch-backward-with-experts-wgrad": True},
        {"overlap_dispatch_backward_with_experts_wgrad": True},
    ),
    "graphs up to the dispatch": graphing(TE_GRAPHS, "attn", "moe_router", "moe_preprocess"),
    "graphs with overlapped gathers": graphing(TE_GRAPHS | OVERLAP, "attn", "moe_router"),
    "graphs of experts": graphing(TE_GRAPHS | DROP_AND_PAD, "attn", "moe"),
    "Megatron's graphs of attention": graphing(LOCAL_GRAPHS, "attn"),
}
EXPERT_PARALLEL = OVERLAP | {"--expert-model-parallel-size": 2}
OVERLAPPED_SCHEDULE = EXPERT_PARALLEL | {"--overlap-moe-expert-parallel-comm": True}
ON_TWO_GPUS = {
    "two ranks": Case(OVERLAP, {"overlap_grad_reduce": True}, ranks=2),
    "delayed weight gradients": Case(
        OVERLAPPED_SCHEDULE | {"--delay-wgrad-compute": True},
        {"delay_wgrad_compute": True, "overlap_moe_expert_parallel_comm": True},
        ranks=2,
    ),
    "sequence parallelism": Case(
        OVERLAP
        | {
            "--tensor-model-parallel-size": 2,
            "--expert-model-parallel-size": 2,
            "--expert-tensor-parallel-size": 1,
            "--sequence-parallel": True,
        },
        {"sequence_parallel": True},
        ranks=2,
    ),
    "context parallelism": Case(
        OVERLAP | {"--context-parallel-size": 2}, {"context_parallel_size": 2}, ranks=2
    ),
    "context and expert parallelism": Case(
        EXPERT_PARALLEL | {"--context-parallel-size": 2},
        {"context_parallel_size": 2, "expert_model_parallel_size": 2},
        ranks=2,
    ),
}
ON_FOUR_GPUS = {
    f"expert parallel {size}": Case(
        OVERLAP
        | {"--expert-model-parallel-size": size, "--num-experts": 16}
        | {"--global-batch-size": 16},  # two micro-batches a rank
        {"expert_model_parallel_size": size},
        ranks=4,
    )
    for size in (1, 2, 4)
} | {
    "tensor, sequence and expert parallel 2": Case(
        ON_TWO_GPUS["sequence parallelism"].flags,
        {"sequence_parallel": True, "expert_model_parallel_size": 2},
        ranks=4,
    )
}
NOT_RUN_BY_STOCK = {  # case -> what stock Megatron ends with on this stack
    "one weight of all experts": r"ValueError: moe_single_grouped_weight is currently supported",
    "one bias of all experts": r"RuntimeError: Single grouped parameters require",
    "op fuser": r"RuntimeError: .*cublaslt_gemm",
    # its graphs take in the dispatcher, which waits for split sizes on the host
    "Megatron's graphs of attention": r"AcceleratorError: CUDA error",
    # gradients are NaN from the first iteration on; its handler ends here
    "weight gradients while tokens are sent back": r"TypeError: expected str, bytes or os.PathLike",
}
STOPPED_BY_NAME = {"weight gradients while tokens are sent back": "gradient norm is nan"}
"""Where stock goes on with NaN, and the plug-in does not."""


def small(case: Case, plugin: tuple[str, ...] | None, more: Flags | None = None) -> Run:
    """Return a run of the small model with something turned on."""
    return Run(
        SMALL | (more or {}) | case.flags,
        plugin=plugin,
        ranks=case.ranks,
        switches=case.switches,
        environment=case.environment,
    )


def sides_of(cases: dict[str, Case]) -> dict[str, Run]:
    """Return each case with stock Megatron and with the plug-in."""
    plugins = {"stock": None, "plugin": ("format=fp8_block",)}
    return {
        f"{name}, {side}": small(case, plugin)
        for name, case in cases.items()
        for side, plugin in plugins.items()
    }


def train(folder: Path, runs: dict[str, Run]) -> dict[str, list[Report]]:
    """Return the reports of all runs; logs are kept under ``$SIDE_RUN_LOGS``.

    Most of a run is starting it, on one core a rank; twelve contexts fit a GPU many times over.
    Where ranks share one, every reduction waits for the turn of each: the fewer the better.
    """
    logs = os.environ.get("SIDE_RUN_LOGS")
    folder = Path(logs) / "coexistence" / folder.name if logs else folder
    environment = DETERMINISTIC_ENVIRONMENT | EAGER | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    processes = max(2, min(12, (os.cpu_count() or 2) * 3 // 4))
    most_ranks = max(run.ranks for run in runs.values())
    at_a_time, timeout_s = processes // most_ranks, 150
    if "RANKS_ON_A_GPU" in os.environ:
        at_a_time, timeout_s = max(1, 4 // most_ranks), 300
    return Machine(folder, at_a_time, timeout_s, environment).train(runs)


def assert_beside_stock(case: Case, stock: list[Report], ours: list[Report]) -> None:
    """The plug-in's losses are stock's to the bit, with the case on."""
    assert [report.error for report in [*stock, *ours]] == [None] * 2 * case.ranks
    assert not missing_settings(case.settings, [*stock, *ours])
    for theirs, mine in zip(stock, ours, strict=True):
        assert theirs.experts == mine.experts == ["TEGroupedMLP"] * 2
        assert case.parameter in theirs.expert_parameters
        assert theirs.expert_parameters == mine.expert_parameters
        assert theirs.managed == 0
        assert mine.managed > 0
        assert (theirs.graphs > 0) == (mine.graphs > 0) == case.graphs
        assert len(theirs.losses) == ITERATIONS
        assert len(set(theirs.losses)) == ITERATIONS  # it learns
        assert mine.losses == theirs.losses


@pytest.fixture(scope="module")
def beside_stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Report]]:
    """Return the reports of all cases of one GPU, by case and side."""
    return train(tmp_path_factory.mktemp("one-gpu"), sides_of(CASES))


@pytest.mark.parametrize("name", CASES)
def test_training_beside_stock_gives_its_losses(beside_stock, name: str):
    """With Transformer Engine's experts, everything else in the model being Megatron's, too. What
    stock cannot run is known, and the plug-in does not run it either, for the same reason."""
    stock, ours = beside_stock[f"{name}, stock"], beside_stock[f"{name}, plugin"]
    if name not in NOT_RUN_BY_STOCK:
        assert_beside_stock(CASES[name], stock, ours)
        return
    assert re.match(NOT_RUN_BY_STOCK[name], stock[0].error)
    if name in STOPPED_BY_NAME:
        assert STOPPED_BY_NAME[name] in ours[0].error
    else:
        assert ours[0].error == stock[0].error


@pytest.fixture(scope="module")
def beside_stock_on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Report]]:
    """Return the reports of all cases of two GPUs, by case and side."""
    return train(tmp_path_factory.mktemp("two-gpus"), sides_of(ON_TWO_GPUS))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", ON_TWO_GPUS)
def test_training_on_two_gpus_beside_stock_gives_its_losses(beside_stock_on_two, name: str):
    """Where it takes more than one rank: gradients of experts delayed in the overlapped schedule,
    and sequences cut, by their own ranks or by those of tensor parallelism."""
    case, runs = ON_TWO_GPUS[name], beside_stock_on_two
    assert_beside_stock(case, runs[f"{name}, stock"], runs[f"{name}, plugin"])


@pytest.fixture(scope="module")
def beside_stock_on_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Report]]:
    """Return the reports of all cases of four GPUs, by case and side."""
    return train(tmp_path_factory.mktemp("four-gpus"), sides_of(ON_FOUR_GPUS))


@pytest.mark.four_gpus
@pytest.mark.parametrize("name", ON_FOUR_GPUS)
def test_training_on_four_gpus_beside_stock_gives_its_losses(beside_stock_on_four, name: str):
    """Experts of every rank, of two and of four of them, their optimizers' shards accordingly."""
    case, runs = ON_FOUR_GPUS[name], beside_stock_on_four
    assert_beside_stock(case, runs[f"{name}, stock"], runs[f"{name}, plugin"])


# The portable experts beside Transformer Engine's kernels

LOCAL: Flags = {
    "--transformer-impl": "local",
    "--fp8-format": False,
    "--fp8-recipe": False,
    "--fp8-param-gather": False,
    "--no-masked-softmax-fusion": True,
    "--no-persist-layer-norm": True,
    "--no-rope-fusion": True,
}
PORTABLE = {
    "gathers and reductions overlapped": CASES["gathers and reductions overlapped"],
    "weight gradients while tokens are sent back": Case(
        OVERLAP | CASES["weight gradients while tokens are sent back"].flags,
        {"overlap_dispatch_backward_with_experts_wgrad": True},
    ),
    "graphs with overlapped gathers": CASES["graphs with overlapped gathers"],
}
PERMUTED = CASES["fused permutation"]


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Report]]:
    """Return the reports of runs with mxfp8 experts, by what is on."""
    cases = {"nothing": Case({}), "fused permutation": PERMUTED} | PORTABLE
    runs = {name: small(case, ("format=mxfp8",), LOCAL) for name, case in cases.items()}
    return train(tmp_path_factory.mktemp("portable"), runs)


@pytest.mark.parametrize("name", PORTABLE)
def test_what_moves_no_bit_moves_none_of_portable_experts(portable, name: str):
    """Losses are those of the run without it."""
    assert_same_losses(PORTABLE[name], portable[name], portable["nothing"])


def assert_same_losses(case: Case, reports: list[Report], without: list[Report]) -> None:
    """Portable experts train with the case on, and to the bit as without it."""
    assert not missing_settings(case.settings, reports)
    for report, plain in zip(reports, without, strict=True):
        assert (plain.error, report.error) == (None, None)
        assert plain.experts == report.experts == ["GroupedExperts"] * 2
        assert plain.managed == report.managed == 4
        assert plain.graphs == 0
        assert (report.graphs > 0) == case.graphs
        assert len(set(plain.losses)) == ITERATIONS
        assert report.losses == plain.losses


def test_portable_experts_train_behind_transformer_engines_permutation(portable):
    """Its kernels add up the outputs of a token's experts in fp32, Megatron's own in bf16: losses
    agree to a few of bf16's roundings."""
    (plain,), (report,) = portable["nothing"], portable["fused permutation"]
    assert report.error is None
    assert not missing_settings(PERMUTED.settings, [report])
    losses = [[float.fromhex(loss) for loss in run.losses] for run in (report, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=2**-6)


PORTABLE_ON_TWO = {
    "overlapped schedule": Case(
        OVERLAPPED_SCHEDULE, {"overlap_moe_expert_parallel_comm": True}, ranks=2
    ),
    "delayed weight gradients": Case(
        OVERLAPPED_SCHEDULE, {"delay_wgrad_compute": True}, ranks=2, switches=("delay-wgrad",)
    ),
}


@pytest.fixture(scope="module")
def portable_on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Report]]:
    """Return the reports of runs with mxfp8 experts on two expert-parallel GPUs."""
    cases = {"nothing": Case(EXPERT_PARALLEL, ranks=2)} | PORTABLE_ON_TWO
    runs = {name: small(case, ("format=mxfp8",), LOCAL) for name, case in cases.items()}
    return train(tmp_path_factory.mktemp("portable-on-two"), runs)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", PORTABLE_ON_TWO)
def test_the_overlapped_schedule_trains_portable_experts_as_the_plain_one(
    portable_on_two, name: str
):
    """On streams of their own, with the gradients of experts delayed among other passes."""
    runs = portable_on_two
    assert_same_losses(PORTABLE_ON_TWO[name], runs[name], runs["nothing"])
