"""What a fused step decides before anything moves, and when steps are fused at all."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, NonFiniteError
from tests.optimizer.test_nonfinite import NAME, _snapshot
from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks
from tests.support.states import life_cycle
from tests.support.training import pretrain
from tests.support.wrapping import build_optimizer, layer_config, wrap

HEAD = "mtp.layers.0.eh_proj.weight"
FLAGS = ["--eval-interval", "1000000", "--no-check-for-nan-in-loss-and-grad", "--clip-grad", "0.5"]
FLAGS += ["--mtp-num-layers", "1", "--mtp-detach-heads", "--train-iters", "6"]
TRIALS: dict[int, tuple[str, dict[str, float], float]] = {
    # step: policy, what becomes of one gradient, and the largest norm that is stepped
    2: ("skip", {NAME: torch.nan}, torch.inf),
    3: ("skip", {HEAD: -torch.inf}, torch.inf),  # whose norm is one of its own
    4: ("raise", {NAME: torch.nan, HEAD: torch.inf}, torch.inf),
    5: ("raise", {}, 1e-9),
}


def _train_through_trials() -> dict[int, tuple[bool, str]]:
    """Return whether a step moved and what was said of it, having seen that nothing else has."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("moe_optim.optimizer")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    outcomes: dict[int, tuple[bool, str]] = {}

    def watch(model: list[Any], optimizer: Any) -> None:
        take_step = optimizer.step

        def step() -> Any:
            number = len(outcomes) + 1
            policy, values, optimizer.config.grad_norm_skip_threshold = TRIALS.get(
                number, ("raise", {}, torch.inf)
            )
            optimizer.policy = policy
            for name, param in model[0].module.named_parameters():
                for ending, value in values.items():
                    if name.endswith(ending):
                        param.main_grad.view(-1)[2 * param.numel() // 4 + 5] = value
            before, counts = _snapshot(model, optimizer), _steps_of(optimizer)
            said.clear()
            try:
                result = take_step()
            except NonFiniteError as error:
                result = False, None, None
                said.append(str(error))
            outcomes[number] = result[0], " ".join(said)
            if not result[0]:
                assert_same_tensors(_snapshot(model, optimizer), before, what=f"step {number}")
                assert _steps_of(optimizer) == counts
            return result

        optimizer.step = step

    config = MoEOptimConfig(format="mxfp8", step="fused")
    pretrain(FLAGS, config, after_setup=watch)
    return outcomes


def _steps_of(optimizer: Any) -> list[int]:
    return [group.get("step", 0) for group in optimizer.param_groups]


def test_a_step_that_is_not_taken_moves_nothing_and_says_why():
    """Masters, moments, their count of steps and weights are as they were to the bit; steps before
    and after are taken."""
    for rank, outcomes in enumerate(run_ranks(2, _train_through_trials)):
        moved = [number for number, (has_moved, _) in outcomes.items() if has_moved]
        assert moved == [1, 6]
        skipped, of_head, raised, too_large = (outcomes[number][1] for number in TRIALS)
        assert "optimizer step skipped: gradient norm is nan" in skipped
        assert f"{NAME}, expert 2: 1 non-finite gradient" in skipped
        assert "gradient norm of mtp is inf" in of_head
        assert f"{HEAD}: 1 non-finite gradient" in of_head
        assert "gradient norm is nan, gradient norm of mtp is inf" in raised
        assert raised.count("1 non-finite gradient") == 2  # one rank owns each
        assert "No weight has moved" in raised
        assert ("is above the threshold" in too_large) is (rank == 0)


# When steps are fused

NARROW = {"use_precision_aware_optimizer": True}
HEALTHY: dict[str, dict[str, Any]] = {
    "fp32 moments": {},
    "bf16 moments": NARROW | {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
}
UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {  # format, settings, what is said of them
    "a loss scale": ("mxfp8", {"loss_scale": 8.0}, "a loss scale"),
    "fp16 moments": (
        "mxfp8",
        NARROW | {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
        "moments in torch.float16",
    ),
    "moments of two dtypes": (
        "mxfp8",
        NARROW | {"exp_avg_dtype": torch.bfloat16},
        "moments in torch.bfloat16 and torch.float32",
    ),
    "fp8 moments": (
        "mxfp8",
        NARROW | {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
        "moments in torch.uint8",
    ),
    "Adam's own masters": (
        "bf16",
        NARROW | {"main_params_dtype": torch.float16},
        "masters that Adam holds (--use-precision-aware-optimizer with bf16 weights, or with "
        "--main-params-dtype other than fp32)",
    ),
}
STOCK = [{"step": "stock"}, {"layout": "stock"}, {"backend": "reference"}]


def _build(knobs: dict[str, Any], settings: dict[str, Any]) -> tuple[bool, str]:
    """Return whether steps are fused, and what the description says of them."""

    import moe_optim

    moe_optim.uninstall()
    moe_optim.install(MoEOptimConfig(**knobs))
    ddp = wrap(layer_config(32), life_cycle.make_layers(knobs["format"]))
    optimizer = build_optimizer(ddp, **settings)
    described = moe_optim.describe([ddp], optimizer)
    assert f"step {described.step}" in str(described)
    return optimizer.is_fused, described.step


def _choose_steps() -> dict[str, Any]:
    from megatron.core import optimizer as core_optimizer

    from moe_optim.optimizer import chained
    from moe_optim.optimizer.adam import GroupStepAdam

    class StatelessAdam(GroupStepAdam):
        """Forgets moments before each step, as Megatron's Adam would not."""

        def step(self, closure: Any = None) -> None:
            self.state.clear()
            super().step(closure)

    class AdamWithMasters(GroupStepAdam):
        """As that of Transformer Engine where it may keep masters; it takes no step here."""

        def __init__(self, params: Any, **settings: Any) -> None:
            for name in ("master_weights", "use_decoupled_grad", "master_weight_dtype"):
                settings.pop(name, None)
            super().__init__(params, **settings)

    life_cycle.initialize()
    found: dict[str, Any] = {"on a CPU": _build({"format": "mxfp8"}, {})}
    with pytest.raises(ConfigError, match="got others, whose masters Transformer Engine's Adam"):
        _build({"format": "bf16"}, NARROW)
    chained.has_kernels = lambda _: True  # what auto asks; no step is taken here
    for name, settings in HEALTHY.items():
        found[name] = _build({"format": "mxfp8"}, settings)
    found["stock"] = [_build({"format": "mxfp8"} | knobs, {}) for knobs in STOCK]
    core_optimizer.Adam = AdamWithMasters
    for name, (format, settings, _) in UNFIT.items():
        found[name] = _build({"format": format}, settings)
        found[f"{name}, fused"] = _refused(format, settings)
    for step in ("auto", "fused"):
        found[f"bf16 weights, {step}"] = _build({"format": "bf16", "step": step}, NARROW)
    core_optimizer.Adam = StatelessAdam
    found["another Adam"] = _build({"format": "mxfp8"}, {})
    found["another Adam, fused"] = _refused("mxfp8", {})
    core_optimizer.Adam = AdamWithMasters
    if torch.distributed.get_rank() == 1:
        stock = chained.setup_of
        chained.setup_of = lambda *args: replace(stock(*args), adam="something of rank 1")
    found["on rank 1"] = _build({"format": "mxfp8"}, {})
    found["on rank 1, fused"] = _refused("mxfp8", {})
    return found


def _refused(format: str, settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        _build({"format": format, "step": "fused"}, settings)
    return str(error.value)


@pytest.fixture(scope="module")
def chosen() -> Sequence[dict[str, Any]]:
    """Return what both ranks saw of every way to choose."""
    return run_ranks(2, _choose_steps)


def test_steps_of_another_adam_are_its_own(chosen):
    """As of slime's ``--use-stateless-adam``, which replaces the class for the factory's call."""
    for of_rank in chosen:
        assert of_rank["another Adam"] == (False, "stock")
        assert "StatelessAdam, an Adam other than Megatron's: " in of_rank["another Adam, fused"]


def test_auto_is_fused_where_kernels_run_and_says_so(chosen):
    """And not with a knob that asks for Megatron's bits, or for plain torch."""
    for of_rank in chosen:
        assert of_rank["on a CPU"] == (False, "stock")
        assert {name: of_rank[name] for name in HEALTHY} == dict.fromkeys(HEALTHY, (True, "fused"))
        assert of_rank["stock"] == [(False, "stock")] * len(STOCK)


@pytest.mark.parametrize("name", UNFIT)
def test_what_a_fused_step_cannot_take_is_refused_with_a_remedy_and_auto_takes_stock(chosen, name):
    """When the optimizer is built, before a step is taken."""
    for of_rank in chosen:
        assert of_rank[name] == (False, "stock")
        assert UNFIT[name][2] in of_rank[f"{name}, fused"]
        assert of_rank[f"{name}, fused"].startswith("moe_optim: step: fused with ")
        assert "; or set step: auto or step: stock." in of_rank[f"{name}, fused"]


def test_masters_of_bf16_weights_are_adams_unless_a_fused_step_is_asked_for(chosen):
    """With ``--use-precision-aware-optimizer``, whose Adam keeps them in less memory."""
    for of_rank in chosen:
        assert of_rank["bf16 weights, auto"] == (False, "stock")
        assert of_rank["bf16 weights, fused"] == (True, "fused")


def test_ranks_agree_though_one_alone_knows_a_reason(chosen):
    """No rank waits for another, and none steps in its own way."""
    assert [of_rank["on rank 1"] for of_rank in chosen] == [(False, "stock")] * 2
    others, own = (of_rank["on rank 1, fused"] for of_rank in chosen)
    assert "step: fused with an optimizer of another rank that cannot be fused" in others
    assert "step: fused with something of rank 1" in own
