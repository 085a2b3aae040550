"""Amaxes of what experts read: the largest magnitude on any rank, and none that nobody saw.

Transformer Engine's linears stand in, see ``te_experts``; the oracle is plain torch over the inputs
of all ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_optim.errors import ConfigError, LayoutError, NonFiniteError
from tests.support.bytes import assert_bytes_equal
from tests.support.modules import experts
from tests.support.modules.adapters import wrap
from tests.support.modules.calibrating import HIDDEN, LINEARS, Kind, amaxes_of, make
from tests.support.ranks import run_ranks

PORTABLE = Kind(owner="portable", format="bf16", single=True)
CASES = [
    (PORTABLE, False),
    (PORTABLE, True),
    (replace(PORTABLE, format="mxfp8"), False),
    (Kind(owner="Transformer Engine", format="bf16", single=False), False),
    (Kind(owner="Transformer Engine", format="bf16", single=False), True),
]
"""Kind of experts, and whether adapters are around their linears."""
TOKENS = 12


def cases(tp: int) -> list[tuple[Kind, bool]]:
    """Return the cases on ranks of this size; the adapters here are of whole experts."""
    return [case for case in CASES if tp == 1 or not case[1]]


def tokens_of(rank: int, scale: float = 1.0) -> torch.Tensor:
    """Return tokens [T, HIDDEN] bf16 of which another rank has the largest magnitude each time."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator) * scale
    tokens[rank, 3] = -7.0 * scale - rank
    return tokens.bfloat16()


def run_experts(module: Any, tokens: torch.Tensor) -> None:
    """Send tokens through the experts of this rank, of which the first one gets none."""
    count = getattr(module, "num_local_experts", None) or module.linear_fc1.num_gemms
    per_expert = torch.zeros(count, dtype=torch.int64)
    per_expert[1:] = len(tokens) // (count - 1)
    probs = torch.linspace(0.5, 1.0, len(tokens))
    module(tokens, per_expert, probs)


def watch(module: Any) -> tuple[dict[str, list[torch.Tensor]], Callable[[], None]]:
    """Return a growing list of the inputs of each linear, and a function that ends it."""
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in LINEARS}
    hooks = []
    for name, inputs in seen.items():
        linear = module.get_submodule(name)
        linear = getattr(linear, "to_wrap", linear)
        keep = lambda _, args, inputs=inputs: inputs.append(args[0].clone())  # noqa: E731
        hooks.append(linear.register_forward_pre_hook(keep))
    return seen, lambda: [hook.remove() for hook in hooks]


def inputs_of(module: Any) -> dict[str, torch.Tensor | None]:
    from moe_optim import calibrated_input_amax

    return {name: calibrated_input_amax(module.get_submodule(name)) for name in LINEARS}


def _calibrate_inputs(
    parallel: dict[str, int], ep: int, tp: int, idle: int | None
) -> list[dict[str, tuple[Any, torch.Tensor]]]:
    """Return amax and inputs of each linear; rank ``idle`` gets no tokens."""
    import moe_optim

    experts.start_ranks(**parallel)
    rank, found = dist.get_rank(), []
    for kind, is_adapted in cases(tp):
        module = make(kind, ep, tp)
        module = wrap(module) if is_adapted else module
        module.train()
        module.linear_fc2.eval()
        seen, stop = watch(module)

        def loop(model: Any, module: Any = module) -> None:
            assert model is module and not torch.is_grad_enabled()
            assert not any(one.training for one in model.modules())
            for scale in (1.0, 0.5):
                tokens = tokens_of(0 if tp > 1 else rank, scale)
                run_experts(model, tokens[:0] if rank == idle else tokens)

        moe_optim.calibrate([module], forward_loop=loop)
        stop()
        assert module.training and module.linear_fc1.training and not module.linear_fc2.training
        assert None not in amaxes_of(module).values()
        run_experts(module, 100 * tokens_of(rank))  # which nobody observes any more
        moe_optim.calibrate([module])  # weights alone leave amaxes of inputs
        held = inputs_of(module)
        found.append({name: (held[name], torch.cat(seen[name])) for name in LINEARS})
    return found


SIZES = {
    "experts over ranks, of which one has no tokens": (
        {"expert_model_parallel_size": 2},
        (2, 1, 1),
    ),
    "halves of experts": (
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        (1, 2, None),
    ),
    "copies of experts": ({}, (1, 1, None)),
}


def _on_two_ranks() -> dict[str, list[Any]]:
    found = {name: _calibrate_inputs(parallel, *sizes) for name, (parallel, sizes) in SIZES.items()}
    return {**found, "refused": _refused(), "selected": _selected()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[Any]]]:
    return run_ranks(2, _on_two_ranks)


@pytest.mark.parametrize("name", SIZES)
def test_an_amax_is_the_largest_magnitude_of_all_ranks_inputs(name, ranks):
    """Of portable experts and Transformer Engine's, behind adapters too, whose own weights do not
    count: observed in evaluation mode, and only while the loop runs."""
    _, (_, tp, _) = SIZES[name]
    for case, *both in zip(cases(tp), *(found[name] for found in ranks), strict=True):
        for linear in LINEARS:
            inputs = torch.cat([of_rank[linear][1] for of_rank in both])
            want = inputs.float().abs().max().view(1, 1, 1)
            for of_rank in both:
                assert_bytes_equal(of_rank[linear][0], want, what=f"{case} {linear}")


