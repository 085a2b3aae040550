"""verl's Megatron engine loads Hugging Face's weights, trains, makes room and hands weights over.

``VERL_PATH`` names its checkout, and ``MEGATRON_BRIDGE_PATH`` what it imports, as in
``tests/integration/test_bridge_package.py``. Ray and engines are stood in for.
"""

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integration.test_bridge_package import find_packages_on_a_cpu
from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks
from tests.support.training_runs.actors import PackedAttention, values_of
from tests.upstream.test_actors import hf_checkpoint  # noqa: F401  # a fixture
from tools.upstream.stand_in_imports import find_bridge, stand_in_for

CHECKOUT = os.environ.get("VERL_PATH", "")
pytestmark = pytest.mark.skipif(not (CHECKOUT and find_bridge()), reason="VERL_PATH is not set")
STEPS = 2
HIDDEN = (
    "ray", "sglang", "vllm", "wandb", "codetiming", "flash_attn", "math_verify", "pylatexenc",
    "liger_kernel", "uvicorn", "fastapi", "scipy", "aiohttp", "diffusers", "qwen_vl_utils",
    "webdataset", "multistorageclient", "starlette", "defusedxml", "orloge", "msgpack",
    "jsonschema", "megatron.energon",
)  # fmt: skip
MODEL = dict.fromkeys(
    ("gradient_accumulation_fusion", "masked_softmax_fusion", "apply_rope_fusion",
     "bias_activation_fusion", "persist_layer_norm", "bias_dropout_fusion",
     "moe_permute_fusion", "cross_entropy_loss_fusion", "moe_router_fusion"), False
)  # fmt: skip


def _layers(config: Any, vp_stage: Any = None) -> Any:  # noqa: ARG001  # Bridge gives it
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm"
    )
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return block


def _start_engine(folder: Path, grouped: bool) -> Any:
    engines: Any = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    for name, module in list(sys.modules.items()):
        if name.startswith("verl."):
            answers = {
                "get_device_id": lambda: "cpu",
                "get_device_name": lambda: "cuda",
                "get_torch_device": lambda: torch.cuda,
            }
            vars(module).update({k: v for k, v in answers.items() if hasattr(module, k)})
    configs: Any = importlib.import_module("verl.workers.config")
    model = configs.HFModelConfig(path=str(folder), load_tokenizer=False)
    model.tokenizer = SimpleNamespace(pad_token_id=0)
    chosen = {"transformer_layer_spec": _layers, "moe_grouped_gemm": grouped}
    chosen |= MODEL | {"attention_backend": "auto"}
    engine = engines.MegatronEngineWithLMHead(
        model,
        configs.McoreEngineConfig(
            override_transformer_config=chosen, sequence_parallel=False, use_dynamic_bsz=False,
            param_offload=True, optimizer_offload=True, grad_offload=True, use_fused_kernels=False,
        ),
        configs.McoreOptimizerConfig(
            lr=1e-2, clip_grad=0.0, lr_warmup_steps=0, total_training_steps=10
        ),
        importlib.import_module("verl.trainer.config").CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()
    return engine


def _batch(seed: int) -> Any:
    tensors: Any = importlib.import_module("verl.utils.tensordict_utils")
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 20, (4,), generator=drawn).tolist()

    def nest(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return tensors.get_tensordict(
        {
            "input_ids": nest([torch.randint(1, 60, (n,), generator=drawn) for n in lengths]),
            "position_ids": nest([torch.arange(n) for n in lengths]),
            "loss_mask": nest([torch.ones(n, dtype=torch.long) for n in lengths]),
            "temperature": torch.ones(4),
        },
        non_tensor_dict={"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2},
    )


def _loss(model_output: Any, **_: Any) -> Any:
    return -model_output["log_probs"].values().mean(), {}


def _run(folder: Path, knobs: dict[str, Any] | None) -> dict[str, Any]:
    """Return losses of training and evaluation, what was handed over, and what we export."""
    import moe_optim

    sys.path.insert(0, CHECKOUT)
    find_packages_on_a_cpu()
    stand_in_for(HIDDEN)
    for name in ("pretrain", "gpt_step"):
        importlib.import_module(f"megatron.bridge.training.{name}")
    torch.distributed.init_process_group("gloo")
    torch.cuda.mem_get_info = lambda *_: (64 << 30, 80 << 30)
    if knobs is not None:
        moe_optim.install(moe_optim.MoEOptimConfig(**knobs))
    engine = _start_engine(folder, grouped=knobs is not None)
    found: dict[str, Any] = {"losses": []}
    for step in range(STEPS):
        batch = _batch(10 * step + torch.distributed.get_rank())
        with engine.train_mode():
            trained = engine.train_batch(batch, _loss)
            engine.lr_scheduler_step()
        with engine.eval_mode():
            found["losses"] += [trained["loss"], engine.infer_batch(batch, _loss)["loss"]]
        weights, _ = engine.get_per_tensor_param()
        found["sent"] = {name: tensor.detach().clone() for name, tensor in weights}
        engine.to("cpu")
    engine.to("cuda")
    if knobs is not None:
        exported = moe_optim.export_weights(engine.module)
        found["exported"] = {name: tensor.clone() for name, tensor in exported}
    return found


def test_bf16_experts_train_and_are_handed_over_as_by_stock(hf_checkpoint: Path):  # noqa: F811
    """On one rank that offloads everything between steps."""
    knobs = {"format": "bf16", "expert_layout": "indexed"}
    (ours,), (stock,) = (run_ranks(1, _run, hf_checkpoint, x, timeout_s=600) for x in (knobs, None))
    assert ours["losses"] == stock["losses"]
    assert_same_tensors(ours["sent"], stock["sent"], what="sent")


def test_quantized_experts_are_handed_over_with_the_values_they_have(
    hf_checkpoint: Path,  # noqa: F811
):
    """In bf16, on one rank that offloads everything between steps."""
    knobs = {"format": "mxfp8_2d", "expert_layout": "indexed"}
    (ours,) = run_ranks(1, _run, hf_checkpoint, knobs, timeout_s=600)
    assert_same_tensors(ours["sent"], values_of(ours["exported"]), what="sent")
