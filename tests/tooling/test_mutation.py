"""`python -m tests.mutation` finds its bugs' places, and says of each whether some test noticed."""

import pytest

from tests.mutation import Mutant, runner
from tests.mutation.__main__ import ALL
from tests.support.training_runs.runs import REPOSITORY


@pytest.mark.parametrize("mutant", ALL, ids=str)
def test_the_place_of_a_mutant_is_found_once_and_its_tests_exist(mutant):
    """Where this fails, code has moved: change the mutant with it, or take another."""
    source = (REPOSITORY / "moe_optim" / mutant.file).read_text()
    assert source.count(mutant.old) == 1
    compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")
    assert mutant.killers
    for killer in mutant.killers:
        file, _, test = killer.partition("::")
        text = (REPOSITORY / file).read_text()
        assert not test or f"def {test.partition('[')[0]}(" in text


@pytest.fixture
def checkout(tmp_path):
    """A package with one function, and a test that looks at a part of it."""
    files = {
        "moe_optim/__init__.py": "",
        "moe_optim/sign.py": "def sign(x):\n    return 1 if x > 0 else -1 if x < 0 else 0\n",
        "tests/test_sign.py": (
            "import pytest\nfrom moe_optim.sign import sign\n\n"
            "@pytest.mark.parametrize('x', [1, 2], ids=['one', 'two or so'])\n"
            "def test_positive(x):\n    assert sign(x) == 1\n"
        ),
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("old", "new", "word", "by"),
    [
        ("1 if x > 0", "1 if x > 1", "killed", "tests/test_sign.py::test_positive[one]"),
        ("1 if x > 0", "1 if x != 2", "killed", "tests/test_sign.py::test_positive[two or so]"),
        ("-1 if x < 0", "1 if x < 0", "survived", "passed: tests/test_sign.py"),
        ("x >= 0", "x > 1", "stale", "expected its code once, found it 0 times"),
        ("x", "y", "stale", "expected its code once, found it 3 times"),
    ],
    ids=["killed", "killed by a case with spaces", "survived", "gone", "ambiguous"],
)
def test_what_became_of_a_mutant(old, new, word, by, checkout):
    """In a copy: the checkout stays as it is."""
    before = (checkout / "moe_optim" / "sign.py").read_text()
    verdict = runner.judge(checkout, Mutant("sign.py", old, new, ("tests/test_sign.py",)))
    assert (verdict.word, verdict.by) == (word, by)
    assert verdict.is_killed is (word == "killed")
    assert (checkout / "moe_optim" / "sign.py").read_text() == before
    assert runner.run_tests(checkout, ["tests/test_sign.py"]) == []


def test_a_mutant_that_is_no_program_is_not_called_killed(checkout):
    mutant = Mutant("sign.py", "def sign(x):", "def sign(x)", ("tests/test_sign.py",))
    with pytest.raises(RuntimeError, match="SyntaxError"):
        runner.judge(checkout, mutant)
