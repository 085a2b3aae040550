"""What is recorded of the ten rows, case by case and run by run."""

import json

import pytest

from tools.upstream import rows

CASES = """
import pytest
FIXED = False
both = pytest.mark.parametrize("name", ["bf16, fused", "bf16, through autograd"])

@both
def test_launches(name, record_property):
    record_property("run", {"row": name, "ranks": 2, "single": True, "losses": {1: 0.1}})

@pytest.mark.parametrize("single", [True], ids=["one tensor"])
@both
def test_differs(name, single, record_property):
    record_property("run", {"row": "bf16, fused", "ranks": 2, "single": False, "losses": {}})
    assert name == "bf16, through autograd" or FIXED, "other bytes"
"""
SKIPPED = """
@both
def test_skipped(name):
    pytest.skip("needs Transformer Engine")
"""
SPREAD = """
import os
import pytest

@pytest.mark.parametrize("name", ["bf16, fused", "mxfp8, fused", "bf16, through autograd"])
@pytest.mark.parametrize("single", [True, False])
def test_launches(name, single, record_property):
    worker = os.environ["PYTEST_XDIST_WORKER"]
    record_property("run", {"row": name, "ranks": 2, "worker": worker})
"""
CUT_OFF = """
@both
def test_cut_off(name):
    if name == "bf16, through autograd" and not FIXED:
        pytest.exit("enough")

@both
def test_comes_last(name):
    pass
"""


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Return what runs made-up cases, and returns exit status and record."""

    def run(cases, *options):
        tests, report = tmp_path / "test_made_up.py", tmp_path / "report.json"
        tests.write_text(cases)
        monkeypatch.setattr(rows, "TESTS", tests)
        status = rows.main(["--json", str(report), *options])
        return status, json.loads(report.read_text())

    return run


def test_a_run_that_is_cut_off_says_what_passed_failed_trained_and_has_not_run(recorded):
    """Cases go to the row that they name, runs to the row that they trained."""
    status, report = recorded(CASES + SKIPPED + CUT_OFF)
    assert (status, report["ranks"]) == (1, 2)
    assert [*report["rows"]] == ["bf16, fused", "bf16, through autograd"]
    fused, through_autograd = report["rows"].values()
    assert fused["cases"] == {
        "test_launches[bf16, fused]": "passed",
        "test_differs[bf16, fused-one tensor]": "failed",
        "test_skipped[bf16, fused]": "skipped",
        "test_cut_off[bf16, fused]": "passed",
        "test_comes_last[bf16, fused]": "passed",
    }
    outcomes = ["passed", "passed", "skipped", "failed", "not run"]
    assert [*through_autograd["cases"].values()] == outcomes
    failure = {"test_differs[bf16, fused-one tensor]": "AssertionError: other bytes"}
    assert fused["failures"] == failure
    assert through_autograd["failures"].keys() == {"test_cut_off[bf16, through autograd]"}
    launched = {"single": True, "losses": {"1": 0.1}}
    assert through_autograd["runs"] == [launched]
    assert fused["runs"] == [launched, {"single": False, "losses": {}}]  # of both rows' cases


def test_the_rest_of_a_record_is_what_has_not_passed(recorded):
    """Cases that passed do not run again, and keep the runs that they trained."""
    _, before = recorded(CASES + CUT_OFF)
    status, after = recorded((CASES + CUT_OFF).replace("FIXED = False", "FIXED = True"), "--rest")
    assert status == 0
    for name, row in after["rows"].items():
        assert {*row["cases"].values()} == {"passed"}
        assert row["cases"].keys() == before["rows"][name]["cases"].keys()
        assert row["runs"] == before["rows"][name]["runs"]
        assert not row["failures"]
    command = before["command"]
    assert after["command"] == f"{command}, {command} --rest"
    assert recorded(CASES, "--rest") == (0, after)  # nothing is left


def test_only_a_run_in_which_something_passes_and_nothing_fails_exits_with_zero(recorded):
    head, _, _ = CASES.partition("@pytest.mark.parametrize")
    assert recorded(head)[0] == 0
    assert recorded(head.partition("@both")[0] + SKIPPED)[0] == 1


def test_the_cases_of_a_row_stay_with_one_worker(recorded):
    """They share runs, which each worker would launch again."""
    _, report = recorded(SPREAD, "-n", "2")
    by_row = [{run["worker"] for run in row["runs"]} for row in report["rows"].values()]
    assert [len(workers) for workers in by_row] == [1, 1, 1]
    assert set.union(*by_row) == {"gw0", "gw1"}
