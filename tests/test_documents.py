"""Documents say what the code says."""

import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from moe_optim import plain_yaml, recipes
from moe_optim.config import MoEOptimConfig, available_values, spell
from moe_optim.formats import FORMATS
from moe_optim.megatron.patching.patches import PATCHES
from tests.upstream.side_by_side import CHANCE, Case, Comparison, Selection

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "README.md",
    "CHANGELOG.md",
    "examples/README.md",
    "recipes/README.md",
    "patches/README.md",
    "patches/megatron-lm-0.19/README.md",
    "moe_optim/kernels/README.md",
    "moe_optim/megatron/README.md",
    "moe_optim/reference/README.md",
)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_every_patch_is_documented_word_for_word(patch):
    target = patch.target.removeprefix("megatron.")
    row = f"| `{patch.id}` | `{target}` | {patch.because} | {patch.remove_when} |"
    assert row in (ROOT / "patches" / "README.md").read_text()


def test_no_patch_is_documented_that_does_not_exist():
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "patches" / "README.md").read_text(), re.M)
    assert rows == [patch.id for patch in PATCHES]


@pytest.mark.parametrize(("name", "default"), asdict(MoEOptimConfig()).items())
def test_every_knob_stands_in_the_recipe_table_with_its_values_and_default(name, default):
    """The table of knobs lists what this version takes, no more and no less."""
    text = (ROOT / "recipes" / "README.md").read_text()
    ((values, stated),) = re.findall(rf"^\| `{name}` \| (.*?) \| `(.*?)` \|$", text, re.M)
    assert re.findall("`(.*?)`", values) == [spell(value) for value in available_values(name)]
    assert stated == spell(default)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / link).exists(), link


def test_the_bounds_of_a_recipe_are_those_that_are_documented():
    text = " ".join((ROOT / "recipes" / "README.md").read_text().split())
    assert (
        f"at most {plain_yaml.MAX_BYTES:,} bytes, {recipes._MAX_CHAIN} files, "
        f"{plain_yaml._MAX_VALUES:,} values with aliases written out, {plain_yaml._MAX_LEVELS} "
        f"levels, and whole numbers of {plain_yaml._MAX_DIGITS} digits"
    ) in text


@pytest.mark.parametrize("command", ["train", "test"])
def test_the_commands_of_the_readme_exist(command):
    assert f"make {command}" in (ROOT / "README.md").read_text()
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M)


# Figures: what a document quotes is what the file says that it links to

RESULTS = ROOT / "recipes" / "results"
STEP_ROWS = {
    "iteration": "iteration_ms",
    "of it forward and backward": "forward_backward_ms",
    "`optimizer.step()`": "optimizer_ms",
    "the same, busy on the host": "optimizer_host_ms",
    "masters to weights: requantize": "requantize_ms",
    "gather": "gather_ms",
    "post-processing": "post_processing_ms",
}
STEPS = ("h100", "2x-h200", "2x-h200-overlapped", "2x-h200-ep2", "2x-h200-ep2-overlapped")


def read_result(name):
    return json.loads((RESULTS / name).read_text())


def table_row(label, values):
    cells = (f" {value} |" if value else " |" for value in values)
    return f"| {label} |{''.join(cells)}"


def milliseconds(value):
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def convert_figures():
    report = read_result("convert-cpu.json")
    cores = report["device"].split()[-2]
    yield (
        f"Converting {report['bytes'] / 1e9:.1f} GB, checksums compared, took "
        f"{report['convert_s']:.0f} s where copying them took {report['copy_s']:.0f} s on a "
        f"machine with {cores} cores. It held {report['peak_bytes'] / 1e9:.2f} GB at its peak, "
        f"{report['peak_bytes_beyond_opening'] / 1e9:.2f} GB more than a command that only opens "
        f"the checkpoint; a layer with its states has {report['layer_bytes'] / 1e9:.2f} GB"
    )


def requantize_rows(name, shape_set):
    """Return (format, work, shard) -> row of one set of shapes."""
    return {
        (row["format"], row["work"].removesuffix(", no all-reduce"), row["shard"]): row
        for row in read_result(name)["rows"]
        if row["shape_set"].partition(",")[0] == shape_set
    }


def requantize_fractions(work, shard="1/1", by="ms", *, missing=""):
    """Return the fraction of the floor for each format, for a row of a table."""
    rows = requantize_rows("requantize-h100.json", "w1")
    for format in FORMATS:
        row = rows.get((format, work, shard), {})
        yield f"{row['floor_ms'] / row[by]:.2f}" if row.get(by) else missing


def host_times(shape_set):
    """Return the least and the most that one launch over these shapes takes the host, in us."""
    rows = requantize_rows("requantize-host-h100.json", shape_set)
    times = [
        row["host_us"]
        for (_, work, _), row in rows.items()
        if row["launches"] == 1 and work != "after the gather"
    ]
    return f"{int(min(times) + 0.5)} to {int(max(times) + 0.5)}"


FP32, BF16 = "fp32 to wire planes", "bf16 to wire planes, source zeroed"


def requantize_figures():
    report = read_result("requantize-h100.json")
    yield f"a device copy ({report['copy_tb_per_s']:.2f} TB/s)"
    yield table_row("fp32 masters to what travels", requantize_fractions(FP32))
    yield table_row("the same, Transformer Engine", requantize_fractions(FP32, by="te_ms"))
    yield table_row("an eighth of each weight", requantize_fractions(FP32, "1/8"))
    yield table_row("gathered bf16, zeroed on the way", requantize_fractions(BF16))
    yield (
        f"takes the host {host_times('few')} microseconds at 12 and {host_times('many')} at "
        "12,288 of them"
    )


