"""Quantized weights on the host: whatever reads or writes their bytes is told so, and touches none.

Each rank is a process of its own, so that a read of freed memory ends it and fails the test.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moe_optim
from moe_optim.errors import StateError
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.storage import PortableStorage
from tests.rollout.test_export_weights import Setup, build, step
from tests.support.ranks import on_ranks
from tests.support.states import life_cycle
from tests.support.states.buckets import StandInBucket
from tests.support.states.making_room import managed_buffers, send_weights_away

pytest.importorskip("megatron.core")

CASES = [
    ("mxfp8", "grouped", "quantized"),
    ("nvfp4", "indexed", "bf16"),
]


class Model:
    """One layer under DDP, after a step."""

    def __init__(
        self, format: str, expert_layout: str, wire: str = "quantized", **knobs: Any
    ) -> None:
        knobs |= {
            "format": format,
            "expert_layout": expert_layout,
            "wire": wire,
            "layout": "stock" if wire == "bf16" else "aligned",
        }
        setup = Setup(knobs=knobs, model={"num_layers": 1, "hidden_size": 64, "kv_channels": 16})
        self.chunks, self.optimizer = build(setup)
        step(self.chunks, self.optimizer)
        (self.experts,) = (
            module
            for module in self.chunks[0].modules()
            if type(module).__name__ == "GroupedExperts"
        )
        self.linear = self.experts.linear_fc1
        self.weight: Any = self.linear.weights()[0]
        self.storage = getattr(self.weight, "quantized_storage", None)
        self.buffers = managed_buffers(self.chunks)

    def ones(self) -> torch.Tensor:
        return torch.ones(self.weight.shape, dtype=torch.bfloat16)

    def product(self) -> torch.Tensor:
        experts, _, cols = self.linear.shape
        tokens = torch.ones(2 * experts, cols, dtype=torch.bfloat16, requires_grad=True)
        ends = torch.arange(2, 2 * experts + 1, 2, dtype=torch.int32)
        product: torch.Tensor = self.linear(tokens, ends)
        return product

    def wrap_again(self) -> None:
        from megatron.core.distributed import DistributedDataParallel

        (chunk,) = self.chunks
        for param in chunk.parameters():
            del param.main_grad
        DistributedDataParallel(chunk.config, chunk.ddp_config, chunk.module)


def _write_another(model: Model) -> Callable[[], Any]:
    storage = PortableStorage(model.storage.format, model.storage.shape)
    other = GroupedWeight(storage, model.weight.shape)
    return lambda: other.copy_(model.weight.detach())


def _save_later(model: Model) -> Callable[[], Any]:
    from megatron.core.dist_checkpointing.mapping import apply_factories

    state = model.chunks[0].sharded_state_dict()
    return lambda: apply_factories(state)


def _view(model: Model) -> Callable[[], Any]:
    view = model.storage.expert(0)
    return lambda: view.dequantize()


def _whole(model: Model) -> Callable[[], Any]:
    whole = model.linear.storage or model.storage
    return lambda: whole.dequantize("columnwise")


def _later(act: Callable[[Model], Any]) -> Callable[[Model], Callable[[], Any]]:
    return lambda model: lambda: act(model)


def _backward(model: Model) -> Callable[[], Any]:
    product = model.product()
    return lambda: product.sum().backward()


def _clip(model: Model) -> Callable[[], Any]:
    """What a delayed weight gradient reads, long after its backward pass."""
    wgrad = torch.ones(model.linear.shape, dtype=torch.bfloat16)
    return lambda: model.linear.clip_wgrad(wgrad)


READERS: dict[str, Callable[[Model], Callable[[], Any]]] = {
    "a torch function": _later(lambda m: m.weight.float()),
    "dequantize": _later(lambda m: m.weight.dequantize()),
    "dequantize of the storage": _later(lambda m: m.storage.dequantize()),
    "dequantize of an expert's view": _view,
    "dequantize of all experts": _whole,
    "the buffers": _later(lambda m: m.storage.quantized),
    "what masters start from": _later(lambda m: m.weight.get_high_precision_init_val()),
    "forward": _later(lambda m: m.product()),
    "backward": _backward,
    "copy_ into a tensor": _later(lambda m: m.ones().copy_(m.weight)),
    "copy_ into a quantized weight": _write_another,
    "copy_ into the weight": _later(lambda m: m.weight.detach().copy_(m.ones())),
    "requantize": _later(lambda m: m.storage.write(m.ones().view(m.storage.shape))),
    "copy_bytes_from": _later(
        lambda m: m.storage.copy_bytes_from(
            PortableStorage(m.storage.format, m.storage.shape, record_amax=True)
        )
    ),
    "a copy on the host": _later(lambda m: m.weight.detach().cpu()),
    "clone of the storage": _later(lambda m: m.storage.clone()),
    "deepcopy of the weight": _later(lambda m: copy.deepcopy(m.weight)),
    "deepcopy of the experts": _later(lambda m: copy.deepcopy(m.experts)),
    "a saved state dict": _later(lambda m: torch.save(m.linear.state_dict(), io.BytesIO())),
    "a loaded state dict": _later(
        lambda m: m.linear.load_state_dict(
            {name: torch.ones_like(p) for name, p in m.linear.named_parameters()}, strict=False
        )
    ),
    "sharded_state_dict": _later(lambda m: m.chunks[0].sharded_state_dict()),
    "values of an earlier sharded_state_dict": _save_later,
    "amax of the storage": _later(lambda m: m.storage.amax),
    "amax of the linear": _later(lambda m: m.linear.amax()),
    "synchronize_amax": _later(lambda m: moe_optim.synchronize_amax(m.chunks)),
    "calibrate": _later(lambda m: moe_optim.calibrate(m.chunks)),
    "export_weights": _later(lambda m: list(moe_optim.export_weights(m.chunks))),
    "broadcast of DDP": _later(lambda m: m.chunks[0].broadcast_params()),
    "another bucket": _later(lambda m: m.storage.bind({}, bucket=StandInBucket())),
    "reload_model_params": _later(lambda m: m.optimizer.reload_model_params()),
    "step": _later(lambda m: step(m.chunks, m.optimizer)),
    "another DDP": _later(lambda m: m.wrap_again()),  # the last: it takes gradients away
}
"""What each prepares while weights are there, and does once they are away."""
BF16_READERS = {
    name: READERS[name] for name in ("forward", "backward", "calibrate", "export_weights", "step")
}
"""Of experts that lie in Megatron's own buffers."""


