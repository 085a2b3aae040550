"""An output path that cannot be written is refused before the work, by every command alike."""

import re

import pytest

from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.errors import ConfigError

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
    said = f"{here / path}: expected {kind} to write, got {found}. Name another."
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        require_writable(None, here / path, expected=kind)
