"""Recipes go along with the package: by name where a path can be, and as copies to change."""

from pathlib import Path

import pytest

from moe_optim.commands.cli import main as cli
from moe_optim.config.recipes import load_recipe, shipped_recipes

ROOT = Path(__file__).parents[2]
IN_REPOSITORY = {path.stem: path for path in (ROOT / "recipes").glob("*.yaml")}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_name_stands_for_the_recipe_with_its_bases():
    for name, path in IN_REPOSITORY.items():
        got, want = load_recipe(name), load_recipe(path)
        assert got.path == shipped_recipes()[name]
        assert [file.name for file in got.files] == [file.name for file in want.files]
        assert got.megatron_argv() == want.megatron_argv()
        assert (got.requires, got.moe_optim) == (want.requires, want.moe_optim)


def test_a_file_of_that_name_wins_and_a_folder_does_not():
    """`--out quickstart` may have made it."""
    Path("quickstart").mkdir()
    assert load_recipe("quickstart").ranks == 2
    Path("quickstart").rmdir()
    Path("quickstart").write_text("requires: {ranks: 7}\n")
    assert load_recipe("quickstart").ranks == 7


def test_a_recipe_is_shown_with_its_bases_merged(capsys):
    """What is printed loads as the same recipe."""
    assert cli.main(["recipes", "show", "quickstart_bf16"]) == 0
    text = capsys.readouterr().out
    Path("shown.yaml").write_text(text)
    shown, shipped = load_recipe("shown.yaml"), load_recipe("quickstart_bf16")
    assert shown.megatron_argv() == shipped.megatron_argv()
    assert (shown.requires, shown.moe_optim) == (shipped.requires, shipped.moe_optim)


def test_a_copy_takes_its_bases_along_and_loads(capsys):
    Path("mine").mkdir()
    assert cli.main(["recipes", "copy", "quickstart_bf16", "mine"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == ["copied: mine/quickstart.yaml", "copied: mine/quickstart_bf16.yaml"]
    assert load_recipe("mine/quickstart_bf16.yaml").moe_optim.format == "bf16"


@pytest.mark.parametrize("kind", ["file", "link that leads nowhere"])
def test_a_copy_never_replaces_anything(kind, capsys):
    """Nor does it write the other files then; what is there already is left."""
    path = Path("quickstart_bf16.yaml")
    path.write_text("mine") if kind == "file" else path.symlink_to("nowhere")
    assert cli.main(["recipes", "copy", "quickstart_bf16"]) == 2
    assert "expected no file, or the unmodified recipe" in capsys.readouterr().err
    assert list(Path().iterdir()) == [path]
    assert kind != "file" or path.read_text() == "mine"
    for said in ("copied", "there already"):
        assert cli.main(["recipes", "copy", "quickstart"]) == 0
        assert capsys.readouterr().out == f"{said}: quickstart.yaml\n"
