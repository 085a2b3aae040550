"""Any order of what loops do: weights and gradients are the model's, or the call raises.

Hypothesis drives the life cycle of ``tests/support/states/life_cycle.py`` in one process, where all
known hazards of shared buffers show. The suite runs 1,500 steps, the same ones each time; ``make
life-cycle`` draws others, and more of them.
"""

import math
import os
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from moe_optim.errors import StateError
from tests.support.ranks import on_ranks, run_ranks
from tests.support.states import life_cycle
from tests.support.states.life_cycle_bugs import BUGS, put_back

pytestmark = pytest.mark.slow

STEPS = int(os.environ.get("LIFE_CYCLE_STEPS", "1500"))
SEED = os.environ.get("LIFE_CYCLE_SEED")
EXAMPLE_STEPS = 50
SETTINGS: list[dict[str, Any]] = [
    {"wire": "quantized", "overlap": True},
    {"wire": "quantized", "overlap": False, "format": "nvfp4"},
    {"wire": "bf16", "overlap": True},
    {"wire": "bf16", "overlap": False},
    {"wire": "quantized", "overlap": True, "step": "fused"},
    {"wire": "quantized", "overlap": False, "format": "nvfp4", "step": "fused"},
    {"wire": "bf16", "overlap": True, "step": "fused"},
    {"wire": "quantized", "overlap": True, "step": "fused", "offload_states": 1},
    {"wire": "quantized", "overlap": True, "step": "fused", "optimizer": "muon"},
    {"wire": "bf16", "overlap": True, "step": "fused", "optimizer": "muon and adam"},
    {"wire": "quantized", "overlap": False, "format": "nvfp4", "optimizer": "muon and adam"},
]
NAMES = (
    *("quantized, overlap", "quantized", "bf16, overlap", "bf16"),
    *("quantized, overlap, fused", "quantized, fused", "bf16, overlap, fused"),
    "quantized, overlap, fused, states on the host",
    *("muon, quantized, overlap, fused", "muon and adam, bf16, overlap, fused"),
    "muon and adam, quantized",
)
SEEDS = st.integers(0, 99)

PLAIN = (
    "zero",
    "step",
    "skip",
    "disable_hooks",
    "enable_hooks",
    "force_sync",
    "dispatch",
    "free",
    "paged_stash_fallback",
    "offload",
    "reload",
    "make_room",
    "send_away",
    "send_all_away",
    "bring_back",
    "rest",
    "export",
    "save",
    "load",
)
"""Methods of the life cycle without arguments."""

WITH_ARGUMENTS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "micro": {"seed": SEEDS, "last": st.booleans()},
    "rollout": {"seed": SEEDS},
    "evaluate": {"seed": SEEDS},
    "copy": {"seed": SEEDS},
    "write_by_hand": {"seed": SEEDS},
    "failing_backward": {"seed": SEEDS, "at": st.integers(0, 2)},
    "failing_step": {"part": st.integers(0, 1), "moved": st.booleans()},
    "failing_gather": {"at": st.sampled_from(life_cycle.GATHER_PARTS)},
    "nonfinite": {"of": st.integers(0, 2)},
    "rewrite_masters": {"seed": SEEDS},
    "exchange": {"what": st.sampled_from(life_cycle.EXCHANGED)},
}
"""Methods with arguments, and what these may be."""

Call = tuple[str, dict[str, Any]]
Trace = list[Call]
ABSENCES = ("disable_hooks", "enable_hooks", "offload", "reload", "send_away", "bring_back")
"""Of these one is as likely as any other call: while something is away, a loop may do little."""

ANY_CALL: st.SearchStrategy[Call] = st.one_of(
    st.tuples(st.sampled_from(ABSENCES), st.just({})),
    *(
        st.tuples(st.just(name), st.fixed_dictionaries(WITH_ARGUMENTS.get(name, {})))
        for name in (*PLAIN, *WITH_ARGUMENTS)
        if name not in ABSENCES
    ),
)


BETWEEN_STEPS = (
    *("export", "send_away", "send_all_away", "bring_back", "rest", "offload", "reload"),
    "make_room",
    *("evaluate", "rollout", "save", "load", "dispatch", "rewrite_masters"),
)
"""What loops of reinforcement learning do between two steps."""


