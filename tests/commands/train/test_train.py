"""The command from recipe to summary, with ranks that only pretend to train."""

import json
import re
import shutil
from pathlib import Path

import pytest

from moe_optim.commands.cli import main as cli
from moe_optim.commands.train import run as train
from tests.support.training_runs.runs import FAKE_RANK, REPOSITORY, small_disk, write_checkpoint

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
    code, screen, _ = command()
    assert code == 0
    summary = summary_of(run)
    assert summary["iterations"] == 6
    assert summary["validation_iterations"] == [2, 4, 6]
    assert summary["test_loss"] == pytest.approx(summary["loss_last"] + 0.5, abs=1e-4)
    assert 2 < summary["byte_entropy"] < 3.5
    assert summary["resumed_from"] is None
    assert summary["command"].startswith(f"moe-optim train {RECIPE} --out {run} --cpu --text ")
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    longer = rf"moe-optim train {RECIPE} --out {run} --cpu --resume -- --train-iters 12 {OVERRIDE}"
    assert f"  {longer}\n" in screen  # in one line, as it is no terminal

    code, _, errors = command()
    assert code == 2
    assert errors.startswith(f"error: {run}: already contains a run (summary.json)")


def test_quiet_prints_results_alone(command):
    code, screen, errors = command("--quiet")
    assert (code, errors) == (0, "")
    assert screen.startswith("Training finished\nexpert weights")
    assert "[rank" not in screen and "dataset: " not in screen


def test_the_user_has_the_last_word_on_the_ranks_command_line(command, run):
    options = ("--set", "moe_optim.format=bf16", "megatron_args.--lr=1e-3")
    assert command(*options, megatron=("--train-iters", "3", "--lr", "5e-4"))[0] == 0
    argv = rank_arguments(run)
    assert argv[-4:] == ["--train-iters", "3", "--lr", "5e-4"]
    assert argv[argv.index("--lr") + 1] == "1e-3"
    assert "--use-moe-grouped-optim" in argv
    assert argv[argv.index("--moe-optim-recipe") + 1] == str(RECIPE)
    assert argv[argv.index("--moe-optim-set") + 1] == 'format="bf16"'
    assert argv[argv.index("--save") + 1] == str(run / "checkpoints")


def test_with_stock_ranks_get_no_flag_of_the_plugin(command, run):
    code, screen, _ = command("--stock", "--set", "megatron_args.--lr=1e-3")
    assert code == 0
    assert "Megatron's own optimizer" in screen
    argv = rank_arguments(run)
    assert not [word for word in argv if "moe-optim" in word or "grouped-optim" in word]
    assert argv[argv.index("--lr") + 1] == "1e-3"


def test_a_resume_skips_a_broken_checkpoint_and_joins_the_curves(command, run):
    """Stopped at 6 while it saved, resumed from 4 to 8: eight points, none twice."""
    assert command()[0] == 0
    for iteration in (4, 6):
        write_checkpoint(run / "checkpoints", iteration)
    (run / "checkpoints" / "iter_0000006" / "metadata.json").unlink()
    code, screen, _ = command("--resume", megatron=("--train-iters", "8"))
    assert code == 0
    assert "resume: skipped the incomplete checkpoint iter_0000006: no metadata.json" in screen
    assert "resume: set latest_checkpointed_iteration.txt to 4 (it was 6)" in screen
    assert rank_arguments(run).count("--load") == 1
    summary = summary_of(run)
    assert (summary["resumed_from"], summary["iterations"]) == (4, 8)
    assert summary["validation_iterations"] == [2, 4, 6, 8]


def test_a_resume_takes_over_what_the_run_was_started_with(command, run, text):
    """Flags, knobs and text; what is given anew wins, and flags of one load are not kept."""
    options = ("--set", "moe_optim.format=bf16", "megatron_args.--seed=7")
    own = ("--lr", "5e-4", "--min-lr", "1e-5", "--finetune", "--ckpt-step", "3")
    assert command(*options, megatron=(*SHORT, *own))[0] == 0
    data = rank_arguments(run)
    write_checkpoint(run / "checkpoints", 4)
    new = ("--resume", "--set", "moe_optim.health_interval=2")
    assert command(*new, megatron=("--train-iters", "8"), on=())[0] == 0
    argv = rank_arguments(run)
    assert argv[-8:] == ["--eval-interval", "2", *own[:4], "--train-iters", "8"]
    assert argv[argv.index("--seed") + 1] == "7"
    fields = [argv[at + 1] for at, word in enumerate(argv) if word == "--moe-optim-set"]
    assert fields == ['format="bf16"', "health_interval=2"]
    assert not {"--finetune", "--ckpt-step"} & set(argv)
    flag = argv.index("--train-data-path")
    assert argv[flag + 1] == data[data.index("--train-data-path") + 1]


