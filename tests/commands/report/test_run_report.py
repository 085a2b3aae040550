"""A report says what a run has left behind, what it has not, and needs nothing else."""

import base64
import io
import json
import math
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib.image
import numpy as np
import pytest

from moe_optim.commands.cli import main as cli
from moe_optim.commands.report.comparison import figures_of
from moe_optim.commands.report.reading import read_run
from moe_optim.commands.report.run_report import build_page
from moe_optim.commands.report.verdict import find_largest, find_spikes, judge
from moe_optim.commands.train.events import Point
from moe_optim.errors import LayoutError
from moe_optim.formats.health_figures import THRESHOLDS, Sum
from tests.support.training_runs.report_runs import (
    LOSSES,
    MODEL,
    SUMMARY,
    loads_at,
    look_at,
    write_run,
)


class Reader(HTMLParser):
    """Collects elements, text, and what a browser would load."""

    def __init__(self, html):
        super().__init__()
        self.loads, self.tags, self.alts, self.text, self._open = [], [], [], "", []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.tags.append(tag)
        self.loads += [v for k, v in attributes if k in ("src", "href", "data", "action")]
        if tag == "img":
            self.alts.append(named["alt"])
        if tag not in ("meta", "img", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += f"{data} " if data.strip() else ""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run that was looked at twice."""
    path = tmp_path_factory.mktemp("runs") / "finished"
    looks = {20: [*look_at(), *loads_at()], 40: [*look_at(factor=2.0), *loads_at()]}
    return write_run(path, looks=looks)


@pytest.fixture(scope="module")
def page(run):
    assert cli.main(["report", str(run)]) == 0
    return Reader((run / "report" / "index.html").read_text())


def test_the_page_loads_nothing_and_runs_nothing(page):
    assert page.loads and all(url.startswith("data:image/png;base64,") for url in page.loads)
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)


def test_every_picture_lies_beside_the_page_too_and_shows_something(run, page):
    inside = {base64.b64decode(url.partition(",")[2]) for url in page.loads}
    beside = {path.read_bytes() for path in (run / "report").glob("*.png")}
    assert inside == beside and len(inside) == len(page.loads) == len(set(page.alts))
    for png in inside:
        image = matplotlib.image.imread(io.BytesIO(png))
        assert image.shape[1] == 1000
        assert 0.2 < image[..., :3].mean() < 0.99


SAID = (
    "training loss 4.0000 → 0.1000 nats/byte",
    "held-out loss 0.2500 → 0.1250 nats/byte",
    "recipe quickstart.yaml",
    "torch 2.11.0, megatron-core 0.19.2",
    "commit abc1234",
    "device NVIDIA H100",
    "moe-optim train quickstart --out <runs>",  # escaped
    "2.50 iterations/s",
    "Last sample, at iteration 40.",
    "Iterations between the last two samples, up to iteration 40.",
)


def test_the_page_says_what_the_run_recorded_and_draws_every_part(page):
    for text in SAID:
        assert text in " ".join(page.text.split())
    names = " ".join(page.alts)
    for what in ("loss", "Gradient norm", "largest magnitude", "relative error", "tokens", "time"):
        assert what in names


def test_samples_have_the_last_figures_of_every_expert(run):
    found, tokens = read_run(run).sample("amax"), read_run(run).sample("tokens")
    assert found.iteration == 40
    assert found.layers == ("layers.0.fc1", "layers.0.fc2", "layers.1.fc1", "layers.1.fc2")
    wanted = np.stack([health.amax.float().numpy() for health in look_at(factor=2.0)])
    np.testing.assert_array_equal(found.values, wanted)
    assert (tokens.iteration, tokens.layers) == (40, ("layers.0.experts", "layers.1.experts"))
    np.testing.assert_array_equal(tokens.values, [[50, 50, 50, 250]] * 2)


def test_layers_with_fewer_experts_leave_blanks(tmp_path):
    looks = [*look_at(layers=1), look_at(layers=2, experts=2)[2]]
    found = read_run(write_run(tmp_path / "run", looks={10: looks})).sample("error")
    assert found.values.shape == (3, 4)
    assert np.isnan(found.values[2, 2:]).all() and not np.isnan(found.values[:2]).any()


def spiking(at, *, of=40):
    """Return training losses with a jump at one iteration."""
    return {"lm loss": [(i, 3.0 if i == at else 1.0 + 0.01 * (i % 3)) for i in range(1, of + 1)]}


def saturating(share):
    """Return a look at which one expert saturates a share of its weights."""
    looks = look_at(layers=1)
    looks[1].sums[2, Sum.SATURATED] = share * looks[1].sums[2, Sum.ELEMENTS]
    return looks


def verdict_of(path, losses=LOSSES, **looks):
    run = read_run(write_run(path, losses, looks={int(k[1:]): v for k, v in looks.items()}))
    return judge(run, find_largest(run), find_spikes(run.events.train))


def test_a_jump_of_the_loss_is_found_once_and_noise_is_none():
    def found(values):
        points = [Point(iteration=i, value=v, time=0.0) for i, v in enumerate(values, 1)]
        return find_spikes(points)

    calm = [1.0 + 0.02 * math.sin(7 * i) for i in range(30)]
    assert found(calm) == []
    assert found([*calm, 2.0, 1.9, 1.8, *calm]) == [31]
    assert found([*calm, 2.0, *calm, math.nan, math.nan]) == [31, 62]
    assert found([8.0 / i for i in range(1, 60)]) == []


def test_the_verdict_is_the_largest_figure_of_all_looks_beside_its_threshold(tmp_path):
    """Also where the last look is calm, and against jumps of the loss before and after it."""
    said = verdict_of(tmp_path / "calm", i10=look_at(), i20=look_at())
    assert said.startswith("No sign of it: no figure exceeded its threshold. Closest: ")
    assert said.endswith("The loss never jumped.") and ", threshold 0." in said
    since = "thresholds were exceeded from iteration 20 on"
    high = "Largest: saturated 0.5, threshold 0.02 (layers.0.fc2, expert 2, iteration 20)"
    said = verdict_of(tmp_path / "no harm", i20=saturating(0.5), i40=look_at())
    assert said == f"No harm so far, but {since}. {high}. The loss never jumped."
    said = verdict_of(tmp_path / "cause", spiking(30), i20=saturating(0.5), i40=look_at())
    assert said == f"Possibly: {since}. {high}. The loss jumped at iteration 30."
    said = verdict_of(tmp_path / "effect", spiking(15), i10=look_at(), i20=saturating(0.5))
    assert said.startswith(f"Probably not: {since}, after the loss jumped. {high}.")
    said = verdict_of(tmp_path / "unknown", spiking(15))
    assert said.startswith(
        "Unknown: the health of quantized experts was not sampled. The loss jumped at iteration 15."
    )
    assert "--set moe_optim.health_interval=100" in said  # the remedy


def test_an_earlier_look_is_shown_on_request(tmp_path, capsys):
    """The verdict is that of a run that ended there."""
    looks = {10: look_at(layers=1), 20: saturating(0.5), 40: look_at(layers=1)}
    path = write_run(tmp_path / "run", spiking(30), looks=looks)
    run = read_run(path)
    last, earlier, first = build_page(run), build_page(run, 25), build_page(run, 19)
    assert last.verdict.startswith("Possibly: ")
    assert earlier.verdict.startswith("Up to iteration 25: ")
    assert "saturated 0.5" in earlier.verdict and "saturated 0.5" not in first.verdict
    assert all(page.verdict.endswith("The loss never jumped.") for page in (earlier, first))
    text = " ".join(Reader(earlier.html).text.split())
    assert "Sample at iteration 20." in text and "saturated is 0.5, above 0.02" in text
    assert "saturated is 0.5" not in Reader(last.html).text
    assert cli.main(["report", str(path), "--at", "900"]) == 2
    assert "--at 900: expected at most 40, the last iteration." in capsys.readouterr().err
    assert cli.main(["report", str(path), "--at", "9"]) == 2
    assert "--at 9: expected an iteration from the first health sample on, got a run with the " in (
        capsys.readouterr().err
    )


def test_an_expert_above_a_threshold_is_named(tmp_path):
    looks = look_at(layers=1)
    looks[0].sums[3, Sum.SATURATED] = 0.5 * looks[0].sums[3, Sum.ELEMENTS]
    run = read_run(write_run(tmp_path / "run", looks={10: looks}))
    assert run.health_warnings() == ["layers.0.fc1, expert 3: saturated is 0.5, above 0.02"]
    assert run.health_warnings() == [line for one in looks for line in one.warnings()]
    assert run.health_warnings()[0] in Reader(build_page(run).html).text


def test_a_look_that_is_cut_off_in_its_event_file_is_said(tmp_path):
    """As of a run that is writing, or was killed."""
    run = read_run(write_run(tmp_path / "run", LOSSES, looks={10: look_at(layers=1)}))
    for figure in ("norm", *THRESHOLDS["nvfp4"]):
        end = f"fc2/{figure}/by_expert"
        kept = {tag: v for tag, v in run.events.tensors.items() if not tag.endswith(end)}
        assert len(kept) == len(run.events.tensors) - 1
        cut = replace(run, events=replace(run.events, tensors=kept))
        assert cut.health_warnings() == [
            f"layers.0.fc2: {figure} not recorded: the event file is cut off"
        ]


def test_a_run_that_is_going_on_is_reported_with_what_there_is(tmp_path):
    losses = {"lm loss": LOSSES["lm loss"][:3]}
    run = read_run(write_run(tmp_path / "run", losses, model=None, summary=None))
    text = " ".join(Reader(build_page(run).html).text.split())
    assert "iteration 3, not finished" in text
    assert "Not sampled. Train with --set moe_optim.health_interval=1 and" in text
    assert "Not logged by this run: grad-norm." in text
    assert "Not counted: health_interval counts them. This run has no load-balancing loss" in text
    assert "not recorded command" in text


def test_events_of_megatron_alone_can_be_reported(tmp_path):
    run = write_run(tmp_path / "run", model=None, summary=None)
    assert cli.main(["report", str(run / "tensorboard"), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "index.html").is_file()


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "absent"):
        assert cli.main(["report", str(path)]) == 2
        error = capsys.readouterr().err
        assert f"{path}: expected a run folder, with TensorBoard events" in error


MISTYPED = (  # file, a change of its content -> beginning of the fault
    ("model", {"format": 8}, "format: expected a value of another type, got 8"),
    ("model", {"rank0": [1]}, "rank0: expected a value of another type, got [1]"),
    ("summary", {"test_loss": "0.2"}, "test_loss: expected a value of another type, got '0.2'"),
    ("summary", {"byte_entropy": True}, "byte_entropy: expected a value of another type, got True"),
)


def test_a_damaged_file_is_refused_by_name_and_key(tmp_path, capsys):
    run = write_run(tmp_path / "run", LOSSES)
    for name, content in {"model": MODEL, "summary": SUMMARY}.items():
        path = run / f"{name}.json"
        for damage in ("{", "[1]", "null"):
            path.write_text(damage)
            with pytest.raises(LayoutError, match="expected names and values as JSON"):
                read_run(run)
        for file, change, fault in MISTYPED:
            if file == name:
                path.write_text(json.dumps(content | change))
                with pytest.raises(LayoutError) as error:
                    read_run(run)
                said = f"{path}: {fault}. Correct it, or remove the file."
                assert str(error.value) == said
        assert cli.main(["report", str(run)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {path}: ")
        path.write_text(json.dumps(content))


def test_a_weight_without_its_bytes_counts_none(tmp_path):
    model = MODEL | {"rank0": {"weights": [{}, {"weight_bytes": 3}]}}
    run = read_run(write_run(tmp_path / "run", LOSSES, model=model))
    assert figures_of("run", run)["weight_bytes"] == 3


def test_figures_that_a_run_has_not_recorded_may_be_null(tmp_path):
    """A run that diverged has a loss of NaN."""
    model = {"format": "mxfp8", "rank0": None, "parameters": None, "environment": {}}
    summary = dict.fromkeys(SUMMARY) | {"test_loss": math.nan}
    run = read_run(write_run(tmp_path / "run", LOSSES, model=model, summary=summary))
    assert "test loss nan nats/token" in Reader(build_page(run).html).text
