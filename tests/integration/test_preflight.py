"""A dry run lists everything that is wrong with a command line, and builds nothing."""

import argparse
import contextlib
import io
import os
import sys
from functools import partial
from importlib.util import find_spec

import pytest

from moe_optim.integration.engine import patch_state
from moe_optim.integration.patches import PATCHES
from tests.support.ranks import on_ranks, run_ranks
from tests.support.training import MODEL
from tests.support.training_runs.scripts import PRETRAIN

pytest.importorskip("megatron.core")

RUN = [*MODEL, "--train-iters", "2", "--eval-interval", "2"]
PLUGIN = ["--use-moe-grouped-optim"]


def but(*changes: str, without: tuple[str, ...] = ()) -> list[str]:
    """Return the flags of a run with the plug-in, without some and their value, and others more."""
    argv = [*RUN, *PLUGIN]
    for flag in without:
        at = argv.index(flag)
        takes_value = not [*argv, "--"][at + 1].startswith("--")
        del argv[at : at + 1 + takes_value]
    return [*argv, *changes]


LOCAL = "--transformer-impl"
CASES = {  # what is wrong -> a command line, and the beginnings of all faults
    "nothing": (but(), []),
    "nothing, Muon": (but("--optimizer", "muon", "--muon-nesterov"), []),
    "Muon's files of ranks without gloo": (
        but("--optimizer", "muon", "--disable-gloo-process-groups", "--ckpt-format", "torch"),
        ["--disable-gloo-process-groups: expected --ckpt-format torch_dist, as others collect sta"],
    ),
    "a fusion of other layers": (
        but(without=("--no-persist-layer-norm",)),
        ["Megatron: persist_layer_norm not supported by torch LayerNorm. Give --no-persist-layer-"],
    ),
    "misspelt": (
        but("--num-expert", "4", "--use-moe-groped-optim", without=("--num-experts", *PLUGIN)),
        [
            "--num-expert: no such flag. Write --num-experts, the closest one.",
            "--use-moe-groped-optim: no such flag. Write --use-moe-grouped-optim, the",
        ],
    ),
    "Megatron's own": (
        but("--tensor-model-parallel-size", "2"),
        [
            "Megatron: world size (1) is not divisible by total_model_size (total_model_size=2). "
            "Change the number of ranks (--ranks of `moe-optim train`), or the parallel sizes.",
            "refused by moe_optim: linear_fc2 [64, 48] in mxfp8, whose blocks have 32 elements",
            "Megatron: MoE layers with --tensor-model-parallel-size above 1 train with sequence",
        ],
    ),
    "several assertions of Megatron": (
        but("--overlap-param-gather", "--expert-model-parallel-size", "3", "--optimizer", "sgd"),
        [
            "Megatron: Must use --overlap-param-gather with --overlap-grad-reduce",
            "Megatron: Number of experts should be a multiple of expert model parallel_size",
            "refused by moe_optim: --optimizer sgd",
        ],
    ),
    "an exit, and what is wrong before it": (
        but("--model-parallel-size", "2", "--checkpoint-activations", "--optimizer", "sgd"),
        [
            "Megatron: --model-parallel-size is no longer valid",
            "Megatron: --checkpoint-activations is no longer valid, use --recompute-activations",
            "refused by moe_optim: --optimizer sgd",
        ],
    ),
    "a batch that ranks do not divide": (
        but("--micro-batch-size", "3", "--global-batch-size", "4"),
        [
            "Megatron: eval_global_batch_size (4) must be divisible by eval_micro_batch_size (3) * "
            "data_parallel_size (1). Change --global-batch-size, --micro-batch-size or the number "
            "of ranks (--ranks of `moe-optim train`).",
        ],
    ),
    "everything at once": (
        but("--num-expert", "4", "--lr", "fast", LOCAL, "transformer_engine",
            "--optimizer", "sgd", "--moe-optim-set", "format=mxfp8",
            without=("--num-experts", "--hidden-size")),
        [
            "--num-expert: no such", "--lr: invalid", "--hidden-size: expected",
            "--transformer-impl: expected", "refused by moe_optim: --optimizer sgd",
            "refused by moe_optim: format: mxfp8 without",
        ],
    ),
}  # fmt: skip