class Machine(RuleBasedStateMachine):
    """Does what hypothesis says, and compares everything after each step."""

    options: dict[str, Any] = {}
    steps, most = 0, math.inf
    trace: Trace = []
    exports = 0

    def __init__(self) -> None:
        super().__init__()
        if Machine.steps < Machine.most:
            self.cycle = life_cycle.LifeCycle(**self.options)
        Machine.trace = []

    def do(self, name: str, **arguments: Any) -> None:
        if Machine.steps >= Machine.most or not self.cycle.may(name):
            return
        Machine.steps += 1
        Machine.trace.append((name, arguments))
        Machine.exports += name == "export"
        failure = None
        try:
            getattr(self.cycle, name)(**arguments)
            self.cycle.check()
        except Exception as error:
            failure = error
        if not self.cycle.agree(failure is None):  # so that all ranks stop here, and none waits
            Machine.most = math.inf  # hypothesis does it again
            raise failure or AssertionError("another rank has failed")

    @rule(
        seeds=st.lists(SEEDS, min_size=1, max_size=3),
        dropped=st.sets(st.integers(0, 4), max_size=2),
        between=st.dictionaries(st.integers(0, 5), st.lists(ANY_CALL, max_size=2), max_size=3),
    )
    def train_step(
        self, seeds: list[int], dropped: set[int], between: dict[int, list[Call]]
    ) -> None:
        """What a loop mostly does, with calls left out, and with others in between."""
        calls: list[Call] = [("zero", {})]
        for index, seed in enumerate(seeds):
            calls.append(("micro", {"seed": seed, "last": index == len(seeds) - 1}))
        calls.append(("step", {}))
        for index, (name, arguments) in enumerate(calls):
            if index not in dropped:
                self.do(name, **arguments)
            for other, others in between.get(index, []):
                self.do(other, **others)

    @rule(
        name=st.sampled_from(["zero", "dispatch"]),
        between=st.lists(ANY_CALL, min_size=1, max_size=2),
    )
    def start_over(self, name: str, between: list[Call]) -> None:
        """A step, or a gather, that is begun, and begun again."""
        for other, arguments in ((name, {}), *between, (name, {})):
            self.do(other, **arguments)

    @rule(call=ANY_CALL)
    def anything(self, call: Call) -> None:
        self.do(call[0], **call[1])


class Rollouts(Machine):
    """Does what loops of reinforcement learning do, in any order."""

    train_step = start_over = anything = None

    @rule(seed=SEEDS, between=st.lists(st.sampled_from(BETWEEN_STEPS), max_size=2))
    def learn(self, seed: int, between: list[str]) -> None:
        """A whole step, weights there or not, with something before it."""
        for name in between:
            self.do_one(name, seed)
        for name, arguments in (
            ("zero", {}),
            ("micro", {"seed": seed, "last": True}),
            ("step", {}),
        ):
            self.do(name, **arguments)

    @rule(name=st.sampled_from(BETWEEN_STEPS), seed=SEEDS)
    def serve(self, name: str, seed: int) -> None:
        self.do_one(name, seed)

    @rule()
    def hand_over(self) -> None:
        self.do("export")

    def do_one(self, name: str, seed: int) -> None:
        self.do(name, **({"seed": seed} if name in WITH_ARGUMENTS else {}))


def drawn_by(number: str | None, machine: type[Machine]) -> type[Machine]:
    """Return the machine with the orders of a seed; without one, with those that never change."""
    if number is None:
        return machine
    return hypothesis.seed(int(number))(type("Drawn", (machine,), {}))


ORDERS = 50


