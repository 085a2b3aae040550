"""Two runs of the same tests, without and with a plug-in, are compared case by case."""

import io
import json

from rich.console import Console

from tools.upstream import side_by_side
from tools.upstream.side_by_side import Case, Comparison, Selection, exit_status, show

SELECTION = Selection(file="test_made_up.py", knobs="format=bf16")
CASES = """
import os, time, pytest
BROKEN, RANK = "BROKEN" in os.environ, os.environ["RANK"]

@pytest.mark.skip(reason="wants sm_100")
def test_skipped():
    pass

def test_fails_everywhere():
    raise ValueError("wants 8 ranks")

def test_differs():
    assert not BROKEN, "other bytes"

def test_rank_dies():
    if BROKEN and RANK == "1":
        os._exit(7)

@pytest.fixture
def hanging():
    yield
    if BROKEN and RANK == "0":
        time.sleep(600)

def test_hangs(hanging):
    pass

def test_comes_last():
    pass
"""


def printed(comparison):
    file = io.StringIO()
    show([comparison], Console(file=file, width=160, soft_wrap=True))
    return file.getvalue()


def test_equal_outcomes_are_no_difference_and_what_stock_cannot_run_does_not_count():
    stock = {"same": Case(), "unable": Case("failed", "wants 8 ranks"), "able": Case("skipped")}
    plug_in = stock | {"able": Case()}
    comparison = Comparison(SELECTION, stock, plug_in)
    assert comparison.counted() == ["same"]
    assert exit_status([comparison]) == 0
    assert "not counted: unable: failed: wants 8 ranks\n" in printed(comparison)
    assert "not counted: able: skipped: ; plug-in: passed\n" in printed(comparison)


def test_a_case_that_stock_passes_by_chance_is_listed_and_never_counts(monkeypatch):
    monkeypatch.setattr(side_by_side, "CHANCE", {"racing": "two streams"})
    comparison = Comparison(
        SELECTION,
        {"same": Case(), "racing": Case()},
        {"same": Case(), "racing": Case("failed", "assert 0.5 == 1")},
    )
    assert (comparison.counted(), exit_status([comparison])) == (["same"], 0)
    assert "not counted: racing: passed: two streams; plug-in: failed\n" in printed(comparison)


def test_a_case_that_never_ran_with_the_plugin_is_a_difference():
    comparison = Comparison(SELECTION, {"same": Case(), "gone": Case()}, {"same": Case()})
    assert list(comparison.differences()) == ["gone"]
    assert exit_status([comparison]) == 1


def test_a_run_in_which_nothing_counts_proves_nothing():
    side = {"unable": Case("failed", "wants 8 ranks")}
    assert exit_status([Comparison(SELECTION, side, side)]) == 1


def test_what_fails_dies_or_hangs_with_the_plugin_alone_is_a_difference_of_that_case(
    tmp_path, monkeypatch, capsys
):
    """Made-up tests stand for upstream's, a variable for our plug-in. The cases after one in which
    a rank dies run nevertheless, and the worst rank decides."""
    folder = tmp_path / "checkout/tests/unit_tests"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "breaking.py").write_text("import os\nos.environ['BROKEN'] = ''\n")
    (folder / SELECTION.file).write_text(CASES)
    plugins = ("outcome_lines", "tests.unit_tests.breaking")
    monkeypatch.setattr(side_by_side, "SELECTIONS", (SELECTION,))
    monkeypatch.setattr(side_by_side, "SIDES", {"stock": plugins[:1], "plug-in": plugins})
    report = tmp_path / "report.json"
    options = ["--ranks", "2", "--timeout", "4", "--json", str(report), "--logs", str(tmp_path)]
    assert side_by_side.main(["--megatron-lm", str(tmp_path / "checkout"), *options]) == 1

    (file,) = json.loads(report.read_text())["files"]
    stock, plug_in = (
        {name.partition("::test_")[2]: case["outcome"] for name, case in file[side].items()}
        for side in ("stock", "plug_in")
    )
    unable = {"skipped": "skipped", "fails_everywhere": "failed"}
    counted = dict.fromkeys(("differs", "rank_dies", "hangs", "comes_last"), "passed")
    assert stock == unable | counted
    assert plug_in == stock | {"differs": "failed", "rank_dies": "died", "hangs": "died"}
    said = capsys.readouterr().out
    assert "1 skipped, 1 failed, 4 passed" in said
    assert "not counted: test_made_up.py::test_skipped: skipped: Skipped: wants sm_100\n" in said
    assert "DIFFERS: test_made_up.py::test_differs: failed: AssertionError: other bytes\n" in said
    assert "test_rank_dies: died: rank 1 ended with exit code 7" in said
    assert "test_hangs: died: rank 0 did not end it within 4 s" in said
    assert said.count("DIFFERS") == 3
