"""A file is written whole or not at all."""

import errno

import pytest

from moe_optim.commands.console.files import full_disk_explained, write_atomically
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
