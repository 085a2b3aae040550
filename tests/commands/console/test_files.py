"""A file is written whole or not at all."""

import errno

import pytest

from moe_optim.commands.console.files import write_atomically
from tests.support.training_runs.runs import small_disk


def test_a_full_disk_leaves_the_old_file_and_names_it(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        write_atomically(disk / "summary.json", b"old")
        with pytest.raises(OSError) as raised:
            write_atomically(disk / "summary.json", bytes(2**20))
        assert raised.value.errno == errno.ENOSPC
        assert raised.value.filename == str(disk / "summary.json")
        assert [path.name for path in disk.iterdir()] == ["summary.json"]
        assert (disk / "summary.json").read_bytes() == b"old"
