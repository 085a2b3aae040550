"""Hides an installed package from this process, before anything of Megatron is imported."""

import sys
from collections.abc import Iterable
from typing import Any

HIDDEN = "emerging_optimizers"


class Without:
    """Finder of modules and distributions that does not find :data:`HIDDEN`."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == HIDDEN:
            return None
        return self._finder.find_spec(name, path, target)

    def find_distributions(self, context: Any) -> Iterable[Any]:
        name = (context.name or "").lower().replace("-", "_")
        find = getattr(self._finder, "find_distributions", None)
        return () if find is None or name == HIDDEN else find(context)


def hide() -> None:
    """Hide the package for the rest of this process."""
    assert not {HIDDEN, "megatron"} & {name.partition(".")[0] for name in sys.modules}
    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