PIPELINE = ["--pipeline-model-parallel-size", "2", "--num-layers", "4"]
PIPELINE += ["--num-virtual-stages-per-pipeline-rank", "2"]
FLEX = ["--moe-token-dispatcher-type", "flex", "--expert-model-parallel-size", "2"]
HYBRID = [*FLEX, "--moe-flex-dispatcher-backend", "hybridep"]
TENSOR = ["--tensor-model-parallel-size", "2"]
WHOLE = ["--expert-tensor-parallel-size", "1"]  # experts
NO_KERNEL = find_spec("scaled_masked_softmax_cuda") is None
LATER = {  # what Megatron tells while it builds or trains -> a command line, beginnings of faults
    "nothing, every axis": (
        but(*PIPELINE, *TENSOR, "--sequence-parallel", "--expert-model-parallel-size", "2", *WHOLE,
            "--moe-shared-expert-intermediate-size", "64", "--qk-layernorm"),
        [],
    ),
    "cut experts that do not fit a format": (
        but(*TENSOR, "--sequence-parallel", "--moe-optim-set", "format=mxfp8"),
        ["refused by moe_optim: linear_fc2 [64, 48] in mxfp8, whose blocks have 32 elements"],
    ),
    "softmax without its kernel": (
        but("--micro-batch-size", "2", without=("--no-masked-softmax-fusion",)),
        ["Megatron: --masked-softmax-fusion, Megatron's default, needs its CUDA ext"] * NO_KERNEL,
    ),
    "nothing, shapes that its kernel does not take": (
        but(without=("--no-masked-softmax-fusion",)), [],
    ),
    "a schedule with too few micro-batches": (
        but(*PIPELINE, "--global-batch-size", "1"),
        ["Megatron: --num-layers-per-virtual-pipeline-stage, or --num-virtual-stages-per-pipeline"],
    ),
    "a norm of the last stage alone": (
        but("--pipeline-model-parallel-size", "2", *TENSOR, *WHOLE, "--sequence-parallel",
            "--mtp-num-layers", "1"),
        ["Megatron: sequence parallel not supported by torch LayerNorm"],
    ),
    "several at once": (
        but(*HYBRID, *TENSOR, *WHOLE, "--multi-latent-attention", "--moe-router-topk", "8"),
        [
            "Megatron: --multi-latent-attention", "Megatron: HybridEP",
            "Megatron: --moe-router-topk", "Megatron: MoE layers with",
        ],
    ),
}  # fmt: skip


def hide_transformer_engine() -> None:
    """Let this process, which is a rank, be one without, wherever tests run."""
    from moe_optim.integration import script_arguments

    script_arguments.import_error = lambda: "ModuleNotFoundError: it is hidden"


def _list_later() -> dict[str, list[str]]:
    """Return the faults of every later case, and see that the process is as it was."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.training.arguments import parse_and_validate_args

    from moe_optim.commands.train.layer_spec import layer_spec
    from moe_optim.integration import cpu_runtime
    from moe_optim.integration.preflight import list_faults

    cpu_runtime.install()
    os.environ.pop("WORLD_SIZE")
    found = {}
    for name, (argv, _) in LATER.items():
        sys.argv = ["script", *argv]
        found[name] = list_faults(parse_and_validate_args, argv, layer_spec=layer_spec)
        assert not dist.is_initialized() and not parallel_state.is_initialized()
        assert "NVTE_FUSED_ATTN" not in os.environ  # which a model of Megatron sets
    argv = but(*TENSOR, *WHOLE, "--sequence-parallel")
    sys.argv = ["script", *argv]
    found["layers of a script"] = list_faults(parse_and_validate_args, argv)
    return found


@pytest.fixture(scope="module")
def found_later() -> dict[str, list[str]]:
    return run_ranks(1, _list_later)[0]


def assert_begin(faults: list[str], beginnings: list[str]) -> None:
    assert len(faults) == len(beginnings), faults
    for fault, beginning in zip(faults, beginnings, strict=True):
        assert fault.startswith(beginning)


@pytest.mark.parametrize("case", LATER)
def test_what_megatron_tells_while_it_builds_or_trains_is_foreseen(found_later, case):
    """Its own builder and scheduler answer; several faults are told at once."""
    assert_begin(found_later[case], LATER[case][1])


def test_layers_are_those_that_the_script_is_built_from(found_later):
    """Megatron's norm without apex refuses sequence parallelism; that of `moe-optim train` not."""
    (fault,) = found_later["layers of a script"]
    assert fault.startswith("Megatron: ") and "sequence parallel" in fault.lower()


def _list_all() -> dict[str, tuple[list[str], str]]:
    """Return the faults of every case and what was printed, and see that nothing is left behind."""
    from megatron.training.arguments import parse_and_validate_args

    from moe_optim.integration import cpu_runtime
    from moe_optim.integration.preflight import list_faults
    from moe_optim.integration.script_arguments import require_evaluation

    cpu_runtime.install()
    hide_transformer_engine()
    states = [patch_state(patch) for patch in PATCHES]
    found = {}
    for name, (argv, _) in CASES.items():
        sys.argv = ["script", *argv]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            faults = list_faults(parse_and_validate_args, argv)
        found[name] = faults, printed.getvalue()
        assert [patch_state(patch) for patch in PATCHES] == states
    os.environ.pop("WORLD_SIZE")
    sys.argv = ["script", *but("--pipeline-model-parallel-size", "2")]
    found["no launcher"] = list_faults(parse_and_validate_args, sys.argv[1:]), ""
    found["no parser"] = list_faults(lambda: None, []), ""
    own = argparse.ArgumentParser(prog="mine.py")
    own.add_argument("--config", required=True)
    found["own parser"] = list_faults(partial(own.parse_args, []), []), ""
    found["says why"] = list_faults(partial(sys.exit, "no config"), []), ""
    found["broken"] = list_faults(partial(int, "x"), []), ""
    for flags in ((), ("--skip-train",), ("--eval-interval", "0")):
        sys.argv = ["script", *but(*flags, without=("--eval-interval",))]
        faults = list_faults(parse_and_validate_args, sys.argv[1:], require_evaluation)
        found[" ".join(("no interval", *flags))] = faults, ""
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[list[str], str]]:
    return run_ranks(1, _list_all)[0]


