"""What a suite run with other versions writes down, and how Megatrons are compared."""

import json
from importlib import metadata

import pytest

from tools.upstream import versions
from tools.upstream.patch_sources import changes, fingerprint
from tools.upstream.versions import KNOWN, Wanted, read_report, record, totals

REPORT = """
<testsuites><testsuite>
<testcase file="tests/test_a.py" name="test_1"/>
<testcase file="tests/test_a.py" name="test_2"><skipped message="needs 1 GPUs"/></testcase>
<testcase file="tests/test_a.py" name="test_3"><failure message="1 == 2&#10;more"/></testcase>
<testcase file="tests/test_b.py" name="test_4"><error message="failed on setup"/></testcase>
</testsuite></testsuites>
"""
OF_B = {"commit": "1", "passed": 0, "failed": 1, "skipped": 0, "failures": {"test_4": "why"}}
RUN = {
    "versions": {"torch": "2.15.0"},
    "source": "wheel",
    "python": "3.12",
    "device": "CPU",
    "commands": ["all"],
    "files": {"tests/test_b.py": OF_B},
}


def wanted(megatron_core="0.19.0", transformer_engine=None):
    return Wanted(
        torch="2.15.0", megatron_core=megatron_core, transformer_engine=transformer_engine
    )


def test_versions_take_the_place_of_those_of_the_project_and_nothing_else_changes():
    lines = wanted().requirements()
    assert lines[:2] == ["torch==2.15.0", "megatron-core==0.19.0"]
    assert {"omegaconf>=2.3", "einops", "pytest-xdist"} <= set(lines)
    assert not [line for line in lines[2:] if line.startswith(("torch>", "torch=", "megatron"))]


def test_a_checkout_is_installed_from_its_folder_and_named_without_it(tmp_path):
    checkout = wanted(str(tmp_path / "Megatron-LM"))
    assert checkout.requirements()[1] == str(tmp_path / "Megatron-LM")
    assert checkout.command(["tests/train"]) == (
        "python -m tools.upstream.versions --torch 2.15.0 --megatron-core Megatron-LM tests/train"
    )


def test_every_case_is_counted_by_file_and_failures_say_why(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    files = {name: vars(of_file) for name, of_file in read_report(path).items()}
    assert totals(files) == {"passed": 1, "failed": 2, "skipped": 1}
    assert list(versions.failures(files)) == [
        "tests/test_a.py::test_3: 1 == 2",
        "tests/test_b.py::test_4: failed on setup",
    ]


def test_a_part_that_is_run_again_replaces_its_files_alone(tmp_path):
    path = tmp_path / "record.json"
    of_a = {**OF_B, "passed": 3, "failed": 0, "failures": {}}
    record(path, RUN | {"files": {"tests/test_a.py": of_a, "tests/test_b.py": OF_B}})
    record(path, RUN | {"versions": {"torch": "2.13.0"}})
    mended = {**OF_B, "commit": "2", "passed": 1, "failed": 0, "failures": {}}
    record(path, RUN | {"commands": ["b"], "files": {"tests/test_b.py": mended}})
    older, newer = json.loads(path.read_text())["runs"]
    assert older == RUN | {"versions": {"torch": "2.13.0"}}
    assert newer["files"] == {"tests/test_a.py": of_a, "tests/test_b.py": mended}
    assert newer["commands"] == ["all", "b"]


def test_an_environment_of_other_versions_is_not_taken_for_the_one_wanted():
    versions.check_versions({"torch": "2.15.0+cpu", "megatron-core": "0.19.0"}, wanted())
    with pytest.raises(SystemExit, match=r"expected megatron-core 0\.19\.0 there, got 0\.19\.2"):
        versions.check_versions({"torch": "2.15.0", "megatron-core": "0.19.2"}, wanted())


def test_the_environment_that_asks_is_recorded_as_it_is(tmp_path, monkeypatch):
    """Nothing is installed; a folder of Transformer Engine counts, and its path is not told."""
    (tmp_path / "transformer_engine-2.17.1.dist-info").mkdir()
    (tmp_path / "transformer_engine-2.17.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.17.1\n"
    )
    monkeypatch.setenv("TRANSFORMER_ENGINE_PATH", str(tmp_path))
    path = tmp_path / "record.json"
    case = "tests/formats/test_formats.py"
    assert versions.main(["--here", "--json", str(path), case]) == 0
    (run,) = json.loads(path.read_text())["runs"]
    assert run["versions"]["transformer-engine"] == "2.17.1"
    assert run["versions"]["torch"] == metadata.version("torch")
    command = f"TRANSFORMER_ENGINE_PATH=DIR python -m tools.upstream.versions --here {case}"
    assert run["commands"] == [command]
    assert totals(run["files"])["passed"] and not list(versions.failures(run["files"]))


def test_the_environment_that_asks_has_the_versions_it_has(capsys):
    with pytest.raises(SystemExit):
        versions.main(["--here", "--megatron-core", "0.19.0"])
    assert "--here: expected no --megatron-core beside it" in capsys.readouterr().err


def test_transformer_engine_is_refused_without_a_gpu(capsys):
    """It is built for one, and all that it would add are the tests that need one."""
    with pytest.raises(SystemExit):
        versions.main(["--transformer-engine", KNOWN["transformer-engine"][0]])
    assert "--transformer-engine: expected a GPU, got none." in capsys.readouterr().err


def documented(x):
    """Twice."""
    return 2 * x  # the same


documented_otherwise = documented


def documented(x):  # noqa: F811 - of the same name, as in two versions
    return 2 * x


def other(x):
    return 3 * x


def test_a_body_is_the_same_whatever_its_comments_say():
    assert fingerprint(documented) == fingerprint(documented_otherwise)
    assert fingerprint(other) != fingerprint(documented)


def test_what_changed_of_a_target_is_named():
    gone = ("gone: no such name", "")
    old = {"a": ("(x)", "1"), "b": ("(x)", "1"), "c": ("(x)", "1"), "d": ("(x)", "1"), "e": gone}
    new = {"a": ("(x)", "1"), "b": ("(x)", "2"), "c": ("(x, y)", "2"), "d": gone, "e": ("(x)", "1")}
    assert changes(old, new) == {"b": "body", "c": "signature", "d": "gone", "e": "new"}
