"""Reports name the commit they were measured with."""

import pytest

from moe_optim.console import provenance


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() is None


@pytest.mark.parametrize("changed", [None, " M moe_optim/ops.py"], ids=["clean", "dirty"])
def test_a_changed_checkout_is_said_to_be_dirty(changed, monkeypatch):
    answers = {"rev-parse": "0123abc", "status": changed}
    monkeypatch.setattr(provenance, "_git", lambda verb, *_: answers[verb])
    assert provenance.commit() == ("0123abc-dirty" if changed else "0123abc")
