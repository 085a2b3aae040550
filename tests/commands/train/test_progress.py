"""What Megatron's log says is what the user sees."""

import io
import math
import re

import pytest
from rich.console import Console

from moe_optim.commands.train.progress import Display, LogTail, TrainingState

ITERATION = (
    " [2026-11-21 10:20:20.879250] iteration       40/     400 | consumed samples:          640 |"
    " elapsed time per iteration (ms): 250.0 | learning rate: 2.000000E-03 |"
    " global batch size:    16 |{loss} load_balancing_loss: 1.031250E+00 | loss scale: 1.0 |"
    " grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
LOSS = " lm loss: 2.750000E+00 |"
VALIDATION = (
    " validation loss at iteration {} | lm loss value: 2.875000E+00 | lm loss PPL: 1.8E+01 | "
)


def state_after(*lines):
    state = TrainingState()
    for line in lines:
        state.read(line)
    return state


def test_an_iteration_line_gives_loss_speed_and_time_left():
    state = state_after(ITERATION.format(loss=LOSS))
    assert (state.stage, state.iteration, state.total) == ("training", 40, 400)
    assert (state.loss, state.seconds_per_iteration, state.seconds_left) == (2.75, 0.25, 90.0)
    assert state.status() == "loss 2.750 · 4.0 it/s · 1:30 left"


def test_the_speed_is_a_mean_that_forgets_the_first_iteration():
    line = ITERATION.format(loss=LOSS)
    slow, fast = line.replace("250.0", "9000.0"), line.replace("250.0", "150.0")
    assert state_after(slow, line, fast).seconds_per_iteration == pytest.approx(0.2)
    assert state_after(slow, *[line] * 30, *[fast] * 200).seconds_left == pytest.approx(54, abs=0.1)


def test_a_loss_that_megatron_leaves_out_is_not_a_number():
    assert math.isnan(state_after(ITERATION.format(loss="")).loss)


def test_test_text_never_counts_as_validation_text():
    """Megatron evaluates three times at the end: the interval, validation and test text."""
    state = state_after(
        VALIDATION.format("400"),
        VALIDATION.format("400 on validation set").replace("2.87", "2.99"),
        VALIDATION.format("400 on test set").replace("2.87", "3.50"),
    )
    assert state.held_out == {400: 2.875}
    assert state.test_loss == 3.505


def test_the_newest_saved_checkpoint_is_known():
    line = "  [2026-11-21 10:20:20.8] successfully saved checkpoint from iteration     100 to x [ "
    assert state_after(line).saved == 100


def test_stages_before_training_are_named_in_order():
    state = TrainingState()
    stages = [state.stage]
    for line in ("noise", "> initialized tensor model parallel with size 1", "done with setup ..."):
        state.read(line)
        stages.append(state.stage)
    assert stages == [
        "importing Megatron",
        "importing Megatron",
        "building the model",
        "first iteration",
    ]


def test_a_tail_gives_every_line_once_and_only_when_it_is_whole(tmp_path):
    path = tmp_path / "rank0.log"
    tail = LogTail(path)
    assert tail.new_lines() == []
    with path.open("w") as log:
        for written, seen in (("one\ntw", ["one"]), ("", []), ("o\nthree\n", ["two", "three"])):
            log.write(written)
            log.flush()
            assert tail.new_lines() == seen


def shown(terminal, *lines):
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100)
    state = TrainingState()
    with Display(console, state, "2 ranks on the CPU") as display:
        for line in lines:
            state.read(line)
            display.update()
            display.update()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())


def test_without_a_terminal_every_event_is_one_plain_line():
    text = shown(False, ITERATION.format(loss=LOSS), VALIDATION.format(40))
    assert text.splitlines() == [
        "  starting 2 ranks on the CPU: importing Megatron",
        "  iteration 40/400 · loss 2.750 · 4.0 it/s · 1:30 left",
        "  iteration 40: held-out loss 2.8750",
    ]


@pytest.mark.parametrize("expected", ["2 ranks on the CPU: importing Megatron", " 40/400 "])
def test_on_a_terminal_there_is_something_to_see_from_the_start(expected):
    assert expected in shown(True, "noise", ITERATION.format(loss=LOSS))
