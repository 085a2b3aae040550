"""The launcher of the runs on GPUs, rehearsed with portable experts on the CPU."""

import pytest

from benchmarks.step import DETERMINISTIC_ENVIRONMENT
from tests.support.training_runs.observed_run import Report
from tests.support.training_runs.side_runs import EAGER, Machine, Run, missing_settings

SMALL = {
    "--transformer-impl": "local",
    "--fp8-format": False,
    "--fp8-recipe": False,
    "--fp8-param-gather": False,
    "--num-layers": 2,
    "--hidden-size": 64,
    "--ffn-hidden-size": 96,
    "--moe-ffn-hidden-size": 96,
    "--num-attention-heads": 2,
    "--num-experts": 4,
    "--seq-length": 32,
    "--max-position-embeddings": 32,
    "--vocab-size": 63,
    "--train-iters": 3,
    "--eval-iters": 0,
    "--clip-grad": 0,
    "--no-masked-softmax-fusion": True,
    "--no-persist-layer-norm": True,
    "--no-rope-fusion": True,
}
RECOMPUTED = {"--recompute-granularity": "selective", "--recompute-modules": ["moe"]}
RUNS = {
    "stock": Run(SMALL),
    "plugin": Run(SMALL, plugin=("format=bf16",)),
    "plugin, two ranks": Run(SMALL, plugin=("format=mxfp8", "layout=stock"), ranks=2),
    "plugin, recomputed": Run(SMALL | RECOMPUTED, plugin=("format=bf16",)),
    "refused": Run(SMALL | {"--delay-wgrad-compute": True}, plugin=("format=bf16",)),
}
pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Report]]:
    environment = DETERMINISTIC_ENVIRONMENT | EAGER | {"MOE_OPTIM_CPU": "1"}
    return Machine(tmp_path_factory.mktemp("runs"), 2, environment=environment).train(RUNS)


def test_a_report_says_what_was_built_and_what_it_trained(reports):
    (stock,), (ours,), both = reports["stock"], reports["plugin"], reports["plugin, two ranks"]
    assert [report.error for report in (stock, ours, *both)] == [None] * 4
    assert len(set(stock.losses)) == 3
    assert ours.losses == stock.losses
    assert both[0].losses == both[1].losses != stock.losses
    assert [set(report.experts) for report in (stock, ours)] == [
        {"SequentialMLP"},
        {"GroupedExperts"},
    ]
    assert [report.managed for report in (stock, ours, *both)] == [0, 0, 4, 4]
    assert ours.expert_parameters == ["linear_fc1.weight", "linear_fc2.weight"]


def test_a_report_says_what_was_on(reports):
    """Settings are Megatron's own; a setting that is not on is named with what it is instead."""
    (plain,), (recomputed,) = reports["plugin"], reports["plugin, recomputed"]
    wanted = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    assert not missing_settings(wanted, [recomputed])
    assert missing_settings(wanted, [plain]) == {
        "recompute_granularity": None,
        "recompute_modules": ["core_attn"],
    }
    assert recomputed.passes == 2 * plain.passes > 0
    assert recomputed.losses == plain.losses


def test_a_report_says_what_ended_the_run(reports):
    (report,) = reports["refused"]
    assert report.error.startswith("AssertionError: Delaying wgrad compute is only supported with")
    assert report.losses == []
