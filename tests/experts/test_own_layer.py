"""The layer of the API reference: what it computes, and that expert parallelism changes nothing."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_optim
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, LayoutError
from tests.support.bytes import assert_bytes_equal
from tests.support.modules import experts
from tests.support.ranks import run_ranks
from tests.support.wrapping import build_optimizer, wrap

PAGE = Path(__file__).parents[2] / "docs" / "api" / "modules.md"
HIDDEN, FFN, EXPERTS, TOKENS = 64, 32, 4, 3
SHAPES = ((EXPERTS, 2 * FFN, HIDDEN), (EXPERTS, HIDDEN, FFN))


def own_experts(ep_size: int, values: list[torch.Tensor], first: int) -> Any:
    """Build the layer of the page, with values of all experts [E, R, C], from the first one on."""
    (code,) = re.findall(r"^```python\n(.*?class OwnExperts.*?)^```", PAGE.read_text(), re.M | re.S)
    found: dict[str, Any] = {}
    exec(code, found)
    layer = found["OwnExperts"](EXPERTS, HIDDEN, FFN, ep_size)
    local = EXPERTS // ep_size
    for linear, whole in zip((layer.linear_fc1, layer.linear_fc2), values, strict=True):
        linear.load_values(whole[first : first + local], keep_for_masters=True)
    return layer


def make_values() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return weights of both linears, and tokens of all experts, [E, T, C]; bf16."""
    random = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=random).mul(0.1).bfloat16() for shape in SHAPES]
    return values, torch.randn(EXPERTS, TOKENS, HIDDEN, generator=random).bfloat16()


METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def state_of(layer: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    state = {"model": layer.sharded_state_dict("experts.")}
    given = state, is_loading
    state["optimizer"] = optimizer.sharded_state_dict(*given, metadata=METADATA)
    return state


def step(model: Any, ddp: Any, optimizer: Any, tokens: torch.Tensor, scale: int) -> None:
    """Step on the tokens [E, T, C] of the experts of this rank."""
    ddp.zero_grad_buffer()
    output = model.experts(tokens.flatten(0, 1), torch.full((len(tokens),), TOKENS))
    (scale * output.float().square().sum()).backward()  # as of the tokens of every rank
    ddp.finish_grad_sync()
    optimizer.step()


def step_once(
    ep_size: int, save: Path | None = None, load: Path | None = None, *, is_marked: bool = True
) -> list[torch.Tensor]:
    """Step the layer on one of two ranks, and return its weights, [E, R, C] fp32.

    Without ``is_marked``, weights lack ``allreduce``. With ``load``, the step follows those of a
    checkpoint; with ``save``, the step is saved, and another follows.
    """
    from megatron.core import dist_checkpointing

    experts.start_ranks(expert_model_parallel_size=ep_size)
    config = experts.make_config(
        hidden_size=HIDDEN,
        moe_ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        expert_model_parallel_size=ep_size,
    )
    moe_optim.install(MoEOptimConfig())
    values, tokens = make_values()
    local = EXPERTS // ep_size
    first = torch.distributed.get_rank() * local if ep_size > 1 else 0
    model = torch.nn.Module()
    model.config, model.experts = config, own_experts(ep_size, values, first)
    if not is_marked:
        for weight in model.experts.parameters():
            del weight.allreduce
    ddp = wrap(config, model)
    optimizer = build_optimizer(ddp, lr=1e-2, clip_grad=0.0)
    layer = model.experts
    if load is not None:
        template = state_of(layer, optimizer, is_loading=True)
        loaded = dist_checkpointing.load(template, str(load))
        named = {key.removeprefix("experts."): one for key, one in loaded["model"].items()}
        layer.load_state_dict(named)
        optimizer.load_state_dict(loaded["optimizer"])
    step(model, ddp, optimizer, tokens[first : first + local], ep_size)
    if save is not None:
        dist_checkpointing.save(state_of(layer, optimizer, is_loading=False), str(save))
        step(model, ddp, optimizer, tokens[first : first + local], ep_size)
    return [linear.weight.dequantize().float() for linear in (layer.linear_fc1, layer.linear_fc2)]


def test_experts_over_two_ranks_are_stepped_as_on_one():
    whole, again = run_ranks(2, step_once, 1)
    halves = run_ranks(2, step_once, 2)
    before, _ = make_values()
    for linear, start in enumerate(before):
        assert_bytes_equal(whole[linear], again[linear])
        assert_bytes_equal(torch.cat([half[linear] for half in halves]), whole[linear])
        assert (whole[linear] - start.float()).abs().max() > 5e-3


def test_a_saved_layer_goes_on_at_another_expert_parallel_size(tmp_path):
    """Weights, masters and moments: the next step is that of the run that was saved."""
    halves = run_ranks(2, step_once, 2, tmp_path)
    whole, _ = run_ranks(2, step_once, 1, None, tmp_path)
    for linear in range(len(SHAPES)):
        assert_bytes_equal(torch.cat([half[linear] for half in halves]), whole[linear])


def refuse_unmarked() -> str:
    with pytest.raises(ConfigError) as error:
        step_once(2, is_marked=False)
    return str(error.value)


def test_experts_without_a_mark_are_refused_before_gradients_of_others_are_added():
    for said in run_ranks(2, refuse_unmarked):
        assert said.startswith("experts.linear_fc1.weight.allreduce: expected False for experts")


def calibrate_and_export() -> tuple[torch.Tensor, list[torch.Tensor], str]:
    """Return the amaxes of fc1, the exported weights, and the error without process groups."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    experts.start_ranks()
    config = experts.make_config(
        hidden_size=HIDDEN, moe_ffn_hidden_size=FFN, num_moe_experts=EXPERTS
    )
    moe_optim.install(MoEOptimConfig())
    layer = own_experts(1, make_values()[0], 0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.experts = config, layer

        def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
            return layer.sharded_state_dict("experts.")

    chunks = [wrap(config, Model())]
    with pytest.raises(LayoutError) as error:
        moe_optim.calibrate(chunks)
    layer.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    moe_optim.calibrate(chunks)
    amaxes = moe_optim.calibrated_amax(layer.linear_fc1)
    assert amaxes is not None
    exported = dict(moe_optim.export_weights(chunks, layout="grouped"))
    data = [exported[f"experts.{linear}.weight"] for linear in ("linear_fc1", "linear_fc2")]
    return amaxes, data, str(error.value)


def test_a_layer_with_process_groups_is_calibrated_and_exported():
    amaxes, data, said = run_ranks(1, calibrate_and_export)[0]
    assert "give it pg_collection" in said
    quantized = [moe_optim.quantize(values, "mxfp8") for values in make_values()[0]]
    values = moe_optim.dequantize(quantized[0]).float()
    assert_bytes_equal(amaxes, values.abs().amax((1, 2), keepdim=True))
    for own, reference in zip(data, quantized, strict=True):
        assert_bytes_equal(own.view(torch.uint8), reference.rowwise_data)
