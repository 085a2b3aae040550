"""Recipes installed with the package, by name."""

from collections.abc import Mapping
from pathlib import Path

from moe_optim.errors import closest

FOLDER = Path(__file__).with_name("recipe_files")
"""Folder of the recipes; in a checkout, a link to ``recipes/``."""


def shipped_recipes() -> Mapping[str, Path]:
    """Return name and file of every shipped recipe, sorted."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def find_recipe(recipe: str | Path) -> Path:
    """Return the file for ``recipe``, an existing path or else the name of a shipped recipe.

    Anything else is returned as a path.
    """
    shipped = shipped_recipes().get(str(recipe))
    return shipped if shipped and not Path(recipe).is_file() else Path(recipe)


def suggest_shipped(wrong: str | Path) -> str:
    """Return a question after the recipe that ``wrong`` is close to, else all names."""
    shipped = shipped_recipes()
    meant = closest(Path(wrong).stem, shipped)
    return f"Did you mean {meant}?" if meant else f"Shipped recipes: {', '.join(shipped)}."
