"""``moe_optim.calibrate``: every expert's amax, the same wherever it is held, or one clear error.

Transformer Engine's linears stand in, see ``te_experts``; the oracle is plain torch.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_optim.errors import ConfigError, LayoutError, NonFiniteError, StateError
from tests.support.bytes import assert_bytes_equal
from tests.support.modules import experts
from tests.support.modules.calibrating import (
    EXPERTS,
    KINDS,
    LINEARS,
    Kind,
    amaxes_of,
    fill,
    make,
    want_amax,
    whole_weights,
)
from tests.support.ranks import run_ranks

BF16 = Kind(owner="portable", format="bf16", single=True)
FEW = (BF16, replace(BF16, format="mxfp8", single=False), KINDS[-1])
SPREAD = {"expert_model_parallel_size": 2}
CUT = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
Found = dict[str, dict[str, torch.Tensor]]
"""Kind -> linear -> amax."""


def _on_two_ranks() -> dict[str, Any]:
    """Return what a rank finds in every part, each with groups of its own."""
    return {
        "spread": _calibrate(SPREAD, KINDS, ep=2),
        "cut": _calibrate(CUT, KINDS, tp=2),
        "one of all, spread": _calibrate(SPREAD, FEW, ep=2, axis=None),
        "one of all, copied": _calibrate({}, FEW, axis=None),
        "other copies": _copies_that_differ(),
        "special": _special_values(),
        "loaded": _load_from_all(),
        "refused": _refused(),
        "staged": _only_one_rank_has_experts(),
        "given": _given_amaxes(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, _on_two_ranks)


def _calibrate(
    parallel: dict[str, int],
    kinds: Sequence[Kind],
    *,
    ep: int = 1,
    tp: int = 1,
    axis: int | None = 0,
) -> Found:
    import moe_optim

    experts.start_ranks(**parallel)
    found = {}
    for kind in kinds:
        module = make(kind, ep, tp)
        assert set(amaxes_of(module).values()) == {None}
        moe_optim.calibrate([module], method="max", axis=axis)
        found[str(kind)] = amaxes_of(module)
    return found


def assert_found(found: Found, experts_of_rank: slice) -> None:
    """Each kind has the amaxes of these experts, of weights as products read them."""
    for kind in KINDS:
        for name, amax in found[str(kind)].items():
            want = want_amax(kind, whole_weights(name))
            assert len(want.unique()) == EXPERTS  # so that no expert could have another's
            assert_bytes_equal(amax, want[experts_of_rank].view(-1, 1, 1), what=f"{kind} {name}")


def test_each_expert_gets_the_amax_of_its_weight_and_of_no_other(ranks):
    """Of bf16 and of quantized weights, which products read as something else than was written;
    two expert-parallel ranks have different amaxes."""
    for rank, found in enumerate(ranks):
        assert_found(found["spread"], slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2))


def test_amaxes_of_cut_experts_are_those_of_whole_ones(ranks):
    """Two ranks hold a half of each expert, of which one alone has the largest element."""
    for found in ranks:
        assert_found(found["cut"], slice(None))


def test_one_amax_of_all_experts_is_the_same_on_any_number_of_ranks(ranks):
    """``axis=None`` is the largest of all experts, wherever these are."""
    for found, way, kind in product(ranks, ("spread", "copied"), FEW):
        for name, amax in found[f"one of all, {way}"][str(kind)].items():
            want = want_amax(kind, whole_weights(name)).amax().view(1, 1, 1)
            assert_bytes_equal(amax, want, what=f"{kind} {name}")


def _given_amaxes() -> bool:
    import moe_optim
    from tests.support.modules.adapters import wrap

    experts.start_ranks()
    values = torch.tensor([1 + 2**-20, 2.0, 0.0, 4.0])
    for kind, is_wrapped in product(FEW, (False, True)):
        module = make(kind)
        module = wrap(module) if is_wrapped else module
        for name in LINEARS:
            linear = module.get_submodule(name)
            for given in (values, values.view(-1, 1), values.view(-1, 1, 1).double()):
                moe_optim.set_calibrated_amax(linear, given)
                held = moe_optim.calibrated_amax(linear)
                assert_bytes_equal(held, values.view(-1, 1, 1), what=f"{kind} {name}")
                assert held.data_ptr() != given.data_ptr()
            moe_optim.set_calibrated_amax(linear, torch.tensor(5.0))
            one = moe_optim.calibrated_amax(linear)
            assert_bytes_equal(one, torch.full((1, 1, 1), 5.0), what=f"{kind} {name}")
            for wrong in (values[:3], -values, values * torch.inf, values.tolist()):
                with pytest.raises(LayoutError, match=r"linear_fc\d|experts"):
                    moe_optim.set_calibrated_amax(linear, wrong)
            assert moe_optim.calibrated_amax(linear) is one
        saved = module.sharded_state_dict(prefix="layer.")
        assert {f"layer.{name}.calibrated_amax" for name in LINEARS} <= saved.keys()
        moe_optim.set_calibrated_amax(linear, None)
        assert moe_optim.calibrated_amax(linear) is None
        with pytest.raises(LayoutError, match="linear: expected one of portable experts"):
            moe_optim.set_calibrated_amax(module, values)
    return True


def test_amaxes_that_were_found_elsewhere_are_held_as_those_of_a_calibration(ranks):
    """Of any shape that tells one an expert, or one of all; copied; and no others."""
    assert all(found["given"] for found in ranks)


def _copies_that_differ() -> dict[str, torch.Tensor]:
    """Calibrate two copies of the same experts: the even ones are larger on rank 0."""
    import moe_optim

    experts.start_ranks()
    module = make(BF16, seed=dist.get_rank())
    factor = torch.ones(EXPERTS, 1, 1)
    factor[dist.get_rank() :: 2] = 2
    fill(module, {name: whole_weights(name) * factor for name in LINEARS})
    moe_optim.calibrate([module])
    return amaxes_of(module)


def test_copies_of_an_expert_hold_the_larger_amax(ranks):
    """Over expert-data-parallel ranks, of which no gather has made the weights equal."""
    for found in ranks:
        for name, amax in found["other copies"].items():
            want = 2 * want_amax(BF16, whole_weights(name)).view(-1, 1, 1)
            assert_bytes_equal(amax, want, what=name)


def _special_values() -> dict[str, list[float]]:
    import moe_optim

    experts.start_ranks()
    found = {}
    for name, changes in SPECIAL.items():
        module = make(BF16)
        weights = {linear: whole_weights(linear) for linear in LINEARS}
        changes(weights["linear_fc1"])
        fill(module, weights)
        moe_optim.calibrate([module])
        found[name] = amaxes_of(module)["linear_fc1"].flatten().tolist()
    return found


def _set(expert: int, values: float, *, only_one: bool = False) -> Callable[[torch.Tensor], None]:
    def change(weights: torch.Tensor) -> None:
        (weights[expert, 0, :1] if only_one else weights[expert]).fill_(values)

    return change


SPECIAL = {
    "as they are": lambda _: None,
    "one NaN": _set(1, torch.nan, only_one=True),
    "zeros": _set(1, 0.0),
    "negative zeros": _set(1, -0.0),
    "the least subnormal": _set(1, 2.0**-133),
    "the largest number": _set(1, torch.finfo(torch.bfloat16).max),
}


def test_an_amax_ignores_nan_and_may_be_zero(ranks):
    found = ranks[0]["special"]
    plain = found["as they are"]
    want = dict.fromkeys(SPECIAL, plain[1]) | {
        "zeros": 0.0,
        "negative zeros": 0.0,
        "the least subnormal": 2.0**-133,
        "the largest number": torch.finfo(torch.bfloat16).max,
    }
    assert found == {name: [plain[0], want[name], *plain[2:]] for name in SPECIAL}


# What it refuses: on every rank, before anything is stored on any


class Empty(torch.nn.Module):
    """What looks like a linear of Transformer Engine without experts."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.num_gemms, self._pg_collection = 0, module.pg_collection

    def _split_grouped_checkpoint_tensor(self) -> None:
        """Nothing to split."""


