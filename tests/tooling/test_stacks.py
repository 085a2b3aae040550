"""Ranks of training stacks, forked from one process, and what is told of one that stops."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tools.stacks import __main__ as command_line
from tools.stacks.__main__ import main
from tools.stacks.bridge import Case
from tools.stacks.environment import PACKAGES, ROOT, TESTS, install_packages
from tools.stacks.ranks import STOPPED
from tools.stacks.ranks import run_ranks as fork_ranks
from tools.stacks.stand_ins import STAND_INS


def _sum_of_ranks(name):
    if not name:
        raise KeyError("a stack stops here")
    print("said by", os.environ["RANK"])
    dist.init_process_group("gloo")
    mine = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(mine)
    return {name: mine.item()}


def _fork(folder):
    return [fork_ranks(2, folder / name, _sum_of_ranks, name) for name in ("sum", "")]


def test_ranks_give_the_first_ones_result_or_where_they_stopped(tmp_path):
    ((seen, stopped),) = run_ranks(1, _fork, tmp_path)
    assert seen == {"sum": 3}
    place, _, reason = stopped[STOPPED].partition(": ")
    assert place.startswith("tests/tooling/test_stacks.py:")
    assert reason == "KeyError: 'a stack stops here'"
    assert (tmp_path / "sum/1.log").read_text() == "said by 1\n"


def test_a_stack_has_tests_and_stand_ins():
    assert TESTS.keys() == STAND_INS.keys()
    assert all(
        (ROOT / "tests/upstream" / name).is_file() for names in TESTS.values() for name in names
    )


def _commit(folder, content):
    (folder / "code.py").write_text(content)
    name = ["-c", "user.name=one", "-c", "user.email=one@example.org"]
    for words in (["init", "-q"], ["add", "."], [*name, "commit", "-qm", "Add code"]):
        subprocess.run(["git", "-C", folder, *words], check=True)


def test_its_tests_are_given_the_newest_commit_of_a_repository(tmp_path, monkeypatch):
    """With one command, that tells where the code is, and of what it imports."""
    for name in ("megatron", "src", "packages"):
        (tmp_path / name / "core/datasets").mkdir(parents=True)
        for part in ("part.py", "Makefile"):
            (tmp_path / name / "core/datasets" / part).touch()
    _commit(tmp_path, "code = 1\n")
    started, run = [], subprocess.run

    def watch(command, **options):
        if "pytest" not in command:
            return run(command, **options)
        variables = options["env"]
        code = Path(variables["VERL_PATH"], "code.py").read_text()
        bridge, *packages = variables["MEGATRON_BRIDGE_PATH"].split(":")
        parts = [Path(bridge), Path(variables["PYTHONPATH"].split(":")[0], "megatron")]
        assert all((part / "core/datasets/part.py").is_file() for part in parts)
        names = sorted(path.stem.split(".")[0] for path in parts[1].glob("core/datasets/*"))
        assert names == ["helpers_cpp", "part"]  # the installed one, and nothing to compile
        assert not (parts[1].parent / "code.py").exists()
        started.append((command[-2:], code, packages))
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(subprocess, "run", watch)
    monkeypatch.setattr(command_line, "install_packages", lambda _: None)
    words = ["verl", "--install", str(tmp_path / "packages")]
    for option in ("--source", "--megatron", "--bridge"):
        words += [option, str(tmp_path / ".git")]
    assert main(words) == 3
    tests = ["tests/upstream/test_verl.py", "tests/upstream/test_verl_engine.py"]
    assert started == [(tests, "code = 1\n", [str(tmp_path / "packages")])]


def test_a_stack_without_its_code_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["slime"])
    assert "slime: expected --source" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--source", "--install", "--megatron", "--bridge"])
def test_code_that_bridge_would_not_run_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        main(["bridge", option, "nowhere"])
    assert "bridge: expected --path" in capsys.readouterr().err


def test_packages_are_installed_once_and_folders_with_others_refused(tmp_path, monkeypatch):
    """Also into an empty folder; one that lacks a package would change what the tests run."""
    commands = []

    def install(command, **_):
        commands.append(command)
        for package in (word for word in command if "==" in word):
            info = tmp_path / f"{package.replace('==', '-')}.dist-info"
            info.mkdir()
            name, _, version = package.partition("==")
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )

    monkeypatch.setattr(subprocess, "run", install)
    for _ in range(2):
        install_packages(tmp_path)
        assert len(commands) == 2
    missing = PACKAGES[0]
    shutil.rmtree(tmp_path / f"{missing.replace('==', '-')}.dist-info")
    with pytest.raises(ValueError, match=re.escape(f"expected {missing}, got a folder with")):
        install_packages(tmp_path)
    assert len(commands) == 2


def _record(command, **case):
    header = {"command": command, "commit": command[0], "device": "a CPU", "versions": "2"}
    return header | {"cases": [{"recipe": "one", "format": "bf16", "ranks": 1} | case]}


def test_a_record_done_in_parts_has_the_commands_and_commits_of_all_its_cases(tmp_path):
    """And of those alone: a run that repeats all cases replaces the header, too."""
    first, second = _record("first"), _record("second", ranks=2)
    path = tmp_path / "record.json"
    assert command_line._kept(path, [Case("one", "bf16", 2)], second) == {}
    path.write_text(json.dumps(first))
    kept = command_line._kept(path, [Case("one", "bf16", 2)], second)
    both = command_line._joined(kept, second)
    assert (both["command"], both["commit"]) == ("first, second", "f, s")
    assert both["cases"] == [*first["cases"], *second["cases"]]
    again = _record("third") | {"versions": "3"}
    kept = command_line._kept(path, [Case("one", "bf16", 1)], again)
    assert command_line._joined(kept, again) == again


@pytest.mark.parametrize("key", ["device", "versions"])
def test_cases_kept_from_another_machine_or_version_are_refused(key, tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(_record("one")))
    with pytest.raises(ValueError, match=rf"record\.json: {key}: expected .*, got another\. Name"):
        command_line._kept(path, [Case("one", "bf16", 2)], _record("two") | {key: "another"})