@pytest.mark.parametrize("case", CASES)
def test_every_fault_is_listed_once_and_no_other(found, case):
    """In the order parse, settle, plug-in; Megatron prints nothing meanwhile."""
    faults, printed = found[case]
    assert_begin(faults, CASES[case][1])
    assert printed == ""


def test_a_script_that_never_comes_to_its_arguments_is_a_fault(found):
    """Without a launcher as many ranks are meant as the parallel sizes need."""
    assert found["no launcher"][0] == []
    assert found["no parser"][0][0].startswith("expected a script that has Megatron parse")
    ends = "expected a script that has Megatron parse its arguments, got one that ends before it: "
    (own,) = found["own parser"][0]
    assert own.startswith(f"{ends}mine.py: error: the following arguments are required: --config.")
    assert found["says why"][0][0].startswith(f"{ends}no config.")
    assert found["broken"][0][0].startswith("ValueError: invalid literal")


def test_an_interval_of_evaluations_that_megatron_divides_by_is_asked_for(found):
    """Without a message it would end in a TypeError once the model is built."""
    for case in ("no interval", "no interval --eval-interval 0"):
        (fault,) = found[case][0]
        assert fault.startswith("--eval-interval: expected a number of iterations above 0, got ")
    assert found["no interval --skip-train"][0] == []


@on_ranks(1)
def test_the_command_runs_a_script_until_its_arguments_are_settled(tmp_path):
    """It exits with 0 where nothing is wrong, else with 2; the rest of the script never runs. A run
    says that Transformer Engine is missing before Megatron calls the class that it lacks. Both
    refuse to load a Hugging Face checkpoint, in whose place Megatron trains random weights."""
    script = tmp_path / "pretrain_mine.py"
    script.write_text(
        PRETRAIN.replace("    config =", "    raise SystemExit('too far')\n    config =")
    )
    published = tmp_path / "published"
    published.mkdir()
    for name in ("config.json", "model.safetensors"):
        (published / name).touch()
    from moe_optim.commands.cli import main as cli

    said = []
    hide_transformer_engine()
    dry = ["run", "--dry-run", str(script)]
    wrong = but("--num-expert", "4")
    missing = but(LOCAL, "transformer_engine")
    load = but("--load", str(published))
    endless = but(without=("--eval-interval",))
    run = ["run", str(script)]
    for argv in (
        *([*dry, *but()], [*dry, *wrong], [*run, *missing], [*dry, *endless], [*run, *endless]),
        *([*dry, *load], [*run, *load]),
    ):
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            code = cli.main(argv)
        said.append((code, errors.getvalue()))
    fine, wrong, missing, *endless = said[:5]
    for code, errors in endless:
        assert code == 2
        assert "--eval-interval: expected a number of iterations above 0, got None" in errors
    loads = said[5:]
    for code, errors in loads:
        assert code == 2
        assert f"--load {published}: expected a Megatron checkpoint, got a Hugging Face" in errors
        assert f"moe-optim convert --to megatron {published} DIR" in errors
    assert missing[0] == 2
    last = missing[1].splitlines()[-1]
    assert last.startswith("error: --transformer-impl: expected Transformer Engine for transformer")
    assert fine[0] == 0
    assert wrong[0] == 2
    assert f"error: {script}: arguments: found 1 problem:\n" in wrong[1]
    assert wrong[1].splitlines()[-1].startswith("  --num-expert: no such flag. Write --num-experts")


LATE = {
    "in the order of the module": ("pretrain()\nmoe_optim.install()\n", True),
    "in a function": ("def main():\n    m = DistributedDataParallel(c)\n    install()\n", True),
    "in a condition": ("pretrain()\nif True:\n    install()\n", True),
    "before": ("install()\npretrain()\n", False),
    "in another function": ("def main():\n    pretrain()\ninstall()\nmain()\n", False),
    "none": ("pretrain()\n", False),
}


def test_an_installation_after_the_model_is_found_in_the_script(tmp_path):
    from moe_optim.integration.preflight import find_late_install

    script = tmp_path / "mine.py"
    for case, (source, is_late) in LATE.items():
        script.write_text(source)
        found = find_late_install(script) or ""
        assert ("expected install() before the model is built" in found) == is_late, case
