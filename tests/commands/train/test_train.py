"""The command from recipe to summary, with ranks that only pretend to train."""

import json
import re
import shlex
import shutil
import sys

import pytest

from moe_optim.checkpoint.integrity import require_intact
from moe_optim.commands.cli import main as cli
from moe_optim.commands.train import launcher
from moe_optim.commands.train import run as train
from moe_optim.errors import StateError
from tests.support.hostile.damage import flip_in
from tests.support.training_runs.runs import FAKE_RANK, REPOSITORY, small_disk, write_checkpoint

pytestmark = pytest.mark.slow

EVERY_SECOND = ("--eval-interval", "2")
PREFLIGHT = train.PREFLIGHT
SHORT = ("--train-iters", "6", *EVERY_SECOND)
RECIPE = REPOSITORY / "recipes" / "quickstart.yaml"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A text and a folder of datasets that is filled once for all tests."""
    folder = tmp_path_factory.mktemp("train")
    text = folder / "text"
    text.mkdir()
    (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    (folder / "runs").mkdir()
    return folder


@pytest.fixture
def runs(shared, tmp_path):
    """A fresh parent folder for runs, with the dataset in it once one test has built it."""
    (shared / "data").mkdir(exist_ok=True)
    (tmp_path / "data").symlink_to(shared / "data")
    return tmp_path


@pytest.fixture
def command(monkeypatch, capsys, shared, runs):
    """Run `moe-optim train` on the small text; returns exit code, stdout and stderr."""
    monkeypatch.setattr(train, "RANK_ENTRY", FAKE_RANK)
    monkeypatch.setattr(train, "PREFLIGHT", (sys.executable, "-c", "print([])"))
    monkeypatch.setattr(launcher, "_POLL_SECONDS", 0.02)  # such ranks end at once

    def run(*options, behaviour="", megatron=SHORT, out=runs / "a", text=True):
        monkeypatch.setenv("FAKE_RANK", behaviour)
        words = ["train", str(RECIPE), "--out", str(out), "--cpu", *options]
        words += ["--text", str(shared / "text")] if text else []
        code = cli.main([*words, "--", *megatron])
        return code, *capsys.readouterr()

    return run


def rank_arguments(folder):
    """Return what rank 0 of the newest launch was called with."""
    log = max((folder / "logs").iterdir()) / "rank0.log"
    return json.loads(re.search(r"^arguments: (.*)$", log.read_text(), re.MULTILINE)[1])


def test_a_run_leaves_everything_and_is_not_overwritten(command, runs):
    code, screen, errors = command()
    assert (code, errors) == (0, "")
    folder = runs / "a"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["iterations"] == 6
    assert summary["validation_iterations"] == [2, 4, 6]
    assert summary["test_loss"] == pytest.approx(summary["loss_last"] + 0.5, abs=1e-4)
    assert 2 < summary["byte_entropy"] < 3.5
    assert summary["resumed_from"] is None
    assert summary["command"].startswith("moe-optim train ")
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "iteration 4: held-out loss" in screen
    longer = r"train longer +│ moe-optim train .* --resume -- .*--override-opt_param-scheduler +│\n"
    assert re.search(longer, screen)  # in one line, as it is no terminal

    code, _, errors = command()
    assert code == 2
    assert errors.startswith(f"error: {folder}: already holds a run (summary.json)")


def test_the_user_has_the_last_word_on_the_ranks_command_line(command, runs):
    options = ("--set", "moe_optim.format=bf16", "megatron_args.--lr=1e-3")
    assert command(*options, megatron=("--train-iters", "3", "--lr", "5e-4"))[0] == 0
    argv = rank_arguments(runs / "a")
    assert argv[-4:] == ["--train-iters", "3", "--lr", "5e-4"]
    assert argv[argv.index("--lr") + 1] == "1e-3"
    assert "--use-moe-grouped-optim" in argv
    assert argv[argv.index("--moe-optim-recipe") + 1] == str(RECIPE)
    assert argv[argv.index("--moe-optim-set") + 1] == 'format="bf16"'
    assert argv[argv.index("--save") + 1] == str(runs / "a" / "checkpoints")


def test_with_stock_ranks_hear_nothing_of_the_plugin(command, runs):
    """The recipe's flags for Megatron, and none of its knobs; a resume keeps to that."""
    for iteration, options in ((4, ("--stock",)), (6, ("--stock", "--resume"))):
        code, screen, _ = command(*options, "--set", "megatron_args.--lr=1e-3")
        assert code == 0
        assert "Megatron's own optimizer" in screen
        argv = rank_arguments(runs / "a")
        assert not [word for word in argv if "moe-optim" in word or "grouped-optim" in word]
        assert argv[argv.index("--lr") + 1] == "1e-3"
        write_checkpoint(runs / "a" / "checkpoints", iteration)
    assert "--stock" in json.loads((runs / "a" / "summary.json").read_text())["command"].split()


