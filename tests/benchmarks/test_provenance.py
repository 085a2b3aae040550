"""Reports name the commit, the machine and the versions they were measured with."""

import importlib.metadata
import os
import platform
from types import SimpleNamespace

from benchmarks.kernel_hash import hash_kernels, kernel_sources
from benchmarks.provenance import begin_report
from moe_optim.commands.console import provenance


def test_a_report_begins_with_all_that_measuring_again_needs():
    """Each version is that of the package that an import finds; the device is no GPU's here."""
    report = begin_report("python -m benchmarks gather", on_gpu=False)
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


def test_a_report_of_gpus_names_those_of_its_ranks_and_the_kernels_that_ran(monkeypatch):
    gpus = [SimpleNamespace(name=name) for name in ("H200", "H200", "H100")]
    monkeypatch.setattr(provenance, "find_gpus", lambda: gpus)
    found = begin_report("", on_gpu=True)["kernels"]
    assert found == hash_kernels(kernel_sources())
    for ranks, said in ((1, "H200"), (2, "2 x H200"), (8, "2 x H200, H100")):
        assert provenance.describe_environment(on_gpu=True, ranks=ranks)["device"] == said
