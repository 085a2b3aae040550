"""What a package's README says of its files is said of all of them."""

from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "moe_optim"
READMES = sorted(PACKAGE.rglob("README.md"))


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_a_readme_names_every_file_and_folder_beside_it(readme):
    beside = {path.name for path in readme.parent.glob("*.py")} - {"__init__.py"}
    beside |= {f"{path.parent.name}/" for path in readme.parent.glob("*/__init__.py")}
    text = readme.read_text()
    assert {name for name in beside if f"`{name}`" not in text} == set()