def test_runs_beside_each_other_share_a_dataset(command, runs):
    assert command(out=runs / "a")[0] == 0
    _, screen, _ = command(out=runs / "b")
    assert f"dataset: reused {runs / 'data'}/bytes-" in screen


def test_a_resume_passes_over_a_broken_checkpoint_and_joins_the_curves(command, runs):
    """Stopped at 6 while it saved, resumed from 4 to 8: eight points, none twice."""
    assert command()[0] == 0
    checkpoints = runs / "a" / "checkpoints"
    for iteration in (4, 6):
        write_checkpoint(checkpoints, iteration)
    (checkpoints / "iter_0000006" / "metadata.json").unlink()
    code, screen, _ = command("--resume", megatron=("--train-iters", "8", *EVERY_SECOND))
    assert code == 0
    assert "resume: skipped the incomplete checkpoint iter_0000006: no metadata.json" in screen
    assert "resume: set latest_checkpointed_iteration.txt to 4 (it was 6)" in screen
    assert rank_arguments(runs / "a").count("--load") == 1
    summary = json.loads((runs / "a" / "summary.json").read_text())
    assert (summary["resumed_from"], summary["iterations"]) == (4, 8)
    assert summary["validation_iterations"] == [2, 4, 6, 8]
    assert len(list((runs / "a" / "logs").iterdir())) == 2


def test_a_resume_goes_on_with_the_text_that_the_run_began_with(command, runs, shared):
    """Whether it is named again or not; other text is refused, both named, before a rank starts."""
    began = shared / "text"
    assert command()[0] == 0
    data = rank_arguments(runs / "a")
    write_checkpoint(runs / "a" / "checkpoints", 4)
    for named in (False, True):
        code, screen, _ = command("--resume", text=named)
        assert code == 0
        assert f"resume: on {began}\n" in screen
        flag = "--train-data-path"
        resumed = rank_arguments(runs / "a")
        assert resumed[resumed.index(flag) + 1] == data[data.index(flag) + 1]

    other = shared / "other.txt"
    other.write_text("another text\n" * 400)
    code, _, errors = command("--resume", "--text", str(other), text=False)
    assert code == 2
    assert f"--text: expected {began}, which {runs / 'a'} began to train on, got {other}." in errors
    assert len(list((runs / "a" / "logs").iterdir())) == 3


RATES = ("--lr", "5e-4", "--min-lr", "1e-5")
OVERRIDE = "--override-opt_param-scheduler"


def test_a_resume_takes_over_what_the_run_was_started_with(command, runs):
    """What is given anew wins, and is named beside what it was; flags of one load are not kept."""
    options = ("--set", "moe_optim.format=bf16", "megatron_args.--seed=7")
    assert command(*options, megatron=(*SHORT, *RATES, "--finetune", "--ckpt-step", "3"))[0] == 0
    write_checkpoint(runs / "a" / "checkpoints", 4)
    code, screen, _ = command(
        "--resume", "--set", "moe_optim.health_interval=2", megatron=("--train-iters", "8")
    )
    assert code == 0
    argv = rank_arguments(runs / "a")
    assert argv[-8:] == ["--eval-interval", "2", *RATES, "--train-iters", "8"]
    assert argv[argv.index("--seed") + 1] == "7"
    fields = [argv[at + 1] for at, word in enumerate(argv) if word == "--moe-optim-set"]
    assert fields == ['format="bf16"', "health_interval=2"]
    assert not {"--finetune", "--ckpt-step"} & set(argv)
    named = [line for line in screen.splitlines() if ", where the run had " in line]
    assert named == [
        "resume: --train-iters: 8, where the run had 6",
        "resume: moe_optim.health_interval: 2, where the run had 0",
    ]


