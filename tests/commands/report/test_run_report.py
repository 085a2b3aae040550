"""A report says what a run has left behind, what it has not, and needs nothing else."""

import math
from html.parser import HTMLParser

import pytest

from moe_optim.commands.cli import main as cli
from moe_optim.commands.report.reading import read_run
from moe_optim.commands.report.verdict import find_largest, find_spikes, judge
from moe_optim.commands.train.events import Point
from moe_optim.formats.health_figures import Sum
from tests.support.training_runs.report_runs import (
    LOSSES,
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
