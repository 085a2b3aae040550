"""Commands of ``python -m benchmarks`` run on a CPU, and a program can read what they write.

``step``, ``convert``, ``gather`` and ``checkpoint`` have tests of their own.
"""

import shlex

import pytest
import torch

from benchmarks import __main__ as benchmark
from benchmarks import changed
from benchmarks import experts as bench_experts
from benchmarks.experts import ExpertsCase, _find_amax, _formula, _lay_out, _stacked
from benchmarks.export import measure as export
from benchmarks.offload import measure as offload

COMMANDS = {
    "changed": "--format bf16 mxfp8_2d --lr 1e-3 --steps 1 2 --shape 1 32 64",
    "copies": "--device cpu --experts 2",
    "experts": "--device cpu",
    "muon": "--small --repeat 1 --case apart together step --format fp8_block bf16",
    "offload": "--format nvfp4 --offload-states 0 0.5 1",
    "requantize": "--shape-set small --format mxfp8 nvfp4",
}


@pytest.mark.parametrize(("name", "options"), COMMANDS.items(), ids=COMMANDS)
def test_a_command_writes_its_rows_and_how_to_measure_again(name, options, measure):
    report = measure(name, *options.split())
    assert report.keys() >= {"command", "commit", "device", "versions"}
    again = benchmark.build_parser().parse_args(shlex.split(report["command"])[3:])
    assert again.what == name
    assert len(report["rows"]) > 1
    for row in report["rows"]:
        assert not row.get("differing_elements")
        if name == "offload":
            assert row["parameters_on_host"] == row["offload_states"] * row["parameters"]
        if name == "changed":
            assert row["bytes"] == {"bf16": 2 * 32 * 64, "mxfp8_2d": 32 * 64 + 2}[row["format"]]


def test_other_bytes_than_those_of_the_first_row_are_refused(measure, monkeypatch, capsys):
    """One step more, in the second row."""
    step, calls = offload._step, []

    def step_again(table):
        calls.append(table)
        step(table)
        if len({id(one) for one in calls}) == 2 and len(calls) == 1 + calls.index(table):
            step(table)

    monkeypatch.setattr(offload, "_step", step_again)
    args = ["offload", "--format", "mxfp8", "--offload-states", "0", "1"]
    assert benchmark.main(args) != 0
    assert "expected the bytes of 0.0 with 1.0 of the states on the host" in capsys.readouterr().err


def test_blocks_are_counted_whole_with_their_positions():
    old = [torch.zeros(10, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)]
    new = [one.clone() for one in old]
    new[0][[0, 1, 9]] = 1
    row = changed._compare(old, new)
    assert (row["bytes"], row["changed"], row["scales_changed"]) == (14, 3 / 14, 0)
    assert (row["blocks_4"], row["sent_4"]) == (2 / 4, 2 * (4 + 4) / 14)


@pytest.mark.parametrize("bits", [8, "e4m3"])
def test_a_way_that_gives_other_bits_is_counted(bits):
    case = ExpertsCase(experts=3, rows=8, cols=32, bits=bits, device="cpu")
    experts, gradients = _lay_out(case, "scattered")
    amax = _find_amax(experts) * 0.5
    for factor, differs in ((1.0, False), (0.9, True)):
        way = bench_experts.partial(_stacked, bench_experts.partial(_formula, amax * factor, bits))
        found = bench_experts._count_differences(case, experts, gradients, way)
        assert (found > 0) == differs


NUMEL = 2 * 4 * 2 * 256 * 128
BITS = {"mxfp8": 8 + 8 / 32, "nvfp4": 4 + 8 / 16, "fp8_block": 8 + 32 / 128**2}


@pytest.mark.extended
def test_every_way_has_its_bytes_and_only_quantizing_again_gives_others(measure):
    """Powers of two are found again where blocks are square, not in rows and columns of MXFP8."""
    rows = measure("export", "--format", *BITS, "--ranks", "2")["rows"]
    assert len(rows) == 5 * len(BITS)
    for row in rows:
        is_native = row["way"] == export.AS_THEY_ARE
        bits = BITS[row["format"]] if is_native else 16
        scales = 4 * 2 * 2 * 4 * (is_native and row["format"] == "nvfp4")  # fp32, one an expert
        assert row["loaded_bytes"] == 2 * row["received_bytes"] == NUMEL * bits / 8 + scales
        assert (row["other_scales"] is not None) == (row["way"] == export.QUANTIZED_AGAIN)
    others = {row["format"]: row["other_scales"] for row in rows if row["other_scales"] is not None}
    assert others["mxfp8"] > 0 == others["fp8_block"]
