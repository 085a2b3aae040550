"""Documents say what the code says."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from moe_optim.config import MoEOptimConfig, available_values, spell
from moe_optim.megatron.patches import PATCHES

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "README.md",
    "CHANGELOG.md",
    "recipes/README.md",
    "patches/README.md",
    "patches/megatron-lm-0.19/README.md",
    "moe_optim/kernels/README.md",
    "moe_optim/megatron/README.md",
    "moe_optim/reference/README.md",
)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_every_patch_is_documented_word_for_word(patch):
    target = patch.target.removeprefix("megatron.")
    row = f"| `{patch.id}` | `{target}` | {patch.because} | {patch.remove_when} |"
    assert row in (ROOT / "patches" / "README.md").read_text()


def test_no_patch_is_documented_that_does_not_exist():
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "patches" / "README.md").read_text(), re.M)
    assert rows == [patch.id for patch in PATCHES]


@pytest.mark.parametrize(("name", "default"), asdict(MoEOptimConfig()).items())
def test_every_knob_stands_in_the_recipe_table_with_its_values_and_default(name, default):
    """The table of knobs lists what this version takes, no more and no less."""
    text = (ROOT / "recipes" / "README.md").read_text()
    ((values, stated),) = re.findall(rf"^\| `{name}` \| (.*?) \| `(.*?)` \|$", text, re.M)
    assert re.findall("`(.*?)`", values) == [spell(value) for value in available_values(name)]
    assert stated == spell(default)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / link).exists(), link


@pytest.mark.parametrize("command", ["train", "test"])
def test_the_commands_of_the_readme_exist(command):
    assert f"make {command}" in (ROOT / "README.md").read_text()
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M)
