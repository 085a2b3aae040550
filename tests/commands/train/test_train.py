"""The command from recipe to summary, with ranks that only pretend to train."""

import json
import re
import subprocess
import sys

import pytest

from moe_optim.commands.cli import main as cli
from moe_optim.commands.train import run as train
from moe_optim.commands.train.early_check import list_early_faults
from moe_optim.config.recipes import load_recipe, shipped_recipes
from tests.support.training_runs.runs import FAKE_RANK, REPOSITORY, write_checkpoint
from tools.documents.megatron_flags import recorded

pytestmark = pytest.mark.slow

EVERY_SECOND = ("--eval-interval", "2")
SHORT = ("--train-iters", "6", *EVERY_SECOND)
RECIPE = REPOSITORY / "recipes" / "quickstart.yaml"
RANK_MODULE = train.RANK_MODULE
OVERRIDE = "--override-opt_param-scheduler"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train") / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    return folder


@pytest.fixture
def run(tmp_path):
    return tmp_path / "runs" / "a"


@pytest.fixture
def command(monkeypatch, capfd, text, run):
    """Run `moe-optim train` on the small text; returns exit code, stdout and stderr."""
    monkeypatch.setattr(train, "RANK_MODULE", FAKE_RANK)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))

    def call(*options, behaviour="", megatron=SHORT, out=run, on=(str(text),)):
        monkeypatch.setenv("FAKE_RANK", behaviour)
        words = ["train", str(RECIPE), "--out", str(out), "--cpu", *options]
        words += ["--text", *on] if on else []
        code = cli.main([*words, "--", *megatron])
        return code, *capfd.readouterr()

    return call


def rank_arguments(run):
    """Return what rank 0 of the newest launch was called with."""
    logs = run.glob("logs/*/attempt_0/0/stdout.log")
    log = max(logs, key=lambda path: path.stat().st_mtime_ns).read_text()
    return json.loads(re.search(r"^arguments: (.*)$", log, re.MULTILINE)[1])


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def test_a_run_leaves_everything_and_is_not_overwritten(command, run):
    """The user's flags come last on the ranks' command line. Megatron trusts any index it finds, so
    every launch starts without one that a full disk may have cut off."""
    cache = run / "index_cache"
    cache.mkdir(parents=True)
    (cache / "index.npy").write_bytes(b"cut off")
    options = ("--quiet", "--set", "moe_optim.format=bf16", "megatron_args.--lr=1e-3")
    code, screen, errors = command(*options, megatron=(*SHORT, "--lr", "5e-4"))
    assert (code, errors) == (0, "")
    assert not cache.exists()
    summary = summary_of(run)
    assert (summary["iterations"], summary["validation_iterations"]) == (6, [2, 4, 6])
    assert summary["test_loss"] == pytest.approx(summary["loss_last"] + 0.5, abs=1e-4)
    assert 2 < summary["byte_entropy"] < 3.5
    assert summary["resumed_from"] is None
    assert summary["command"].startswith(
        f"moe-optim train {RECIPE} --out {run} --cpu --quiet --set"
    )

    argv = rank_arguments(run)
    assert argv[-6:] == [*SHORT, "--lr", "5e-4"]
    assert argv[argv.index("--lr") + 1] == "1e-3"
    assert "--use-moe-grouped-optim" in argv
    assert argv[argv.index("--moe-optim-recipe") + 1] == str(RECIPE)
    assert argv[argv.index("--moe-optim-set") + 1] == 'format="bf16"'
    assert argv[argv.index("--save") + 1] == str(run / "checkpoints")

    assert screen.startswith("Training finished\nexpert weights")  # and nothing of Megatron's
    longer = rf"moe-optim train {RECIPE} --out {run} --cpu --resume -- --train-iters 12 {OVERRIDE}"
    assert f"  {longer}\n" in screen  # in one line, as it is no terminal

    code, _, errors = command()
    assert code == 2
    assert errors.startswith(f"error: {run}: already contains a run (summary.json)")


def test_a_resume_skips_a_broken_checkpoint_and_takes_over_what_the_run_was_started_with(
    command, run
):
    """Stopped at 6 while it saved, resumed from 4 to 8: eight points, none twice. Flags, settings
    and text are kept; what is given anew wins, and flags of one load are dropped."""
    options = ("--set", "moe_optim.format=bf16", "megatron_args.--seed=7")
    own = ("--lr", "5e-4", "--min-lr", "1e-5", "--finetune", "--ckpt-step", "3")
    assert command(*options, megatron=(*SHORT, *own))[0] == 0
    data = rank_arguments(run)
    for iteration in (4, 6):
        write_checkpoint(run / "checkpoints", iteration)
    (run / "checkpoints" / "iter_0000006" / "metadata.json").unlink()
    new = ("--resume", "--set", "moe_optim.health_interval=2")
    code, screen, _ = command(*new, megatron=("--train-iters", "8"), on=())
    assert code == 0
    assert "resume: skipped the incomplete checkpoint iter_0000006: no metadata.json" in screen
    assert "resume: set latest_checkpointed_iteration.txt to 4 (it was '6')" in screen
    argv = rank_arguments(run)
    assert argv.count("--load") == 1
    assert argv[-8:] == ["--eval-interval", "2", *own[:4], "--train-iters", "8"]
    assert argv[argv.index("--seed") + 1] == "7"
    fields = [argv[at + 1] for at, word in enumerate(argv) if word == "--moe-optim-set"]
    assert fields == ['format="bf16"', "health_interval=2"]
    assert not {"--finetune", "--ckpt-step"} & set(argv)
    flag = argv.index("--train-data-path")
    assert argv[flag + 1] == data[data.index("--train-data-path") + 1]
    summary = summary_of(run)
    assert (summary["resumed_from"], summary["iterations"]) == (4, 8)
    assert summary["validation_iterations"] == [2, 4, 6, 8]