def test_a_resume_changes_over_from_iterations_to_samples(command, runs):
    """Megatron takes one of the two units; of three ways to tell a warm-up it takes one."""
    counted = ("--lr-decay-iters", "9", "--lr-warmup-iters", "1", *EVERY_SECOND)
    assert command(megatron=("--train-iters", "6", *counted))[0] == 0
    write_checkpoint(runs / "a" / "checkpoints", 4)
    samples = ("--train-samples", "96", "--lr-warmup-fraction", "0.1")
    assert command("--resume", megatron=samples)[0] == 0
    argv = rank_arguments(runs / "a")
    assert argv[-6:] == [*EVERY_SECOND, *samples]
    assert "--lr-decay-iters" not in argv


def test_another_rate_of_a_resumed_run_is_refused_unless_it_overrides_the_schedule(command, runs):
    """In Megatron's own words it is a KeyError, with the flag that overrides it, too."""
    assert command(megatron=(*SHORT, *RATES))[0] == 0
    write_checkpoint(runs / "a" / "checkpoints", 4)
    other = ("--lr", "1e-3")
    code, _, errors = command("--resume", megatron=other)
    assert code == 2
    assert errors == (
        "error: --lr: expected 5e-4, as the run was started, got 1e-3. Leave it out to go on as "
        f"before; to go on with another, add {OVERRIDE}.\n"
    )
    code, _, errors = command("--resume", "--stock", megatron=(*other, OVERRIDE))
    assert code == 2
    assert "to go on with another, train without --stock" in errors
    assert len(list((runs / "a" / "logs").iterdir())) == 1  # no rank was started
    assert command("--resume", megatron=(*other, OVERRIDE))[0] == 0
    assert rank_arguments(runs / "a")[-3:] == [*other, OVERRIDE]
    code, screen, _ = command("--resume", megatron=("--lr", "0.0005"))  # the same number
    assert code == 0
    assert ", where the run had " not in screen


def test_what_a_failed_resume_was_started_with_is_not_taken_over(command, runs):
    assert command(megatron=(*SHORT, *RATES))[0] == 0
    write_checkpoint(runs / "a" / "checkpoints", 4)
    changed = ("--seed", "8777")
    assert command("--resume", megatron=changed, behaviour="error")[0] == 1
    assert command("--resume", megatron=())[0] == 0
    assert "8777" not in rank_arguments(runs / "a")


def test_a_damaged_record_of_arguments_is_one_message(command, runs):
    assert command()[0] == 0
    write_checkpoint(runs / "a" / "checkpoints", 4)
    record = runs / "a" / "arguments.json"
    for harm in ("[", '{"set": []}', '{"set": [1], "megatron_args": [], "settings": {}}'):
        record.write_text(harm)
        code, _, errors = command("--resume")
        assert code == 2
        assert errors.startswith(f"error: {record}: expected the arguments of the run, got some")


def test_a_resume_without_a_checkpoint_is_refused(command):
    code, _, errors = command("--resume")
    assert code == 2
    assert "no complete checkpoint (it holds none at all)" in errors


def test_a_failed_rank_ends_in_one_message_with_the_way_on(command, runs):
    write_checkpoint(runs / "a" / "checkpoints", 4)
    code, _, errors = command("--resume", behaviour="error")
    assert code == 1
    message, log, way_on = errors.splitlines()
    assert message == (
        "error: rank 1 ended with exit code 1: "
        "--num-experts: expected a multiple of 4, got 6. Change it."
    )
    assert log == f"  Log: {runs}/a/logs/launch1/rank1.log"
    assert way_on == "  Continue from iteration 4 with --resume once that is changed."
    assert not (runs / "a" / "summary.json").exists()


def test_a_run_that_failed_on_its_way_is_continued_by_a_command(command, runs):
    """It had trained with this command, so the command may be as good again."""
    for options, way_on in (
        ((), "There is no checkpoint yet: start again"),
        (("--resume",), "Continue from iteration 1"),
    ):
        code, _, errors = command(*options, behaviour="late")
        assert code == 1
        last = errors.splitlines()[-1]
        assert last.startswith(f"  {way_on}: moe-optim train {RECIPE} --out {runs}/a")
        assert last.endswith(" -- --train-iters 6 --eval-interval 2")
        assert (" --resume " in last) == bool(options)
        if not options:
            write_checkpoint(runs / "a" / "checkpoints", 1)


