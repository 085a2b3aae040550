"""Reports name the commit, the machine and the versions they were measured with."""

import importlib.metadata
import os
import platform
from types import SimpleNamespace

import pytest

from moe_optim.commands.console import provenance
from moe_optim.commands.console.kernel_hash import hash_kernels, kernel_sources


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() is None


@pytest.mark.parametrize("changed", [None, " M moe_optim/ops.py"], ids=["clean", "dirty"])
def test_a_changed_checkout_is_said_to_be_dirty(changed, monkeypatch):
    answers = {"rev-parse": "0123abc", "status": changed}
    monkeypatch.setattr(provenance, "_git", lambda verb, *_: answers[verb])
    assert provenance.commit() == ("0123abc-dirty" if changed else "0123abc")


def test_a_report_begins_with_all_that_measuring_again_needs():
    """Each version is that of the package that an import finds; the device is no GPU's here."""
    report = provenance.begin_report("python -m benchmarks gather", on_gpu=False)
    assert report == {
        "command": "python -m benchmarks gather",
        "commit": provenance.commit(),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "versions": report["versions"],
    }
    for name in ("torch", "megatron-core", "triton"):
        released = importlib.metadata.version(name).partition("+")[0]  # a checkout's has a commit
        assert report["versions"][name].partition("+")[0] == released
    assert {"moe_optim", "python"} < report["versions"].keys()


def test_a_report_of_a_gpu_says_which_kernels_ran(monkeypatch):
    monkeypatch.setattr(provenance, "find_gpus", lambda: [SimpleNamespace(name="H200")])
    found = provenance.describe_environment(on_gpu=True)["kernels"]
    assert found == hash_kernels(kernel_sources())


@pytest.mark.parametrize(
    ("ranks", "said"),
    [(1, "H200"), (2, "2 x H200"), (3, "2 x H200, H100"), (8, "2 x H200, H100")],
)
def test_a_report_names_the_gpus_of_its_ranks(ranks, said, monkeypatch):
    """As many as this machine has of them."""
    gpus = [SimpleNamespace(name=name) for name in ("H200", "H200", "H100")]
    monkeypatch.setattr(provenance, "find_gpus", lambda: gpus)
    assert provenance.describe_environment(on_gpu=True, ranks=ranks)["device"] == said
