"""A pytest plug-in: makes Transformer Engine's tests call our kernels, and records the calls.

Imported by its bare name, like ``outcome_lines``; subprocesses of a test do the same.
"""

import os
import tempfile
from pathlib import Path

import engine_calls
import pytest

_notes = Path(tempfile.mkdtemp(prefix="engine-notes-")) / "calls.txt"


@pytest.hookimpl
def pytest_load_initial_conftests():
    engine_calls.replace()
    os.environ[engine_calls.NOTES] = str(_notes)
    site = str(Path(__file__).parent / "engine_site")
    os.environ["PYTHONPATH"] = os.pathsep.join([site, os.environ.get("PYTHONPATH", "")])


def pytest_runtest_logstart():
    _notes.write_text("")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    if call.when == "teardown":
        item.user_properties.append(("ran", sorted(set(_notes.read_text().split()))))
