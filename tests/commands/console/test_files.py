"""A file is written whole or not at all."""

import errno

import pytest

from moe_optim.commands.console.files import full_disk_explained, require_writable, write_atomically
from moe_optim.errors import ConfigError
from tests.support.training_runs.runs import small_disk


def test_a_full_disk_leaves_the_old_file_and_says_what_to_do(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        write_atomically(disk / "summary.json", b"old")
        with pytest.raises(OSError) as raised:
            write_atomically(disk / "summary.json", bytes(2**20))
        assert raised.value.errno == errno.ENOSPC
        message = raised.value.strerror
        assert message.startswith(f"{disk / 'summary.json'}: writing summary.json failed: the disk")
        assert "MiB free" in message
        assert "--out" in message
        assert [path.name for path in disk.iterdir()] == ["summary.json"]
        assert (disk / "summary.json").read_bytes() == b"old"


def test_other_errors_are_left_as_they_are(tmp_path):
    with pytest.raises(FileNotFoundError), full_disk_explained(tmp_path, "reading"):
        (tmp_path / "missing").read_text()


def test_what_could_not_be_written_is_refused_before_the_work(tmp_path):
    """A folder in its place, or no folder to put it in; nothing is created by asking."""
    require_writable(None, tmp_path / "new.json")
    with pytest.raises(ConfigError, match=f"{tmp_path}: expected a file to write, got a folder"):
        require_writable(tmp_path / "new.json", tmp_path)
    with pytest.raises(ConfigError, match=f"got no folder {tmp_path / 'none'}"):
        require_writable(tmp_path / "none" / "new.json")
    assert not list(tmp_path.iterdir())