@pytest.mark.parametrize("began", ["text", "mock"])
def test_a_resume_goes_on_with_its_data_and_no_other(command, run, text, began):
    mock = (*SHORT, "--mock-data")
    first = {"text": {}, "mock": {"on": (), "megatron": mock}}[began]
    assert command(**first)[0] == 0
    write_checkpoint(run / "checkpoints", 4)
    others = [{"on": (str(text),)}] + [{"on": (), "megatron": mock}] * (began == "text")
    for change in others:
        code, _, errors = command("--resume", **change)
        assert code == 2 and errors.startswith("error: --")
    assert command("--resume", on=())[0] == 0


def test_a_failed_rank_ends_in_one_message_with_the_way_on(command, run, monkeypatch):
    """With another schedule where that was the fault; its options are not taken over."""
    code, _, errors = command(behaviour="error")
    assert code == 1
    message, logs, way_on = errors.splitlines()[-3:]
    assert message == "error: rank 1 ended with exit code 1: ConfigError: expected 4, got 6."
    assert re.fullmatch(rf"  Logs: {run}/logs/launch_\w+/attempt_0/1", logs)
    assert way_on == "  There is no complete checkpoint: start again, without --resume."
    assert not (run / "summary.json").exists()
    write_checkpoint(run / "checkpoints", 4)
    monkeypatch.setenv("FAKE_ERROR", "AssertionError: OptimizerParamScheduler: class input value")
    record = (run / "arguments.json").read_text()
    errors = command("--resume", behaviour="error", megatron=("--seed", "8777"), on=())[2]
    assert f"  {OVERRIDE} overrides the schedule" in errors
    assert errors.splitlines()[-1] == (
        f"  Continue from iteration 4: moe-optim train {RECIPE} --out {run} --cpu --resume"
    )
    assert (run / "arguments.json").read_text() == record


def test_all_wrong_flags_are_refused_at_once_before_a_rank_starts(command, run, monkeypatch):
    """By Megatron's own parser and the plug-in's own checks; nothing is built for it."""
    pytest.importorskip("megatron.core")
    monkeypatch.setattr(train, "RANK_MODULE", RANK_MODULE)
    refused = ("--use-megatron-fsdp", "--context-parallel-size", "2")
    code, _, errors = command(megatron=(*SHORT, *refused))
    assert code == 2
    first, *faults = errors.splitlines()
    assert first.startswith(f"error: {RECIPE} and flags after --: found ")
    for flag in ("--use-megatron-fsdp", "--context-parallel-size"):
        assert any(flag in fault for fault in faults)
    assert not run.parent.exists()  # nor anything left


@recorded
def test_wrong_names_and_values_are_refused_before_torch_is_imported(run):
    """With what the plug-in refuses: two seconds, where Megatron's own parser takes ten."""
    words = ["moe-optim", "train", str(RECIPE), "--out", str(run), "--stock", "--", "--lr", "fast"]
    told = f"""
import sys
from moe_optim.commands.cli.main import main
code = main({[*words[1:], "--train-iter", "6", "--context-parallel-size", "2"]})
sys.exit(99 if "torch" in sys.modules else code)
"""
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    first, *faults = done.stderr.splitlines()
    assert first == f"error: {RECIPE} and flags after --: found 3 problems:"
    assert "  --train-iter: no such flag. Write --train-iters, the closest one." in faults
    assert "  --lr: invalid float value: 'fast'. Change the value." in faults
    assert faults[-1].startswith("  refused by moe_optim: --context-parallel-size with ")


@recorded
def test_layer_patterns_that_only_megatron_evaluates_are_no_early_fault():
    patterns = ",".join(["1"] * 126), "1 if i % 2 else 0 for i in range(61)"
    for pattern in patterns:
        assert list_early_faults(["--moe-layer-freq", f"[{pattern}]"]) == []


@recorded
def test_of_recipes_a_wrong_name_is_the_only_early_fault():
    """Refusals are those of validated flags, although Megatron has not validated them yet."""
    for path in shipped_recipes().values():
        argv = [*load_recipe(path).megatron_argv(), "--use-moe-grouped-optim"]
        assert list_early_faults(argv) == []
        (fault,) = list_early_faults([*argv, "--zzz"])
        assert fault.startswith("--zzz: no such flag. Remove it.")


REFUSED = {  # message -> options of the command, flags of Megatron
    "--resume: expected the folder of a run, got no folder": (("--resume",), ()),
    "--set moe_optim.format: expected no config of the plug-in with --stock": (
        ("--stock", "--set", "moe_optim.format=bf16"),
        (),
    ),
    "--save: the run folder decides": ((), ("--save", "x")),
    "--load: --resume loads from": (("--resume",), ("--load", "x")),
    "--text and --mock-data both": ((), ("--mock-data",)),
}


def test_arguments_that_cannot_work_are_refused_before_a_rank_starts(command, run):
    for message, (options, megatron) in REFUSED.items():
        code, _, errors = command(*options, megatron=megatron)
        assert code == 2
        assert message in errors
        assert not (run / "logs").exists()


def test_text_that_is_missing_is_refused_before_anything_is_written(command, tmp_path):
    code, out, err = command(on=(str(tmp_path / "absent"),), out=tmp_path / "run")
    assert (code, out) == (2, "") and not (tmp_path / "run").exists()
    assert f"--text {tmp_path / 'absent'}: expected a file or a folder" in err
