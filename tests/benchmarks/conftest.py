"""What makes a measurement soon done on a CPU."""

import json

import pytest
import torch

from benchmarks import __main__ as benchmark
from benchmarks import copies, experts, timing
from benchmarks.muon import command, floors
from benchmarks.muon.cases import Experts
from moe_optim.kernels import staging


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Return a function that runs a command, quickly, and returns the report it wrote."""
    for module in (timing, experts, copies):
        monkeypatch.setattr(module, "REPEATS", 1)
    monkeypatch.setattr(timing, "WARM_UP", 0)
    monkeypatch.setattr(timing, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(experts, "import_modelopt", lambda: (None, "absent: a test"))
    monkeypatch.setattr(floors, "PRODUCT_SIDE", {"cpu": 64})
    monkeypatch.setattr(command, "SMALL", Experts(count=2, hidden=128, ffn=128))
    monkeypatch.setattr(staging, "SMALLEST", 1000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "250")

    def run(*words):
        path = tmp_path / "report.json"
        assert benchmark.main([*words, "--json", str(path)]) == 0
        return json.loads(path.read_text())

    return run