def _with_value(linear: str, value: float) -> Callable[[Any], tuple[Any, ...]]:
    def change(module: Any) -> tuple[Any, ...]:
        module.get_submodule(linear).weight.data[1].fill_(value)
        return ([module],)

    return change


def _offloaded(module: Any) -> tuple[Any, ...]:
    module.linear_fc1.weight.untyped_storage().resize_(0)
    return ([module],)


REFUSALS: dict[str, tuple[Callable[[Any], tuple[Any, ...]], type[Exception], str]] = {
    # of the experts -> arguments, what is raised, and what it says
    "a method": (lambda m: ([m], "mse"), ConfigError, "method: expected one of max, got 'mse'"),
    "a chunk": (lambda m: (m,), ConfigError, "expected a list of .* got no chunk .GroupedExperts"),
    "zero experts": (
        lambda m: ([Empty(m)],),
        LayoutError,
        "calibrate: experts: expected experts, got none",
    ),
    "Inf": (
        _with_value("linear_fc2", -torch.inf),
        NonFiniteError,
        "got 1 expert.s. without:\n  linear_fc2: expert 3: Inf\nNothing was stored",
    ),
    "no number": (
        _with_value("linear_fc1", torch.nan),
        NonFiniteError,
        "linear_fc1: expert 3: no number",
    ),
    "offloaded": (_offloaded, StateError, "linear_fc1: .*they are offloaded. Call reload_from_cpu"),
}