@pytest.mark.extended
def test_a_resume_changes_over_from_iterations_to_samples(command, run):
    """Megatron takes one of the two units."""
    counted = ("--lr-decay-iters", "9", "--lr-warmup-iters", "1", *EVERY_SECOND)
    assert command(megatron=("--train-iters", "6", *counted))[0] == 0
    write_checkpoint(run / "checkpoints", 4)
    code, screen, _ = command("--resume", megatron=("--train-samples", "96"))
    assert code == 0
    assert rank_arguments(run)[-4:] == [*EVERY_SECOND, "--train-samples", "96"]
    assert f"--resume -- --train-samples 192 {OVERRIDE}" in screen


def test_another_rate_of_a_resumed_run_is_refused_unless_it_overrides_the_schedule(command, run):
    """In Megatron's own words it is a KeyError, with the flag that overrides it, too."""
    assert command(megatron=(*SHORT, "--lr", "5e-4"))[0] == 0
    write_checkpoint(run / "checkpoints", 4)
    other = ("--lr", "1e-3")
    code, _, errors = command("--resume", megatron=other)
    assert code == 2
    assert errors == (
        "error: --lr: expected 5e-4, as the run was started, got 1e-3. Leave it out to go on as "
        f"before; to go on with another, add {OVERRIDE}.\n"
    )
    _, _, errors = command("--resume", "--stock", megatron=(*other, OVERRIDE))
    assert "to go on with another, train without --stock" in errors
    assert len(list((run / "logs").iterdir())) == 1  # no rank was started
    assert command("--resume", megatron=("--lr", "much"))[0] == 2
    assert command("--resume", megatron=("--lr", "0.0005"))[0] == 0  # the same number
    assert command("--resume", megatron=(*other, OVERRIDE))[0] == 0
    assert rank_arguments(run)[-3:] == [*other, OVERRIDE]


@pytest.mark.extended
def test_arguments_of_a_failed_resume_are_not_taken_over(command, run):
    assert command()[0] == 0
    write_checkpoint(run / "checkpoints", 4)
    assert command("--resume", megatron=("--seed", "8777"), behaviour="error")[0] == 1
    assert command("--resume", megatron=())[0] == 0
    assert "8777" not in rank_arguments(run)


@pytest.mark.parametrize("began_with", ["text", "--mock-data"])
def test_a_resume_does_not_change_to_other_data(command, run, began_with, tmp_path):
    own = (*SHORT, "--mock-data")
    on_text = began_with == "text"
    begin = {} if on_text else {"megatron": own, "on": ()}
    assert command(**begin)[0] == 0
    write_checkpoint(run / "checkpoints", 4)
    other = tmp_path / "other.txt"
    other.write_text("another text\n" * 400)
    assert command("--resume", **begin)[0] == 0
    changes = [{"on": (str(other),)}]
    changes += [{"megatron": own, "on": ()}] if on_text else []
    for change in changes:
        code, _, errors = command("--resume", **change)
        assert code == 2
        assert f"{run} began to train on" in errors


def test_a_damaged_record_of_arguments_is_one_message(command, run):
    write_checkpoint(run / "checkpoints", 4)
    record = run / "arguments.json"
    for harm in (
        "[",
        "[" * 100_000,
        '{"set": []}',
        '{"set": [1], "megatron_args": [], "text": null}',
        '{"set": "abc", "megatron_args": [], "text": null}',
        '{"set": [], "megatron_args": null, "text": null}',
        '{"set": [], "megatron_args": [], "text": [1]}',
    ):
        record.write_text(harm)
        code, _, errors = command("--resume")
        assert code == 2
        assert errors.startswith(f"error: {record}: expected the arguments of the run, got some")


def test_a_failed_rank_ends_in_one_message_with_the_way_on(command, run):
    code, _, errors = command(behaviour="error")
    assert code == 1
    message, logs, way_on = errors.splitlines()[-3:]
    assert message == "error: rank 1 ended with exit code 1: ConfigError: expected 4, got 6."
    assert re.fullmatch(rf"  Logs: {run}/logs/launch_\w+/attempt_0/1", logs)
    assert way_on == "  There is no complete checkpoint: start again, without --resume."
    assert not (run / "summary.json").exists()
    write_checkpoint(run / "checkpoints", 4)
    way_on = command("--resume", behaviour="error")[2].splitlines()[-1]
    assert way_on == (
        f"  Continue from iteration 4: moe-optim train {RECIPE} --out {run} --cpu --resume"
    )


