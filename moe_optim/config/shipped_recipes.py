"""The recipes that are installed with the package, by name."""

from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).with_name("recipe_files")
"""Where they lie; in a checkout, a link to ``recipes/``."""


def shipped_recipes() -> Mapping[str, Path]:
    """Return the name and the file of every shipped recipe, sorted."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def find_recipe(recipe: str | Path) -> Path:
    """Return the file that a path or a name stands for.

    Args:
        recipe: the path of a file, or where no such file is, the name of a shipped recipe. What is
            neither comes back as a path.
    """
    shipped = shipped_recipes().get(str(recipe))
    return shipped if shipped and not Path(recipe).is_file() else Path(recipe)
