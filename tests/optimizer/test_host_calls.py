"""What the host does in a fused step, where every expert is a parameter of its own.

Everything that a weight has can be exchanged without a word, so each is looked at in every step:
by loops of C, while the device finds the norm. Nothing else depends on how many there are.
"""

import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from types import FrameType
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import MXFP8
from tests.support.bytes import assert_bytes_equal
from tests.support.ranks import on_ranks
from tests.support.states import life_cycle
from tests.support.te import te_stand_ins
from tests.support.te.te_stand_ins import MXFP8Tensor
from tests.support.wrapping import build_optimizer, layer_config, wrap

WIDTH = 32
KINDS = ("portable", "transformer_engine")


class Apart:
    """Experts in one process, whose gradients are given by hand. Nothing is run forward.

    Args:
        kind: one of ``KINDS``: whose weights.
        experts: their number.
        overlap: whether forward passes gather, and not the step.
        wire: gather dtype.
    """

    def __init__(
        self, kind: str, experts: int, *, overlap: bool = False, wire: Any = "quantized"
    ) -> None:
        from megatron.core.transformer import MegatronModule

        import moe_optim

        self.overlap = overlap
        moe_optim.uninstall()
        layout = "aligned" if wire == "quantized" else "stock"
        moe_optim.install(MoEOptimConfig(format="mxfp8", layout=layout, wire=wire, step="fused"))
        self.generator = torch.Generator().manual_seed(0)
        config = layer_config(WIDTH)
        model, linear = MegatronModule(config=config), self._make_linear(kind, experts)
        model.add_module("experts", linear)
        self.weights = list(linear.parameters())
        gathers = {"overlap_param_gather": overlap}
        self.ddp = wrap(
            config, model, grad_reduce_in_fp32=False, overlap_grad_reduce=overlap, **gathers
        )
        self.optimizer = build_optimizer(self.ddp, lr=1e-2, weight_decay=0.1, **gathers)
        (part,) = self.optimizer.chained_optimizers
        owned = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
        self.masters = {
            param: master for groups in owned for param, master in zip(*groups, strict=True)
        }

    def _make_linear(self, kind: str, experts: int) -> torch.nn.Module:
        values = torch.randn(experts, WIDTH, WIDTH, generator=self.generator)
        if kind == "portable":
            linear = GroupedLinear(*values.shape, format=MXFP8, expert_layout="indexed")
            linear.load_values(values, keep_for_masters=True)
            return linear
        module = torch.nn.Module()
        for expert, value in enumerate(values):
            weight = te_stand_ins.as_parameter(te_stand_ins.MXFP8Tensor(MXFP8, value))
            module.register_parameter(f"weight{expert}", weight)
        return module

    def backward(self) -> None:
        """Give every weight a gradient, and reduce them."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        for weight in self.weights:
            weight.quantized_storage.before_gradient()
            weight.main_grad.normal_(generator=self.generator)
        if self.overlap:
            self.ddp.start_grad_sync()
        self.ddp.finish_grad_sync()

    def gather(self) -> None:
        """Gather as forward passes do; nothing where the step has."""
        if self.overlap:
            self.ddp.start_param_sync(force_sync=True)


FEW, MANY = 4, 16
LOOKS = {"portable": 5, "transformer_engine": 9}
"""Calls into torch for a weight: where its gradient, master, moments and fields lie, and what was
written into the master."""


def _launch_nothing() -> None:
    """Let tables have launches on a CPU, and these do nothing, as the reference loops in Python."""
    from moe_optim.kernels import plan
    from moe_optim.kernels.plan import BoundKernel

    BoundKernel.__call__ = lambda self, *given: None
    plan.has_kernels = plan.runs_triton = lambda device: True


def _count_in_step(model: Apart) -> Counter[tuple[bool, bool]]:
    """Return the Python functions that a step calls, after some in which everything was planned.

    By whether the norm is being found, and by whether the call is one into torch: the CPU runtime
    sees each of those, also in a loop of C.
    """
    find, finding = model.optimizer.find_norms, [False]
    calls: Counter[tuple[bool, bool]] = Counter()

    def find_norms() -> Any:
        finding[0] = True
        try:
            return find()
        finally:
            finding[0] = False

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[finding[0], frame.f_code.co_name == "__torch_function__"] += 1

    model.optimizer.find_norms = find_norms
    for _ in range(3):
        model.backward()
        model.optimizer.step()
        model.gather()
    model.backward()
    sys.setprofile(count)
    try:
        moved, _, _ = model.optimizer.step()
    finally:
        sys.setprofile(None)
    assert moved
    return calls


@on_ranks(1)
def test_a_step_calls_no_more_functions_where_there_are_more_experts():
    """Only calls into torch increase, and only in the norm, whichever optimizer gathers."""
    life_cycle.initialize()
    _launch_nothing()
    for kind, overlap in product(KINDS, (False, True)):
        few, many = (
            _count_in_step(Apart(kind, experts, overlap=overlap)) for experts in (FEW, MANY)
        )
        looks = few.pop((True, True)), many.pop((True, True))
        assert few == many
        assert looks[1] - looks[0] == LOOKS[kind] * (MANY - FEW)


def _drop_scales(weight: Any) -> None:
    weight._columnwise_scale_inv = None


def _replace_scales(weight: Any) -> None:
    weight._rowwise_scale_inv = torch.full_like(weight._rowwise_scale_inv, 7)


def _exchange_data_of_scales(weight: Any) -> None:
    weight._columnwise_scale_inv.data = torch.full_like(weight._columnwise_scale_inv, 7)


def _reorder_scales(weight: Any) -> None:
    weight._with_gemm_swizzled_scales = True


def _exchange_all_masters(model: Apart) -> None:
    for master in model.masters.values():
        master.data = master.data.clone()


def _write_a_master(model: Apart) -> None:
    next(iter(model.masters.values())).mul_(2)


def _of_one(change: Callable[[Any], None]) -> Callable[[Apart], None]:
    return lambda model: change(model.weights[1])


EXCHANGES = [
    *(_exchange_all_masters, _write_a_master),
    *map(
        _of_one,
        (_drop_scales, _replace_scales, _exchange_data_of_scales, _reorder_scales),
    ),
]


def _exchange_and_step(overlap: bool) -> int:
    model = Apart("transformer_engine", 3, overlap=overlap)
    compared = 0
    for exchange in (lambda _: None, *EXCHANGES):
        for between_step_and_gather in {False, overlap}:
            model.backward()
            if not between_step_and_gather:
                exchange(model)
            model.optimizer.step()
            if between_step_and_gather:
                exchange(model)
            model.gather()
            for weight, master in model.masters.items():
                want = MXFP8Tensor(MXFP8, master.view(weight.shape))
                for name, tensor in vars(want).items():
                    if name.startswith(("_rowwise", "_columnwise")):
                        assert_bytes_equal(getattr(weight, name), tensor, what=name)
                        compared += 1
                assert not weight._with_gemm_swizzled_scales
    return compared


@life_cycle.on_a_rank
def test_what_was_exchanged_before_a_gather_holds_the_weights_of_the_masters():
    """Before the step, and between it and a gather that is not its own."""
    found = [_exchange_and_step(overlap) for overlap in (False, True)]
    gathers = 1 + len(EXCHANGES)
    assert found == [gathers * 3 * 4, 2 * gathers * 3 * 4]


def _exchange_and_count_plans(wire: str) -> list[int]:
    model = Apart("portable", 3, wire=wire)
    (part,) = model.optimizer.chained_optimizers
    plans = []
    for exchange in (lambda _: None, lambda _: None, _exchange_all_masters, lambda _: None):
        model.backward()
        exchange(model)
        model.optimizer.step()
        plans.append(part._plans)
    return plans


@life_cycle.on_a_rank
def test_a_plan_is_void_once_masters_lie_elsewhere():
    """Kernels know addresses; and nothing is planned anew where nothing moved."""
    assert [_exchange_and_count_plans(wire) for wire in ("quantized", "bf16")] == [[1, 1, 2, 2]] * 2


@life_cycle.on_a_rank
def test_data_that_a_gather_cannot_reach_is_refused_before_a_master_moves():
    model = Apart("transformer_engine", 3)
    for _ in range(2):
        model.backward()
        model.optimizer.step()
    before = [master.clone() for master in model.masters.values()]
    model.backward()
    model.weights[1]._rowwise_data = model.weights[1]._rowwise_data.clone()
    with pytest.raises(StateError, match=r"experts\.weight1: expected the data .*another tensor"):
        model.optimizer.step()
    for master, old in zip(model.masters.values(), before, strict=True):
        assert_bytes_equal(master, old)