def kernel_figures():
    report = read_result("requantize-h100.json")
    none = {"missing": "none"}
    yield f"a device copy moving {report['copy_tb_per_s']:.2f} TB/s"
    yield table_row("fp32 to what travels", requantize_fractions(FP32))
    yield table_row("the same, Transformer Engine", requantize_fractions(FP32, by="te_ms", **none))
    yield table_row("fp32, an eighth of each weight", requantize_fractions(FP32, "1/8"))
    yield table_row(
        "the same, Transformer Engine", requantize_fractions(FP32, "1/8", "te_ms", **none)
    )
    yield table_row("bf16, source zeroed", requantize_fractions(BF16))
    yield table_row("bf16, source zeroed, an eighth", requantize_fractions(BF16, "1/8"))
    after = [*requantize_fractions("after the gather")][2:]
    yield table_row("data after the gather", ["", "", *after])
    after = [*requantize_fractions("after the gather", by="te_ms", **none)][2:]
    yield table_row("the same, Transformer Engine", ["", "", *after])
    rows = requantize_rows("requantize-h100.json", "w1")
    copied = [rows[format, "after the gather", "1/1"]["ms"] for format in ("mxfp8", "mxfp8_2d")]
    yield f"only copy scales there, {copied[0]:.2f} and {copied[1]:.2f} ms"
    yield (
        f"The host needs {host_times('few')} microseconds for a launch over 12 members and "
        f"{host_times('many')} over 12,288"
    )


def gather_figures():
    rows = {
        (ranks, row["format"], row["wire"]): row
        for ranks in (2, 4)
        for row in read_result(f"gather-{ranks}x-h200.json")["rows"]
    }

    def column(key, ranks, wire="quantized"):
        return [f"{rows[ranks, format, wire][key]:.2f}" for format in FORMATS]

    bf16 = [f"{rows[ranks, 'bf16', 'bf16']['total_ms']:.2f} ms on {ranks}" for ranks in (2, 4)]
    yield f"({', '.join(bf16)};"
    yield table_row("bytes a parameter on the wire, of 2", column("bytes_per_parameter", 2))
    for ranks in (2, 4):
        yield table_row(f"{ranks} GPUs", column("ratio_to_bf16", ranks))
    yield table_row("4 GPUs, `wire: bf16`", column("ratio_to_bf16", 4, "bf16"))


def step_figures():
    reports = [read_result(f"step-{name}.json") for name in STEPS]
    sides = ("stock", "plugin")
    for label, key in STEP_ROWS.items():
        values = (", ".join(milliseconds(one[side][key]) for side in sides) for one in reports)
        yield table_row(label, values)
    peaks = (
        ", ".join(f"{one[side]['peak_bytes'] / 2**30:.1f}" for side in sides) for one in reports
    )
    yield table_row("peak memory, GiB", peaks)


OUTCOMES = ("passed", "failed", "skipped", "by chance")


def upstream_figures():
    for file in read_result("upstream-2x-h200.json")["files"]:
        stock, plug_in = (
            {name: Case(**case) for name, case in file[side].items()}
            for side in ("stock", "plug_in")
        )
        one = Comparison(Selection(**file["selection"]), stock, plug_in)
        name = one.selection.file
        if not name.startswith("dist_checkpointing/"):  # another test_optimizer.py is elsewhere
            name = name.rpartition("/")[2]
        label = ", ".join(filter(None, (f"`{name}`", one.selection.keyword)))
        counts = [
            Counter("by chance" if case in CHANCE else side[case].outcome for case in side)
            for side in (stock, plug_in)
        ]
        said = [
            ", ".join(f"{of_side[outcome]} {outcome}" for outcome in OUTCOMES if of_side[outcome])
            for of_side in counts
        ]
        other = "the same" if said[0] == said[1] else said[1]
        yield table_row(label, [said[0], other, str(len(one.counted())), str(one.ran())])
        assert not one.differences(), "the README says that there is none"


QUOTES = {  # document, figures -> files that they are computed from
    ("README.md", convert_figures): ["convert-cpu.json"],
    ("README.md", requantize_figures): ["requantize-h100.json", "requantize-host-h100.json"],
    ("README.md", gather_figures): ["gather-2x-h200.json", "gather-4x-h200.json"],
    ("README.md", step_figures): [f"step-{name}.json" for name in STEPS],
    ("README.md", upstream_figures): ["upstream-2x-h200.json"],
    ("moe_optim/kernels/README.md", kernel_figures): [
        "requantize-h100.json",
        "requantize-host-h100.json",
    ],
}


@pytest.mark.parametrize(
    ("document", "figures"), QUOTES, ids=[figures.__name__ for _, figures in QUOTES]
)
def test_a_document_says_what_the_results_say_that_it_links_to(document, figures):
    text = " ".join((ROOT / document).read_text().split())
    for phrase in figures():
        assert phrase in text
    for file in QUOTES[document, figures]:
        assert f"recipes/results/{file})" in text


def test_every_result_is_quoted_and_every_link_to_one_is_checked():
    """A new result file, or a link to one, needs a line in QUOTES."""
    checked = {(document, file) for (document, _), files in QUOTES.items() for file in files}
    links = {
        (document, Path(link).name)
        for document in DOCUMENTS
        for link in re.findall(r"\]\(([^)]*results/[^)#]+)\)", (ROOT / document).read_text())
    }
    assert links == checked
    assert {file for _, file in checked} == {path.name for path in RESULTS.iterdir()}
