"""Which text is found, and how it is divided."""

import os

import pytest

from moe_optim.commands.train.dataset import find_text
from moe_optim.errors import ConfigError


def write(path, text="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def names(files):
    return [file.name for file in files]


def test_folders_are_searched_to_the_bottom_for_any_extension(tmp_path):
    for name in ("b.py", "a/deep/er.md", "a/none"):
        write(tmp_path / name)
    for name in (".git/config", "a/.hidden", "a/__pycache__/b.pyc"):
        write(tmp_path / name)
    write(tmp_path / "empty", "")
    assert names(find_text([tmp_path])) == ["a/deep/er.md", "a/none", "b.py"]
    assert len(find_text([tmp_path / "b.py", tmp_path, tmp_path / "a"])) == 3  # each once


def test_a_path_without_text_is_refused_by_name(tmp_path):
    empty, pipe = write(tmp_path / "sub" / "empty", ""), tmp_path / "fifo"
    os.mkfifo(pipe)
    for path in (tmp_path / "missing", empty, empty.parent, pipe):
        with pytest.raises(ConfigError, match=f"--text {path}: expected "):
            find_text([path])