def _refused() -> list[str]:
    """Return the errors of loops that go wrong on rank 1 alone, and where nothing is stored."""
    import moe_optim

    experts.start_ranks(expert_model_parallel_size=2)
    rank, module = dist.get_rank(), make(PORTABLE, 2)

    def finite(model: Any) -> None:
        run_experts(model, tokens_of(rank))

    def broken(value: float) -> Callable[[Any], None]:
        def loop(model: Any) -> None:
            tokens = tokens_of(rank)
            if rank:
                tokens[2, 5] = value
            run_experts(model, tokens)

        return loop

    def raising(_: Any) -> None:
        if rank:
            raise ValueError("no data")

    moe_optim.calibrate([module], forward_loop=finite)
    held = {**amaxes_of(module), **{f"inputs of {n}": a for n, a in inputs_of(module).items()}}
    messages = []
    for error, loop in (
        (NonFiniteError, broken(torch.nan)),
        (NonFiniteError, broken(-torch.inf)),
        (LayoutError, lambda _: None),
        (ConfigError, finite if rank else None),
        (ConfigError, [] if rank else finite),
        (Exception, raising),
    ):
        with pytest.raises(error) as caught:
            moe_optim.calibrate([module], forward_loop=loop)
        messages.append(str(caught.value))
        now = {**amaxes_of(module), **{f"inputs of {n}": a for n, a in inputs_of(module).items()}}
        assert all(now[name] is amax for name, amax in held.items())
        assert not module.linear_fc1._forward_pre_hooks
    return messages


def test_what_goes_wrong_on_one_rank_is_raised_on_all_and_nothing_is_stored(ranks):
    first, second = (found["refused"] for found in ranks)
    assert second[0] == second[1] and "NaN or Inf in those of linear_fc1, linear_fc2" in second[0]
    assert first[:2] == [f"rank 1: {message}" for message in second[:2]]
    assert first[2] == second[2] and "none on any rank for linear_fc1, linear_fc2" in first[2]
    assert first[3] == second[3] and "False on rank 0 and True on rank 1" in first[3]
    assert first[4] == f"rank 1: {second[4]}" and "forward_loop: expected a function" in second[4]
    assert first[5] == "rank 1: no data" and second[5] == "no data"


def _selected() -> list[bool]:
    import moe_optim

    experts.start_ranks()
    module = make(PORTABLE)
    fc1, fc2 = module.linear_fc1, module.linear_fc2

    def loop(model: Any) -> None:
        run_experts(model, tokens_of(0))

    class EmptyLoop(list[Any]):
        def __call__(self, model: Any) -> None:
            loop(model)

    moe_optim.calibrate([module], forward_loop=EmptyLoop())
    weights, inputs = amaxes_of(module), inputs_of(module)
    assert None not in (*weights.values(), *inputs.values())
    moe_optim.calibrate([module], quant_cfg=["*_fc1"])
    assert_bytes_equal(moe_optim.calibrated_amax(fc1), weights["linear_fc1"], what="fc1")
    assert moe_optim.calibrated_input_amax(fc1) is inputs["linear_fc1"]
    assert amaxes_of(module)["linear_fc2"] is inputs_of(module)["linear_fc2"] is None
    rules = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*fc1.weight_quantizer", "cfg": {"num_bits": 8, "axis": None}},
        {"quantizer_name": "*fc2.input_quantizer", "enable": True},
    ]
    moe_optim.calibrate([module], quant_cfg=rules, forward_loop=loop)
    assert [held is None for held in amaxes_of(module).values()] == [False, True]
    assert [held is None for held in inputs_of(module).values()] == [True, False]
    assert_bytes_equal(inputs_of(module)["linear_fc2"], inputs["linear_fc2"], what="fc2")

    moe_optim.set_calibrated_input_amax(fc1, torch.tensor(3.3, dtype=torch.float64))
    set_here = moe_optim.calibrated_input_amax(fc1)
    assert_bytes_equal(set_here, torch.full((1, 1, 1), 3.3), what="set")
    for wrong in (torch.ones(2), torch.tensor(-1.0), torch.tensor(torch.nan), 3.0):
        with pytest.raises(LayoutError, match=r"linear_fc1.calibrated_input_amax: expected"):
            moe_optim.set_calibrated_input_amax(fc1, wrong)
    module.bfloat16()
    assert moe_optim.calibrated_input_amax(fc1).dtype == torch.float32
    state = module.state_dict()
    assert {key for key in state if key.endswith("amax")} == {
        "linear_fc1.calibrated_amax",
        "linear_fc1.calibrated_input_amax",
        "linear_fc2.calibrated_input_amax",
    }
    moe_optim.set_calibrated_input_amax(fc2, None)
    other = make(PORTABLE)
    moe_optim.calibrate([other], forward_loop=loop)
    other.load_state_dict(state, strict=True)
    return [  # those of the state, and no others
        held is None if buffer not in state else torch.equal(held, state[buffer])
        for name in LINEARS
        for buffer, held in (
            (f"{name}.calibrated_amax", amaxes_of(other)[name]),
            (f"{name}.calibrated_input_amax", inputs_of(other)[name]),
        )
    ]


def test_weights_and_inputs_are_selected_apart_and_the_rest_loses_its_amaxes(ranks):
    """As quantizers that ModelOpt disables; selected inputs without a loop keep what they had. A
    plain state dict of some amaxes loads these alone."""
    assert [found["selected"] for found in ranks] == [[True] * 4] * 2