def _outcome(act: Callable[[], Any]) -> str:
    try:
        act()
    except StateError as error:
        named = "they are offloaded. Call reload_from_cpu" in str(error)
        named |= "got weights on the host. Call reload_from_cpu" in str(error)
        named |= "the weights were rewritten between forward and backward" in str(error)
        return "refused" if named else str(error)
    return "no error"


def _outcomes(acts: dict[str, Callable[[], Any]]) -> dict[str, str]:
    outcomes = {}
    for name, act in acts.items():
        print("reads:", name, flush=True)
        outcomes[name] = _outcome(act)
    return outcomes


@pytest.mark.parametrize(("format", "expert_layout", "wire"), CASES)
@on_ranks(1)
def test_weights_on_the_host_are_neither_read_nor_written(format, expert_layout, wire):
    """Each reader raises StateError that says what to call; a description reads nothing."""
    life_cycle.initialize()
    model = Model(format, expert_layout, wire, record_amax=True)
    acts = {name: prepare(model) for name, prepare in READERS.items()}
    for buffer in model.buffers:
        buffer.offload_to_cpu(move_grads=False)
    described = moe_optim.describe(model.chunks, model.optimizer).line
    assert all(format in text for text in (described, repr(model.weight), repr(model.linear)))
    outcomes = _outcomes(acts)
    assert outcomes == dict.fromkeys(READERS, "refused")


@pytest.mark.parametrize(
    ("expert_layout", "compute"),
    [("grouped", "int8_per_expert"), ("indexed", "mxfp8"), ("grouped", None)],
)
@on_ranks(1)
def test_bf16_experts_on_the_host_are_neither_read_nor_written(expert_layout, compute):
    """Nor is a quantized or fake-quantized copy made of them."""
    life_cycle.initialize()
    clipped = {"clip_wgrad": _clip} if compute == "int8_per_expert" else {}
    model = Model("bf16", expert_layout, compute=compute)
    moe_optim.calibrate(model.chunks)
    acts = {name: prepare(model) for name, prepare in (clipped | BF16_READERS).items()}
    send_weights_away(model.chunks)
    outcomes = _outcomes(acts)
    assert len(outcomes) >= len(BF16_READERS)
    assert set(outcomes.values()) == {"refused"}, outcomes