def _roll_out(options: list[dict[str, Any]], calls: int) -> int:
    """Return how often weights were exported."""
    life_cycle.initialize()
    exports = 0
    for one in options:
        Machine.options = one
        run_state_machine_as_test(
            drawn_by(SEED, Rollouts),
            settings=settings(
                max_examples=ORDERS // len(options),
                stateful_step_count=calls,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        exports += Machine.exports
        Machine.exports = 0
    return exports


def test_no_order_of_steps_and_rollouts_exports_other_weights_than_those_of_the_masters():
    """50 orders of step, export, weights and gradients to the host and back, evaluation, rollout,
    save and load: every export gives the oracle's bytes, or it raises."""
    (exports,) = run_ranks(1, _roll_out, [SETTINGS[2], SETTINGS[-1]], 6)
    assert exports >= ORDERS


@pytest.mark.extended
def test_no_order_of_steps_and_rollouts_exports_other_weights_on_two_ranks():
    exports = run_ranks(2, _roll_out, SETTINGS, 12, timeout_s=600)
    assert min(exports) >= ORDERS


def _run(
    steps: int,
    options: dict[str, Any],
    phases: tuple[Phase, ...] = tuple(Phase),
    number: str | None = None,
) -> int:
    Machine.options, Machine.steps, Machine.most = options, 0, steps
    run_state_machine_as_test(
        drawn_by(number, Machine),
        settings=settings(
            max_examples=2 + steps // 25,  # an example has more than 30 steps on average
            stateful_step_count=EXAMPLE_STEPS,
            derandomize=True,
            database=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Machine.steps


def _drive(steps: int, settings: dict[str, dict[str, Any]]) -> dict[str, int]:
    life_cycle.initialize()
    done = {}
    for name, options in settings.items():
        print(name, flush=True)  # what a failure shows last
        done[name] = _run(steps, options, number=SEED)
    return done


def test_no_order_of_calls_mixes_weights_and_gradients():
    """An equal part of all steps on each wire, with the gather overlapped and in the step, and with
    either kind of step."""
    part = STEPS // len(SETTINGS)
    settings = dict(zip(NAMES, SETTINGS, strict=True))
    (steps,) = run_ranks(1, _drive, part, settings, timeout_s=max(180, STEPS // 4))
    assert min(steps.values()) >= part


@pytest.mark.extended
@pytest.mark.parametrize(
    ("format", "optimizer"),
    [
        ("mxfp8", "adam"),
        ("mxfp8_2d", "adam"),
        ("nvfp4", "adam"),
        ("mxfp8", "muon"),
        ("nvfp4", "muon and adam"),
    ],
)
def test_no_order_of_calls_mixes_slices_of_two_ranks(format: str, optimizer: str):
    """Each encodes its own with a step, and what they share of a block after an exchange; with
    Muon, ranks own different numbers of whole matrices."""
    options = {"wire": "quantized", "format": format, "step": "fused", "optimizer": optimizer}
    steps = run_ranks(2, _drive, STEPS // 15, {"": options}, timeout_s=max(180, STEPS // 15))
    assert min(done[""] for done in steps) >= STEPS // 15


def _find(name: str) -> Trace:
    """Put a bug back; return the sequence that showed it, empty if none did."""
    life_cycle.initialize()
    BUGS[name].put_back()
    try:
        _run(30_000, BUGS[name].options, phases=(Phase.generate,))
    except (AssertionError, StateError):  # of the model, or a refusal of what is allowed
        return Machine.trace
    return []


FOUND_EACH_TIME = {  # of each wire, of each kind of step, and on two ranks
    *("#4562", "#4800", "#5487", "H2", "a step that fails", "moments that were replaced"),
    "an evaluation of one rank's slices",
}
"""The others are left to ``make test-all``: each is shown by a few calls, in TRACES."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.extended] * (name not in FOUND_EACH_TIME))
        for name in BUGS
    ],
)
def test_every_historic_bug_is_found_when_it_is_put_back(name: str):
    """Within 30,000 random steps some comparison fails."""
    trace, *others = run_ranks(BUGS[name].ranks, _find, name)
    assert trace, f"{name} was not found"
    assert all(other == trace for other in others)


TRAIN = [("zero", {}), ("micro", {"seed": 0, "last": True}), ("step", {})]
SHRINK: Trace = [("rewrite_masters", {"seed": 0}), *TRAIN, ("force_sync", {})]
FAILING: Trace = [("failing_backward", {"seed": 1, "at": 0})]
TRACES: dict[str, Trace] = {  # mostly as hypothesis shrank them
    "#2802": [*TRAIN, ("evaluate", {"seed": 0})],
    "#4562": [*TRAIN, ("force_sync", {})],
    "#4800": [*TRAIN, ("evaluate", {"seed": 0})],
    "#5236": [*TRAIN, ("force_sync", {})],
    "#5487": [("evaluate", {"seed": 0}), *TRAIN, ("rollout", {"seed": 0})],
    "H2": [*TRAIN, ("rollout", {"seed": 0}), ("rollout", {"seed": 1})],
    "H3": [("paged_stash_fallback", {}), ("micro", {"seed": 0, "last": True})],
    "H4": [*TRAIN, ("dispatch", {}), ("force_sync", {})],
    "H5": [*TRAIN, *TRAIN],
    "H6": [*TRAIN, ("dispatch", {}), ("free", {})],
    "H7": [("zero", {}), ("micro", {"seed": 0, "last": False}), ("force_sync", {})],
    "gradients written by hand": [("zero", {}), ("write_by_hand", {"seed": 0}), *TRAIN],
    "a backward pass that fails": [
        ("zero", {}),
        ("failing_backward", {"seed": 1, "at": 2}),
        *TRAIN,
    ],
    "a reduction in flight": [*TRAIN, ("zero", {}), *FAILING, *TRAIN],
    "a step that fails": [
        *TRAIN[:2],
        ("failing_step", {"part": 1, "moved": True}),
        ("rollout", {"seed": 0}),
    ],
    "a gather that fails": [*TRAIN, ("failing_gather", {"at": "finish"}), ("rollout", {"seed": 0})],
    "a copy in training": [("copy", {"seed": 0})],
    "a norm of its own": [*TRAIN[:2], ("nonfinite", {"of": 2})],
    "a flag that asks to share": [*TRAIN, ("rollout", {"seed": 0})],
    "a load after an encoded step": [*TRAIN, ("save", {}), *TRAIN, ("load", {})],
    "maxima of the last step": [("rewrite_masters", {"seed": 0}), *TRAIN, *SHRINK],
    "moments that were replaced": [*TRAIN, ("exchange", {"what": "exp_avg"}), *TRAIN],
    "masters that were moved": [
        *TRAIN,
        ("rollout", {"seed": 0}),
        ("exchange", {"what": "masters"}),
        *TRAIN,
        ("rollout", {"seed": 0}),
    ],
    "an evaluation of one rank's slices": [*TRAIN, ("evaluate", {"seed": 0})],
    "masters by hand after a step": [
        *TRAIN,
        ("rewrite_masters", {"seed": 0}),
        ("rollout", {"seed": 0}),
    ],
    "a look of an earlier step": [
        *TRAIN,
        ("rewrite_masters", {"seed": 0}),
        ("rollout", {"seed": 0}),
    ],
    "masters that moved while weights were away": [*TRAIN, ("make_room", {}), *TRAIN],
    "a momentum that was replaced": [*TRAIN, ("exchange", {"what": "exp_avg"}), *TRAIN],
    "a step that loses momentum": [*TRAIN, *TRAIN],
    "a fused step that fails": [
        *TRAIN[:2],
        ("failing_step", {"part": 1, "moved": True}),
        ("rollout", {"seed": 0}),
    ],
}


SYNC: Trace = [("force_sync", {})]
EVALUATE: Trace = [("evaluate", {"seed": 7})]
ROLLOUT: Trace = [("rollout", {"seed": 8}), ("rollout", {"seed": 9})]
SEQUENCES: dict[str, Trace] = {
    "first iteration": [("disable_hooks", {}), *TRAIN, *SYNC, ("enable_hooks", {}), *TRAIN],
    "evaluation": [*TRAIN, *EVALUATE, *TRAIN],
    "save": [*TRAIN, *SYNC, ("save", {}), *TRAIN],
    "save after an evaluation": [*TRAIN, *EVALUATE, *SYNC, ("save", {}), *TRAIN],
    "hash check": [*TRAIN, *SYNC, *SYNC, *TRAIN],
    "resume": [*TRAIN, ("save", {}), *TRAIN, ("load", {}), *TRAIN],
    "skipped step": [*TRAIN, *TRAIN[:2], ("skip", {}), *TRAIN],
    "exit": [*TRAIN, *SYNC, ("disable_hooks", {})],
    "Megatron-Bridge's evaluation": [*TRAIN, ("paged_stash_fallback", {}), *EVALUATE, *TRAIN],
    "rollouts": [*TRAIN, *ROLLOUT, *TRAIN, *ROLLOUT],
    "rollouts without gradient memory": [
        *TRAIN,
        *SYNC,
        ("offload", {}),
        *ROLLOUT,
        ("reload", {}),
        *TRAIN,
    ],
    "rollouts without anything of training": [
        *TRAIN,
        *SYNC,
        ("send_all_away", {}),
        ("bring_back", {}),
        ("rest", {}),
        *ROLLOUT,
        *TRAIN,
    ],
    "rollouts elsewhere": [*TRAIN, ("offload", {}), ("make_room", {}), ("reload", {}), *TRAIN],
}
"""What Megatron's loop, Megatron-Bridge's and loops of reinforcement learning do."""


def _replay_with_each_bug(ranks: int) -> dict[str, bool]:
    """Return which bugs of so many ranks show, one after another in the same processes."""
    life_cycle.initialize()
    return {name: _shows(name) for name, bug in BUGS.items() if bug.ranks == ranks}


def _shows(name: str) -> bool:
    with put_back(BUGS[name]):
        # a bug that keeps it from being built shows nothing
        cycle = life_cycle.LifeCycle(**BUGS[name].options)
        try:
            life_cycle.replay(cycle, TRACES[name])
        except AssertionError:
            return True
    return False


@pytest.fixture(scope="module")
def shown() -> dict[str, bool]:
    (of_one,) = run_ranks(1, _replay_with_each_bug, 1)
    first, second = run_ranks(2, _replay_with_each_bug, 2)
    assert first == second
    return of_one | first


@pytest.mark.parametrize("name", TRACES)
def test_a_few_calls_suffice_to_show_each_bug(shown: dict[str, bool], name: str):
    assert shown[name]


@on_ranks(1)
def test_what_shows_a_bug_shows_nothing_without_it():
    """Under the bug's own settings; and a step that gathers, whatever loops do after it."""
    runs = [(bug.options, TRACES[name]) for name, bug in BUGS.items() if bug.ranks == 1]
    gathering = {"wire": "quantized", "overlap": False, "step": "fused"}
    runs += [(gathering, trace) for trace in SEQUENCES.values()]
    life_cycle.initialize()
    assert sum(life_cycle.replay(life_cycle.LifeCycle(**one), trace) for one, trace in runs) == sum(
        (len(trace) for _, trace in runs)
    )


BRIEF = ("quantized, overlap, fused", "muon and adam, bf16, overlap, fused")
"""Settings that are no repeat of others on two ranks."""


EVERYTHING: list[Trace] = []
"""Each trace and sequence once, a step and an evaluation after it."""
for once in (*TRACES.values(), *SEQUENCES.values()):
    if (followed := [*once, *TRAIN, ("evaluate", {"seed": 1})]) not in EVERYTHING:
        EVERYTHING.append(followed)


def _replay_all(options: dict[str, Any], traces: list[Trace]) -> int:
    life_cycle.initialize()
    return sum(life_cycle.replay(life_cycle.LifeCycle(**options), trace) for trace in traces)


@pytest.mark.parametrize(
    ("options", "traces"),
    [
        *(
            pytest.param(dict(zip(NAMES, SETTINGS, strict=True))[name], half, id=name)
            for name, half in zip(BRIEF, (EVERYTHING[::2], EVERYTHING[1::2]), strict=True)
        ),
        *(
            pytest.param(options, EVERYTHING, id=f"{name}, all", marks=pytest.mark.extended)
            for name, options in zip(NAMES, SETTINGS, strict=True)
        ),
    ],
)
def test_what_loops_do_is_right_on_two_ranks(options: dict[str, Any], traces: list[Trace]):
    """Half of the traces with each brief setting; all of them with all settings is extended."""
    # A thread of gloo crashed here twice, in some forty runs with a device for all groups.
    calls = run_ranks(2, _replay_all, options, traces, shares_device=False)
    assert calls == [sum(map(len, traces))] * 2
