"""Bugs that somebody could write, and the tests that notice each of them.

``python -m tests.mutation`` puts one at a time into a copy of the package, never into the checkout,
runs the tests named with it, and prints which failed. It ends with 1 where a bug survives, where
tests fail without it, and where the code of a bug is no longer found exactly once. Run by hand.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A bug in one place.

    Args:
        file: below ``moe_optim``.
        old: source text, found once in it.
        new: what takes its place.
        killers: pytest's names of tests, of which at least one fails then.
    """

    file: str
    old: str
    new: str
    killers: tuple[str, ...]

    def __str__(self) -> str:
        """Return the place and the line that is replaced, as far as it fits."""
        line = " ".join(self.old.split())
        return f"{self.file}: {line[:70]}"
