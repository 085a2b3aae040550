"""A receiver of changed words has the bytes of a full export, or refuses the update."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim import ops
from moe_optim.errors import LayoutError, StateError
from moe_optim.rollout.changed_words import ChangedWords, ChangedWordsReceiver
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import normal_weights

FORMATS = ("mxfp8_2d", "fp8_block", "nvfp4_rows", "int4", "bf16")


class Trainer:
    """Two weights, whose masters a step moves a little, and their bytes in a format."""

    def __init__(self, format):
        self.format = format
        self.masters = [normal_weights(2, 32, 64, seed=1), normal_weights(1, 32, 96, seed=2)]
        self.generator = torch.Generator().manual_seed(3)

    def step(self, lr):
        for master in self.masters:
            master += lr * torch.randn(master.shape, generator=self.generator)

    def weights(self):
        """One expert a tensor for data, and three bytes that fill no word."""
        found = {"odd": self.masters[0].view(-1)[:3].bfloat16().view(torch.uint8)[:3].clone()}
        for number, master in enumerate(self.masters):
            if self.format == "bf16":
                found[f"{number}.data"] = list(master.bfloat16())
                continue
            quantized = ops.quantize(master, self.format)
            found[f"{number}.data"] = list(quantized.rowwise_data)
            found[f"{number}.scale"] = quantized.rowwise_scale
            if quantized.global_amax is not None:
                found[f"{number}.amax"] = quantized.global_amax
        return found


def stacked(weights):
    return {
        name: torch.stack(one) if isinstance(one, list) else one.clone()
        for name, one in weights.items()
    }


def empty(weights):
    return {name: torch.zeros_like(one) for name, one in stacked(weights).items()}


def assert_same(got, weights):
    for name, want in stacked(weights).items():
        assert_bytes_equal(got[name], want, what=name)


@settings(max_examples=25)
@given(
    format=st.sampled_from(FORMATS),
    events=st.lists(
        st.sampled_from(["step", "leap", "export", "full", "lose", "restart", "new receiver"]),
        max_size=14,
    ),
)
def test_in_any_order_of_events_the_bytes_are_those_of_the_weights_or_the_update_is_refused(
    format, events
):
    trainer, sender, receiver = Trainer(format), ChangedWords(), ChangedWordsReceiver()
    got, is_behind = empty(trainer.weights()), True
    for event in [*events, "export", "step", "full", "step", "export"]:
        match event:
            case "step" | "leap":
                trainer.step(1e-6 if event == "step" else 1.0)
            case "lose":  # what no receiver gets
                sender.export(trainer.weights())
                is_behind = True
            case "restart":
                sender = ChangedWords()
            case "new receiver":
                receiver, got, is_behind = ChangedWordsReceiver(), empty(trainer.weights()), True
            case _:
                update = sender.export(trainer.weights(), full=event == "full")
                if is_behind and update.base is not None:
                    before = {name: one.clone() for name, one in got.items()}
                    with pytest.raises(StateError, match="full=True"):
                        receiver.apply(update, got)
                    assert_same(got, before)
                    continue
                receiver.apply(update, got)
                is_behind = False
                assert_same(got, trainer.weights())
    assert not is_behind


def test_a_repeated_update_is_refused_with_both_generations():
    trainer, sender, receiver = Trainer("mxfp8_2d"), ChangedWords(), ChangedWordsReceiver()
    got = empty(trainer.weights())
    receiver.apply(sender.export(trainer.weights()), got)
    trainer.step(1e-6)
    update = sender.export(trainer.weights())
    receiver.apply(update, got)
    with pytest.raises(StateError, match=r"generation 2 \(\w+\), got one of 1 \(\w+\): some were"):
        receiver.apply(update, got)


def test_an_update_of_a_restarted_sender_is_not_taken_for_the_old_ones():
    """Both count one export, and the receiver has seen the first sender's."""
    trainer, receiver = Trainer("bf16"), ChangedWordsReceiver()
    got = empty(trainer.weights())
    receiver.apply(ChangedWords().export(trainer.weights()), got)
    trainer.step(1e-6)
    restarted = ChangedWords()
    restarted.export(trainer.weights())  # lost
    trainer.step(1e-6)
    with pytest.raises(StateError, match="some were lost"):
        receiver.apply(restarted.export(trainer.weights()), got)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_an_update_of_a_copied_sender_is_not_taken_for_that_of_the_other(way):
    """As of one that a checkpoint has kept; both have counted two exports by then."""
    sender, receiver, weights = ChangedWords(), ChangedWordsReceiver(), {"a": torch.zeros(100)}
    got = empty(weights)
    receiver.apply(sender.export(weights), got)
    copied = way(sender)
    weights["a"][1] = 1
    receiver.apply(sender.export(weights), got)
    weights["a"][1] = 0
    copied.export(weights)  # lost
    weights["a"][2] = 1
    with pytest.raises(StateError, match="some were lost"):
        receiver.apply(copied.export(weights), got)


def test_words_of_an_export_that_failed_are_not_lost():
    """It has recorded the first tensor when the second cannot be read."""
    sender, receiver = ChangedWords(), ChangedWordsReceiver()
    weights = {"a": torch.zeros(100), "b": torch.zeros(100)}
    got = empty(weights)
    receiver.apply(sender.export(weights), got)
    weights["a"][3] = 1
    with pytest.raises(RuntimeError, match="meta"):
        sender.export(weights | {"b": torch.zeros(100, device="meta")})
    with pytest.raises(StateError, match="full=True"):
        receiver.apply(sender.export(weights), got)
    receiver.apply(sender.export(weights, full=True), got)
    assert_same(got, weights)


def test_either_side_may_be_in_inference_mode_at_times():
    sender, receiver, weights = ChangedWords(), ChangedWordsReceiver(), {"a": torch.zeros(100)}
    with torch.inference_mode():
        got = empty(weights)
        receiver.apply(sender.export(weights), got)
    for place in (1, 2):
        weights["a"][place] = 1
        receiver.apply(sender.export(weights), got)
        assert_same(got, weights)


def test_an_update_has_the_words_that_changed_and_no_more():
    weights = {"a": torch.zeros(100, dtype=torch.uint8), "b": torch.zeros(50)}
    sender = ChangedWords()
    assert sender.export(weights).nbytes == 100 + 200
    assert sender.export(weights).nbytes == 0
    weights["a"][[3, 4, 99]] = 1
    weights["b"][1] = 1
    update = sender.export(weights)
    assert update.positions.tolist() == [0, 1, 24, 26]
    assert update.nbytes == 4 * 8
    weights["b"] += 1
    assert sender.export(weights).base is None, "words and positions are more than all words"


def test_other_tensors_are_refused():
    sender, receiver = ChangedWords(), ChangedWordsReceiver()
    update = sender.export({"a": torch.zeros(8), "b": torch.zeros(2)})
    with pytest.raises(LayoutError, match="export: .* a: 36 for 32"):
        sender.export({"a": torch.zeros(9), "b": torch.zeros(2)})
    with pytest.raises(LayoutError, match="apply: .* b: no for 8"):
        receiver.apply(update, {"a": torch.zeros(8)})
    with pytest.raises(LayoutError, match="another order"):
        receiver.apply(update, {"b": torch.zeros(2), "a": torch.zeros(8)})
    with pytest.raises(LayoutError, match="contiguous"):
        receiver.apply(update, {"a": torch.zeros(4, 2).T, "b": torch.zeros(2)})
