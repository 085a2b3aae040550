"""``python -m tests.mutation`` finds the place and the tests of every bug that it puts back."""

from pathlib import Path

import pytest

from tests.mutation.__main__ import ALL

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", ALL, ids=str)
def test_the_place_of_a_mutant_is_found_once_and_its_tests_exist(mutant):
    """Where this fails, code has moved: change the mutant with it, or take another."""
    source = (ROOT / "moe_optim" / mutant.file).read_text()
    assert source.count(mutant.old) == 1
    compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")
    assert mutant.killers
    for killer in mutant.killers:
        file, _, test = killer.partition("::")
        text = (ROOT / file).read_text()
        assert not test or f"def {test.partition('[')[0]}(" in text
