"""An output path that cannot be written is refused before the work, by every command alike."""

import os
import re

import pytest

from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.commands.cli import main as cli
from moe_optim.errors import ConfigError
from tests.support.training_runs.report_runs import LOSSES, write_run

KINDS = ("a file", "a folder", "a new folder")
REFUSED = {  # path, what it is going to be -> what is found
    ("folder", "a file"): "a folder",
    ("none/new", "a file"): "no folder {here}/none",
    ("file/new", "a file"): "no folder {here}/file",
    ("file", "a folder"): "a file",
    ("link", "a folder"): "a file",
    ("file/new", "a folder"): "no folder {here}/file",
    ("folder", "a new folder"): "a folder",
    ("file", "a new folder"): "a file",
    ("link", "a new folder"): "a file",
    ("file/new", "a new folder"): "no folder {here}/file",
}


@pytest.fixture
def here(tmp_path):
    """A folder with a folder, a file, and a link to nothing."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nothing")
    return tmp_path


@pytest.mark.parametrize(("path", "kind"), REFUSED)
def test_a_path_that_is_taken_is_refused_with_what_is_there(here, path, kind):
    found = REFUSED[path, kind].format(here=here)
    said = f"{here / path}: expected {kind} to write, got {found}. Choose another path."
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        require_writable(None, here / path, expected=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_without_permission_is_named(here, kind, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, _: path != here / "folder")
    with pytest.raises(ConfigError, match=f"no permission to write in {here}/folder. Choose"):
        require_writable(here / "folder" / "new", expected=kind)
    require_writable(here / "new", expected=kind)


def test_every_command_says_it_alike(here, monkeypatch, capsys):
    run = str(write_run(here / "run", LOSSES))
    other = str(write_run(here / "other", LOSSES))
    monkeypatch.chdir(here)
    for words in (["report", run], ["compare", run, other], ["train", "quickstart", "--cpu"]):
        assert cli.main([*words, "--out", "file"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said == "error: file: expected a folder to write, got a file. Choose another path."
    assert cli.main(["plan", "quickstart", "--json", "folder"]) == 2
    said = capsys.readouterr().err
    assert said == "error: folder: expected a file to write, got a folder. Choose another path.\n"
