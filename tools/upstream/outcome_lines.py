"""A pytest plug-in of every rank: writes each outcome immediately, and ends a case that hangs.

Imported by its bare name (``-p outcome_lines``, this folder on the path), because ``tests`` is
Megatron-LM's package in the ranks.
"""

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

_OUTSIDE_S = 300.0  # for imports, collection and the end of the process
_lines: Any = None
_timeout_s = 0.0


def pytest_addoption(parser):
    group = parser.getgroup("side by side")
    group.addoption("--lines", type=Path, help="folder for rank<N>.jsonl")
    group.addoption("--case-timeout", type=float, help="seconds that a case may take")
    group.addoption("--leave-out", type=Path, help="file with names of cases, one a line")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    global _lines, _timeout_s
    _lines = (config.getoption("--lines") / f"rank{os.environ['RANK']}.jsonl").open("w")
    _timeout_s = config.getoption("--case-timeout")
    _watch(_OUTSIDE_S)


def pytest_collection_modifyitems(config, items):
    left_out = set(config.getoption("--leave-out").read_text().splitlines())
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_collectreport(report):
    if report.failed:
        _write(report.nodeid, when="teardown", outcome="error", reason=_reason(report))


def pytest_runtest_logstart(nodeid):
    _watch(_timeout_s)
    _write(nodeid, when="start", outcome="passed")


def pytest_runtest_logreport(report):
    outcome = "error" if report.failed and report.when != "call" else report.outcome
    _write(
        report.nodeid,
        when=report.when,
        outcome=outcome,
        reason="" if report.passed else _reason(report),
        seconds=round(report.duration, 3),
        **dict(report.user_properties),
    )
    if report.when == "teardown":
        _watch(_OUTSIDE_S)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    session.exitstatus = 0  # another status means that the rank died, which ends the others


def _watch(seconds):
    # a C thread: ends the process even if a collective holds the interpreter
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)


def _write(case, **line):
    print(json.dumps({"case": case, "at": time.time(), **line}), file=_lines, flush=True)


def _reason(report):
    if isinstance(report.longrepr, tuple):  # path, line and reason of a skip
        return report.longrepr[2].partition("\n")[0]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext.strip().rpartition("\n")[2]
    return text.partition("\n")[0].removeprefix("E").strip()
