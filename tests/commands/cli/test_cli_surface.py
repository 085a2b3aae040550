"""The command line users script against: changing it has to change this file."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from moe_optim.commands.cli import main as cli
from moe_optim.errors import ConfigError, StateError

SURFACE = {  # command -> its positionals and options
    "compare": {"RUN", "--out"},
    "convert": {
        *("SRC", "DST", "--to", "--experts", "--from", "--glu-interleave"),
        *("--source-glu-interleave", "--tokenizer", "--transformer-impl"),
        *("--format", "--weights-only", "--rename", "--num-experts", "--workers"),
    },
    "disable": set(),
    "doctor": {"--json", "--patches"},
    "enable": set(),
    "export": {
        *("SRC", "DST", "--format", "--convention", "--input-scales", "--config", "--tokenizer"),
        *("--from", "--source-glu-interleave", "--workers"),
    },
    "inspect": {"CKPT", "--json", "--thorough", "--formats", "--workers"},
    "patch apply": {"PATH"},
    "patch check": {"PATH"},
    "patch revert": {"PATH"},
    "plan": {
        *("RECIPE", "--gpus", "--gpu", "--gpu-memory", "--bandwidth", "--memory-bandwidth"),
        *("--details", "--set", "--json"),
    },
    "recipes copy": {"NAME", "DIR"},
    "recipes list": {"--json"},
    "recipes show": {"NAME", "--json"},
    "report": {"RUN", "--out", "--at"},
    "run": {"--megatron-lm", "--recipe", "--dry-run", "SCRIPT", "ARGS"},
    "train": {
        *("RECIPE", "--out", "--set", "--formats", "--text"),
        *("--quiet", "--resume", "--ranks", "--cpu", "--stock"),
    },
    "verify": {"A", "B", "--json", "--weights-only", "--rename", "--num-experts", "--workers"},
}


def commands(parser=None, prefix=""):
    """Return the parser of every command; of those that have kinds, one for each kind."""
    parser = parser or cli.build_parser()
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        return {prefix: parser}
    found = {}
    for name, choice in groups[0].choices.items():
        found |= commands(choice, f"{prefix} {name}".strip())
    return found


def arguments(parser):
    return {
        name
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction)
        for name in action.option_strings or [action.metavar or action.dest]
    }


@pytest.fixture
def run_as(monkeypatch):
    """Return a function that replaces what `doctor` does."""

    def replace(run):
        monkeypatch.setattr("moe_optim.commands.cli.doctor.run", run)

    return replace


def test_commands_and_their_arguments_are_frozen_and_have_a_help_text():
    found = commands()
    assert {name: arguments(parser) for name, parser in found.items()} == SURFACE
    for parser in found.values():
        assert parser._actions and all(action.help for action in parser._actions)


WRONG = (  # words -> command whose usage is shown, what is said
    (["trian"], "", "'trian'"),
    (["doctor", "--js"], "doctor", "unrecognized arguments: --js. The closest: --json"),
    (["recipes", "--zzz"], "recipes", "unrecognized arguments: --zzz\n"),
    (["train"], "train RECIPE", "RECIPE"),
    (["run", "--dry-run"], "run", "the following arguments are required: SCRIPT\n"),
    (["verify", "a", "b", "--rename", "x"], "verify", "--rename: expected FROM=TO, prefixes of"),
    (["plan", "--gpu", "a100"], "plan", "'gb200', 'gb300')\n"),
    *(
        (
            [command, "run.yaml", "--lr", "1", "--", "--seed", "2"],
            f"{command} {recipe}",
            "unrecognized arguments: --lr 1. Arguments for Megatron go after --",
        )
        for command, recipe in (("train", "RECIPE"), ("plan", "[RECIPE]"))
    ),
)


def test_a_wrong_command_line_exits_with_2_and_the_usage_of_its_command(capsys):
    for words, usage, said in WRONG:
        with pytest.raises(SystemExit) as exit:
            cli.main(words)
        assert exit.value.code == 2
        found = capsys.readouterr().err
        assert found.startswith(f"usage: moe-optim {usage}")
        assert said in found


def test_double_dashes_end_options_and_the_arguments_of_megatron():
    for words, passed in (
        (["--"], []),
        (["--", "--"], []),
        (["--", "--seed", "2", "--"], ["--seed", "2"]),
    ):
        for command in ("train", "plan"):
            args = cli.build_parser(command).parse_args([command, "quickstart", *words])
            assert args.megatron_args == passed


LIGHT = [  # commands, and errors of commands, that need no tensor
    ["recipes"],
    ["recipes", "show", "quickstart"],
    ["plan", "quickstart", "--gpus", "2"],
    ["train", "quikstart"],
    ["inspect", "absent"],
    ["inspect", "."],
    ["convert", "absent", "there", "--to", "hf"],
    ["convert", ".", "there", "--to", "hf"],
    ["convert", "stored", "there", "--experts", "hf"],
    ["convert", "stored", "there", "--experts", "hf", "--format", "safetensors"]
    + ["--glu-interleave", "4"],
    ["export", "absent", "there", "--format", "mxfp8"],
    ["export", "stored", "there", "--format", "nvfp4", "--convention", "deepseek"],
    ["verify", "absent", "there"],
    ["patch", "check", "absent"],
    ["report", "absent"],
    ["compare", "absent", "there"],
]
LIGHT_RUN = """
import sys
from moe_optim.commands.cli.main import main
for words in {commands!r}:
    main(words)
    print("imported:", words, sorted({{"torch", "megatron.core"}} & set(sys.modules)))
"""


def test_commands_and_errors_that_need_no_tensor_import_no_torch(tmp_path):
    """They answer before its import would have ended, which takes seconds."""
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored/.metadata").touch()
    command = [sys.executable, "-c", LIGHT_RUN.format(commands=LIGHT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("imported:")]
    assert lines == [f"imported: {words} []" for words in LIGHT], done.stderr


def test_the_exit_code_is_that_of_the_command_and_an_error_of_ours_is_one_line(run_as, capsys):
    run_as(lambda args: 7)
    assert cli.main(["doctor"]) == 7
    for error in (ConfigError, StateError):

        def refuse(args, error=error):
            raise error("run.yaml: expected this, got that.")

        run_as(refuse)
        assert cli.main(["doctor"]) == 2
        assert capsys.readouterr().err == "error: run.yaml: expected this, got that.\n"
    run_as(lambda args: 1 // 0)  # a fault of the program is not dressed up
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_what_the_system_refuses_is_one_line_and_exits_with_1():
    """A full disk behind stdout."""
    command = [sys.executable, "-m", "moe_optim.commands.cli.main", "recipes"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_an_interrupt_exits_with_130(run_as, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    run_as(interrupt)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
