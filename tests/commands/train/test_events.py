"""Event files of several launches are read as one run: what a resume took back is gone."""

import numpy as np

from moe_optim.commands.train.events import read_events
from tests.support.training_runs.report_runs import look_at, write_run
from tests.support.training_runs.runs import write_events

AMAX = "moe_optim/layers.0.fc1/amax/by_expert"


def test_a_resumed_launch_takes_back_tensors_and_scalars_of_every_tag(tmp_path):
    """The first launch came to 30, the second began at 21."""
    first, second = look_at(layers=1), look_at(layers=1, factor=2.0)
    curves = {tag: [(i, 1.0) for i in range(1, 31)] for tag in ("lm loss", "grad-norm")}
    write_run(tmp_path, curves, looks={10: first, 20: first, 30: first})
    curves = {tag: [(i, 2.0) for i in range(21, 26)] for tag in ("lm loss", "learning-rate")}
    write_run(tmp_path, curves, looks={25: second}, start=2000.0)
    events = read_events(tmp_path / "tensorboard", tensors="moe_optim/")
    assert [iteration for iteration, _ in events.tensors[AMAX]] == [10, 20, 25]
    np.testing.assert_array_equal(events.tensors[AMAX][-1][1], second[0].amax.float().numpy())
    assert [point.iteration for point in events.scalars["lm loss"]] == list(range(1, 26))
    assert [point.iteration for point in events.scalars["grad-norm"]] == list(range(1, 21))
    assert events.texts == {"moe_optim_recipe": "quickstart.yaml"}


def test_of_evaluations_only_those_after_the_resume_are_taken_back(tmp_path):
    """Also by a launch that trains nothing. Megatron logs the test loss under their tag, last."""
    train, held_out = "lm loss", "lm loss validation"
    losses = [(i, 3.0) for i in range(1, 31)]
    first = [(10, 9.0), (22, 9.0), (30, 8.0), (30, 7.0)]
    write_events(tmp_path, {train: losses, held_out: first}, 100)
    assert [point.value for point in read_events(tmp_path).validation] == [9.0, 9.0, 8.0]
    write_events(tmp_path, {held_out: [(30, 2.5)]}, 200)
    assert [point.value for point in read_events(tmp_path).validation] == [9.0, 9.0, 2.5]
    write_events(tmp_path, {train: [(i, 2.0) for i in range(21, 26)], held_out: [(25, 5.0)]}, 300)
    events = read_events(tmp_path)
    assert [point.iteration for point in events.train] == list(range(1, 26))
    assert [(point.iteration, point.value) for point in events.validation] == [(10, 9.0), (25, 5.0)]