def _refused() -> dict[str, str]:
    """Calibrate what is wrong on rank 1 alone; return what is raised here."""
    import moe_optim

    experts.start_ranks(**SPREAD)
    messages = {}
    for case, (arguments, error, _) in REFUSALS.items():
        module = make(BF16, 2)
        moe_optim.calibrate([module])
        stored = amaxes_of(module)
        with pytest.raises(error) as caught:
            moe_optim.calibrate(*(arguments(module) if dist.get_rank() else ([module],)))
        messages[case] = str(caught.value)
        assert all(amaxes_of(module)[name] is amax for name, amax in stored.items()), case
    module = make(BF16, 2)
    moe_optim.calibrate([module], axis=(0,))
    assert amaxes_of(module)["linear_fc1"].shape == (EXPERTS // 2, 1, 1)
    with pytest.raises(ConfigError, match=r"axis: expected 0 or \(0,\) .* or None .*, got 1"):
        moe_optim.calibrate([module], axis=1)
    with pytest.raises(
        ConfigError, match=r"axis: expected the same on every .* 0 on rank 0 and None"
    ):
        moe_optim.calibrate([module], axis=None if dist.get_rank() else 0)
    with pytest.raises(LayoutError, match="expected MoE layers with grouped experts, got none"):
        moe_optim.calibrate([torch.nn.Linear(2, 2)])
    return messages


def test_what_one_rank_refuses_all_ranks_refuse_and_keep_what_they_had(ranks):
    """No rank waits for another, and none stores what another does not."""
    other, own = (found["refused"] for found in ranks)
    for case, (_, _, says) in REFUSALS.items():
        assert re.search(says, own[case]), own[case]
        assert other[case] == f"rank 1: {own[case]}"


def _only_one_rank_has_experts() -> dict[str, torch.Tensor]:
    """As in a pipeline whose first stage has dense layers alone."""
    import moe_optim

    experts.start_ranks(pipeline_model_parallel_size=2)
    module = make(BF16) if dist.get_rank() else torch.nn.Linear(2, 2)
    moe_optim.calibrate([module])
    return amaxes_of(module) if dist.get_rank() else {}


def test_a_rank_without_experts_takes_part(ranks):
    for name, amax in ranks[1]["staged"].items():
        assert_bytes_equal(amax, want_amax(BF16, whole_weights(name)).view(-1, 1, 1), what=name)


# State dicts of the experts of all ranks


def _load_from_all() -> list[list[float]]:
    """Load the experts of all ranks, or of this one, whose amaxes are their global numbers."""
    experts.start_ranks(**SPREAD)
    found = []
    for kind in (BF16, replace(BF16, single=False), replace(BF16, format="mxfp8")):
        module, mine = make(kind, 2), slice(dist.get_rank() * 2, dist.get_rank() * 2 + 2)
        weights = {f"{name}.weight": whole_weights(name) for name in LINEARS}
        amaxes = {
            f"{name}.calibrated_amax": 1 + torch.arange(4.0).view(4, 1, 1) for name in LINEARS
        }
        for part in (slice(None), mine):
            state = {key: value[part] for key, value in {**weights, **amaxes}.items()}
            module.load_state_dict(state, strict=True)
            found += [amax.flatten().tolist() for amax in amaxes_of(module).values()]
    return found


def test_a_rank_takes_the_amaxes_of_its_experts_out_of_those_of_all(ranks):
    for rank, found in enumerate(ranks):
        assert found["loaded"] == [[2 * rank + 1, 2 * rank + 2]] * 12