def test_the_way_on_takes_another_schedule_where_that_was_the_fault(command, runs):
    write_checkpoint(runs / "a" / "checkpoints", 4)
    _, _, errors = command("--resume", behaviour="schedule")
    assert errors.splitlines()[-1].endswith("--eval-interval 2 --override-opt_param-scheduler")


def test_past_a_damaged_checkpoint_the_way_on_is_the_one_that_the_error_names(
    command, runs, monkeypatch
):
    """Where it names none there is none; and after one that it names, the newest counts again."""
    folder = runs / "a"
    damaged = write_checkpoint(folder / "checkpoints", 4)
    flip_in(damaged, "weight")

    def resume():
        with pytest.raises(StateError) as error:
            require_intact(damaged, thorough=True)
        monkeypatch.setenv("FAKE_ERROR", str(error.value))
        return command("--resume", behaviour="error")[2]

    errors = resume()
    assert "No other checkpoint beside it is complete: restore its files from a copy." in errors
    assert errors.splitlines()[-1] == f"  Log: {folder}/logs/launch1/rank1.log"

    write_checkpoint(folder / "checkpoints", 2)
    errors = resume()
    assert "Load iter_0000002 beside it, which is complete: --ckpt-step 2." in errors
    way_on = errors.splitlines()[-1]
    assert way_on.startswith("  Continue from iteration 2: moe-optim train ")
    assert way_on.endswith(" --ckpt-step 2")
    code, screen, _ = command("--resume", megatron=shlex.split(way_on.partition(" -- ")[2]))
    assert code == 0
    assert json.loads((folder / "summary.json").read_text())["resumed_from"] == 2
    assert "--ckpt-step" not in screen.partition("train longer")[2]


@pytest.mark.parametrize("behaviour", ["refuse", "error"])
def test_no_command_is_named_that_would_fail_again(command, runs, behaviour):
    """Ranks refuse with exit code 2, as argparse does; or they end before the first iteration."""
    code, _, errors = command(behaviour=behaviour)
    assert code == 1
    assert errors.splitlines()[-1] == (
        "  There is no checkpoint yet: start again once that is changed."
    )
    assert command()[0] == 0  # and the folder lets it
    write_checkpoint(runs / "a" / "checkpoints", 4)
    _, _, errors = command("--resume", behaviour=behaviour)
    assert errors.splitlines()[-1] == (
        "  Continue from iteration 4 with --resume once that is changed."
    )


def test_a_run_of_so_many_samples_is_made_longer_by_samples(command):
    """Megatron takes iterations or samples, and not both."""
    megatron = ("--train-samples", "96", *SHORT)  # the fake rank counts iterations alone
    longer = command(megatron=megatron)[1].partition("train longer")[2]
    assert "--train-samples 192" in longer


def test_all_wrong_flags_are_refused_at_once_before_a_rank_starts(command, runs, monkeypatch):
    """By Megatron's own parser and the plug-in's own checks; nothing is built for it."""
    monkeypatch.setattr(train, "PREFLIGHT", PREFLIGHT)
    wrong = ("--train-iter", "6", "--use-megatron-fsdp", "--context-parallel-size", "2")
    code, _, errors = command(megatron=wrong)
    assert code == 2
    first, *faults = errors.splitlines()
    assert first.startswith(f"error: {RECIPE} and flags after --: expected what Megatron")
    assert "  --train-iter: no such flag. Write --train-iters, the closest one." in faults
    for flag in ("--use-megatron-fsdp", "--context-parallel-size"):
        assert any(flag in fault for fault in faults)
    assert not (runs / "a" / "logs").exists()


def test_a_disk_that_fills_up_while_training_is_named(command, shared, tmp_path):
    with small_disk(tmp_path / "disk", "4m") as disk:
        code, _, errors = command(behaviour="full", out=disk / "a")
        assert code == 1
        said = rf"error: {disk}/a: rank \d failed: the disk is full \(0.0 MiB free\)"
        assert re.match(said, errors)
        assert not (disk / "a" / "summary.json").exists()


def test_a_disk_too_small_for_the_dataset_is_named(command, shared, tmp_path):
    large = shared / "large.txt"
    large.write_bytes(bytes(2**20))
    with small_disk(tmp_path / "disk", "1m") as disk:
        code, _, errors = command("--text", str(large), out=disk / "a", text=False)
        assert code == 1
        assert errors.startswith(f"error: {disk}/data: building the dataset failed: the disk is")
        assert not list((disk / "data").glob("bytes-*"))


