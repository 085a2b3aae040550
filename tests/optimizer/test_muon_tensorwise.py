"""Muon over weights with per-tensor scaling, which lie in Megatron's own buffers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_optim.config import MoEOptimConfig
from tests.support.bytes import assert_bytes_equal
from tests.support.ranks import run_ranks
from tests.support.te import tensorwise
from tests.support.wrapping import build_optimizer, layer_config, wrap

STEPS = 3
SHAPES = {
    "embedding.word_embeddings.weight": (48, 32),
    "decoder.router.weight": (4, 32),
    "decoder.linear_fc1.weight": (96, 32),
    "decoder.linear_fc2.weight": (32, 48),
    "decoder.norm.weight": (32,),
    "decoder.experts.linear_fc1.weight0": (64, 32),
    "decoder.experts.linear_fc1.weight1": (64, 32),
    "decoder.experts.linear_fc2.weight0": (32, 32),
    "output_layer.weight": (48, 32),
}
IN_BF16 = {"embedding.word_embeddings.weight", "decoder.router.weight", "decoder.norm.weight"}
"""Parameters that are never quantized; the output layer is, which no Megatron recipe does."""


def _make_model(config: Any, is_quantized: bool) -> Any:
    from megatron.core.transformer import MegatronModule

    model = MegatronModule(config=config)
    generator = torch.Generator().manual_seed(0)
    for name, shape in SHAPES.items():
        *path, last = name.split(".")
        module: torch.nn.Module = model
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        values = torch.randn(shape, generator=generator).bfloat16()
        if is_quantized and name not in IN_BF16:
            param = tensorwise.make_weight(values.float())
        else:
            param = torch.nn.Parameter(values)
        param.is_embedding_or_output_parameter = "embedding" in name or "output" in name
        param.allreduce = "experts" not in name
        module.register_parameter(last, param)
    return model


def _train(step: str, is_quantized: bool, flags: dict[str, Any]) -> dict[str, Any]:
    """Return masters and weights after some steps with gradients that depend on name and rank."""
    from megatron.core import parallel_state

    import moe_optim
    from moe_optim.integration import cpu_runtime

    cpu_runtime.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    casts = tensorwise.teach_megatron()
    format = "auto" if is_quantized else "bf16"
    moe_optim.install(MoEOptimConfig(format=format, step=step), optimizer="muon")  # type: ignore[arg-type]
    config = layer_config(32)
    model = _make_model(config, is_quantized)
    ddp = wrap(config, model, fp8_param_gather=is_quantized, **flags)
    # Megatron's norm is a sum in fp32, which depends on the shards
    clip = 1.0 if step == "fused" else 0.0
    optimizer = build_optimizer(ddp, optimizer="muon", lr=0.05, weight_decay=0.1, clip_grad=clip)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        for param in model.parameters():
            param.main_grad.normal_(generator=generator)
        ddp.finish_grad_sync()
        assert optimizer.step()[0]
        ddp.start_param_sync(force_sync=True)
    return {
        "masters": {name: _whole(optimizer, param) for name, param in model.named_parameters()},
        "weights": {name: _weight(param) for name, param in model.named_parameters()},
        "casts": casts,
        "is_fused": optimizer.is_fused,
        "buffers": sorted(
            (buffer.param_dtype is torch.uint8, len(buffer.params))
            for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)
        ),
        "groups": [
            len({type(part).__name__ for part in optimizer.chained_optimizers
                 if any(group.params & set(buffer.params) for buffer in part.buffers)})
            for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)
        ],
    }  # fmt: skip


def _whole(optimizer: Any, param: Any) -> torch.Tensor:
    whole = torch.zeros(param.numel())
    for part in optimizer.chained_optimizers:
        if param in part.model_param_gbuf_map:
            owned = part._get_model_param_range_map(param)["param"]
            whole[owned.start : owned.end] = param.main_param
    dist.all_reduce(whole)
    return whole.view(param.shape)


def _weight(param: Any) -> tuple[torch.Tensor, ...]:
    if hasattr(param, "_scale_inv"):
        return param._data.clone(), param._scale_inv.clone()
    return (param.detach().clone(),)


@pytest.mark.parametrize(
    ("step", "flags"),
    [("fused", {"overlap_param_gather": True, "overlap_grad_reduce": True}), ("stock", {})],
)
def test_masters_are_those_of_bf16_weights_and_weights_their_cast(step, flags):
    """Of the same gradients, on 2 ranks, in the bits; every rank has all codes after the gather.
    Fused steps cast weights themselves; quantized weights of Muon and of Adam lie apart."""
    plain = run_ranks(2, _train, step, False, {})
    ours = run_ranks(2, _train, step, True, flags)
    for rank in range(2):
        assert ours[rank]["is_fused"] == plain[rank]["is_fused"] == (step == "fused")
        assert bool(ours[rank]["casts"]) == (step == "stock")
        assert set(ours[rank]["groups"]) == {1}
        assert sum(is_quantized for is_quantized, _ in ours[rank]["buffers"]) == 3
        for name, master in ours[rank]["masters"].items():
            assert_bytes_equal(master, plain[0]["masters"][name], what=name)
            if name in IN_BF16:
                (weight,) = ours[rank]["weights"][name]
                assert_bytes_equal(weight, master.bfloat16(), what=name)
                continue
            codes, scale_inv = ours[rank]["weights"][name]
            want, inverse = tensorwise.cast_to_one_scale(master)
            assert_bytes_equal(codes, want, what=f"{name}, codes")
            assert_bytes_equal(scale_inv, inverse.view(1), what=f"{name}, scale")
