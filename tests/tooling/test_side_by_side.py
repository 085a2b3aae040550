"""Records of upstream's tests beside the plug-in."""

import pytest

from tools.upstream.side_by_side import Case, Comparison, Selection, exit_status, merge

FILE = "transformer/moe/test_grouped_mlp.py"


def record(*files: str, commit: str = "a", **changed: object) -> dict[str, object]:
    made = [{"selection": {"file": file}, "commit": commit} for file in files]
    alike = {"device": "CPU", "versions": {"torch": "2.11.0"}, "ranks": 2} | changed
    return {"command": f"run {commit}", "commit": commit, **alike, "files": made}


def test_a_kept_record_has_the_later_outcomes_of_each_file():
    merged = merge(record("one", "two"), record("two", "three", commit="b"))
    assert {file["selection"]["file"]: file["commit"] for file in merged["files"]} == {
        "one": "a",
        "two": "b",
        "three": "b",
    }
    assert (merged["command"], merged["commit"]) == ("run a, run b", "a, b")


@pytest.mark.parametrize("changed", [{"device": "H100"}, {"versions": {}}, {"ranks": 1}])
def test_runs_that_were_not_made_alike_are_kept_apart(changed: dict[str, object]):
    (key,) = changed
    with pytest.raises(ValueError, match=f"--keep: expected {key} "):
        merge(record("one"), record("two", **changed))


def test_a_megatron_that_is_refused_by_name_is_no_difference_but_no_success():
    """Its cases were never reached with the plug-in, unlike those after a crash."""
    stock = {f"{FILE}::test_one": Case()}
    refused, crashed = (
        Comparison(Selection(file=FILE), stock, {FILE: Case("died", reason)})
        for reason in ("moe_optim.errors.PatchError: patch x: expected ()", "rank 0 was ended")
    )
    assert refused.refusal() and not refused.differences()
    assert crashed.refusal() is None and set(crashed.differences()) == set(stock)
    assert exit_status([refused]) == exit_status([crashed]) == 1