def test_a_text_of_one_byte_over_and_over_has_an_entropy_of_zero_without_a_sign(command, shared):
    same = shared / "same.txt"
    same.write_bytes(bytes(2**14))
    _, screen, _ = command("--text", str(same), text=False)
    assert "byte entropy 0.000 nats/byte" in screen
    assert re.search(r"byte entropy +│ 0.0000 \(nats/byte", screen)


def test_data_of_the_users_own_needs_no_dataset_of_ours(command, runs, shared):
    code, screen, _ = command(megatron=("--train-iters", "2", "--mock-data"), text=False)
    assert code == 0
    assert "dataset" not in screen
    assert "--train-data-path" not in rank_arguments(runs / "a")
    assert json.loads((runs / "a" / "summary.json").read_text())["byte_entropy"] is None


@pytest.mark.parametrize("began_with", ["text", "--mock-data"])
def test_a_resume_does_not_change_over_between_text_and_megatrons_data(command, runs, began_with):
    """What is forgotten is taken over, lest it go on with the standard library; the other kind is
    refused, and so is a forgotten flag where nothing was recorded."""
    own = (*SHORT, "--mock-data")
    begin, change = (own, SHORT) if began_with == "--mock-data" else (SHORT, own)
    command(megatron=begin, text=began_with == "text")
    write_checkpoint(runs / "a" / "checkpoints", 4)
    if began_with == "--mock-data":
        assert command("--resume", megatron=change, text=False)[0] == 0
        assert "--mock-data" in rank_arguments(runs / "a")
        assert "--text and --mock-data both" in command("--resume", megatron=change)[2]
        (runs / "a" / "arguments.json").unlink()
    code, _, errors = command("--resume", megatron=change, text=False)
    assert code == 2
    assert f"{runs}/a began to train on" in errors
    named = "Megatron's flags after --" if began_with == "--mock-data" else str(runs.parent)
    assert named in errors and "another folder with --out" in errors
    assert command("--resume", megatron=begin, text=False)[0] == 0


def test_a_file_where_datasets_belong_is_one_message(command, tmp_path):
    parent = tmp_path / "other"
    parent.mkdir()
    (parent / "data").write_text("")
    code, _, errors = command(out=parent / "a")
    assert (code, errors) == (1, f"error: {parent}/data: File exists\n")


REFUSED = {
    "--ranks: expected 1 or more": (("--ranks", "0"), ()),
    "--set moe_optim.format: expected no knobs of the plug-in with --stock": (
        ("--stock", "--set", "moe_optim.format=bf16"),
        (),
    ),
    "--save: the run folder decides": ((), ("--save", "x")),
    "--yaml-cfg: expected flags, got a file": ((), ("--yaml-cfg", "x.yaml")),
    "--tensorboard-dir: the run folder": ((), ("--tensorboard-dir=x",)),
    "--load: --resume loads from": (("--resume",), ("--load", "x")),
    "--text and --mock-data both": ((), ("--mock-data",)),
    "text: expected more than 100000 bytes": ((), ("--seq-length", "100000")),
    "--text missing: no such file": (("--text", "missing"), ()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused_before_a_rank_starts(command, runs, message):
    options, megatron = REFUSED[message]
    code, _, errors = command(*options, megatron=megatron)
    assert code == 2
    assert message in errors
    assert not (runs / "a").exists()


def test_the_run_folder_is_named_after_the_recipe_by_default(monkeypatch, runs):
    monkeypatch.chdir(runs)
    monkeypatch.setattr(train, "_Training", Recorder)
    assert cli.main(["train", str(RECIPE)]) == 0
    assert (runs / "runs" / "quickstart").is_dir()


class Recorder:
    def __init__(self, *_):
        pass

    def run(self):
        return 0


def test_an_index_that_a_full_disk_cut_off_is_never_used(command, runs):
    """Megatron trusts any index it finds, so every launch starts without one."""
    cache = runs / "a" / "index_cache"
    cache.mkdir(parents=True)
    (cache / "index.npy").write_bytes(b"cut off")
    assert command()[0] == 0
    assert not cache.exists()
    shutil.rmtree(runs / "a")