def test_the_way_on_takes_another_schedule_where_that_was_the_fault(command, run, monkeypatch):
    monkeypatch.setenv("FAKE_ERROR", "AssertionError: OptimizerParamScheduler: class input value")
    assert f"  {OVERRIDE} overrides the schedule" in command(behaviour="error")[2]


def test_all_wrong_flags_are_refused_at_once_before_a_rank_starts(command, run, monkeypatch):
    """By Megatron's own parser and the plug-in's own checks; nothing is built for it."""
    pytest.importorskip("megatron.core")
    monkeypatch.setattr(train, "RANK_MODULE", RANK_MODULE)
    wrong = ("--train-iter", "6", "--use-megatron-fsdp", "--context-parallel-size", "2")
    code, _, errors = command(megatron=wrong)
    assert code == 2
    first, *faults = errors.splitlines()
    assert first.startswith(f"error: {RECIPE} and flags after --: expected what Megatron")
    assert "  --train-iter: no such flag. Write --train-iters, the closest one." in faults
    for flag in ("--use-megatron-fsdp", "--context-parallel-size"):
        assert any(flag in fault for fault in faults)
    assert not (run / "logs").exists()


def test_a_disk_that_fills_up_while_training_is_named(command, text, tmp_path):
    with small_disk(tmp_path / "disk", "4m") as disk:
        code, _, errors = command(behaviour="full", out=disk / "a")
        assert code == 1
        assert "The disk is almost full: 0.0 MiB are free." in errors
        assert not (disk / "a" / "summary.json").exists()


def test_a_disk_too_small_for_the_dataset_is_named(command, tmp_path):
    large = tmp_path / "large.txt"
    large.write_bytes(bytes(2**20))
    with small_disk(tmp_path / "disk", "1m") as disk:
        code, _, errors = command(out=disk / "a", on=(str(large),))
        assert code == 1
        assert errors.startswith(f"error: {disk}/data: building the dataset failed: the disk is")
        assert not list((disk / "data").glob("bytes-*"))


REFUSED = {
    "--ranks: expected 1 or more": (("--ranks", "0"), ()),
    "--set moe_optim.format: expected no config of the plug-in with --stock": (
        ("--stock", "--set", "moe_optim.format=bf16"),
        (),
    ),
    "--save: the run folder decides": ((), ("--save", "x")),
    "--yaml-cfg: expected flags, got a file": ((), ("--yaml-cfg", "x.yaml")),
    "--tensorboard-dir: the run folder": ((), ("--tensorboard-dir=x",)),
    "--load: --resume loads from": (("--resume",), ("--load", "x")),
    "--text and --mock-data both": ((), ("--mock-data",)),
    "text: expected more than 100000 bytes": ((), ("--seq-length", "100000")),
    "--text missing: expected a file": (("--text", "missing"), ()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_arguments_that_cannot_work_are_refused_before_a_rank_starts(command, run, message):
    options, megatron = REFUSED[message]
    code, _, errors = command(*options, megatron=megatron)
    assert code == 2
    assert message in errors
    assert not (run / "logs").exists()


def test_a_resume_of_a_folder_that_does_not_exist_leaves_none_behind(command, run):
    code, _, errors = command("--resume")
    assert code == 2
    assert errors == (
        f"error: --resume: expected the folder of a run, got no folder {run}. Name that of the run "
        "with --out, or start a new one without --resume.\n"
    )
    assert not run.parent.exists()


def test_a_resume_of_a_folder_without_checkpoints_is_refused(command, run):
    run.mkdir(parents=True)
    code, _, errors = command("--resume")
    assert code == 2
    assert "no complete checkpoint (there are none)" in errors


def test_the_run_folder_is_named_after_the_recipe_by_default(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train._Training, "run", lambda self: 0)
    assert cli.main(["train", str(RECIPE)]) == 0
    assert Path("runs/quickstart").is_dir()


def test_an_index_that_a_full_disk_cut_off_is_never_used(command, run):
    """Megatron trusts any index it finds, so every launch starts without one."""
    cache = run / "index_cache"
    cache.mkdir(parents=True)
    (cache / "index.npy").write_bytes(b"cut off")
    assert command()[0] == 0
    assert not cache.exists()
    shutil.rmtree(run)


def test_the_last_lines_are_commands_that_use_the_run(command, run):
    screen = command()[1]
    assert screen.endswith(
        f"moe-optim report {run}\n"
        f"moe-optim convert --to hf {run} {run}/hf\n"
        f"moe-optim export --format mxfp8 {run} {run}/mxfp8\n"
    )
