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
from tools.stacks.stand_ins import STAND_INS
from tools.upstream.stand_in_imports import find_bridge, stand_in_for

CHECKOUT = os.environ.get("VERL_PATH", "")
pytestmark = pytest.mark.skipif(not (CHECKOUT and find_bridge()), reason="VERL_PATH is not set")
STEPS = 2
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


def _start_engine(folder: Path, grouped: bool, expert_ranks: int) -> Any:
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
    model.tokenizer = SimpleNamespace(pad_token_id=0, save_pretrained=lambda _: None)
    chosen = {"transformer_layer_spec": _layers, "moe_grouped_gemm": grouped}
    chosen |= MODEL | {"attention_backend": "auto"}
    engine = engines.MegatronEngineWithLMHead(
        model,
        configs.McoreEngineConfig(
            override_transformer_config=chosen, sequence_parallel=False, use_dynamic_bsz=False,
            param_offload=True, optimizer_offload=True, grad_offload=True, use_fused_kernels=False,
            expert_model_parallel_size=expert_ranks,
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


def _run(
    folder: Path, knobs: dict[str, Any] | None, expert_ranks: int = 1, saved: Path | None = None,
    resumes: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return losses of training and evaluation, what was handed over, and what we export.

    Args:
        folder: Hugging Face's files.
        knobs: knobs of the plug-in, or None for stock.
        expert_ranks: number of ranks that share the experts.
        saved: checkpoint to save after all steps but the last, or to load for the last.
        resumes: whether to load it.
    """
    import moe_optim

    sys.path.insert(0, CHECKOUT)
    find_packages_on_a_cpu()
    stand_in_for(STAND_INS["verl"])
    for name in ("pretrain", "gpt_step"):
        importlib.import_module(f"megatron.bridge.training.{name}")
    torch.distributed.init_process_group("gloo")
    torch.cuda.mem_get_info = lambda *_: (64 << 30, 80 << 30)
    if knobs is not None:
        moe_optim.install(moe_optim.MoEOptimConfig(**knobs))
    engine = _start_engine(folder, knobs is not None, expert_ranks)
    found: dict[str, Any] = {"losses": []}
    if resumes:
        engine.load_checkpoint(str(saved), del_local_after_load=False)
    for step in range(STEPS - 1 if resumes else 0, STEPS):
        batch = _batch(10 * step + torch.distributed.get_rank())
        with engine.train_mode():
            trained = engine.train_batch(batch, _loss)
            engine.lr_scheduler_step()
        with engine.eval_mode():
            found["losses"] += [trained["loss"], engine.infer_batch(batch, _loss)["loss"]]
        weights, _ = engine.get_per_tensor_param()
        found["sent"] = {name: tensor.detach().clone() for name, tensor in weights}
        engine.to("cpu")
        if saved is not None and not resumes and step == STEPS - 2:
            engine.save_checkpoint(str(saved), global_step=step)
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


@pytest.mark.parametrize("expert_ranks", [1, 2], ids=["data parallel", "expert parallel"])
def test_two_ranks_train_save_and_hand_over_as_by_stock(
    hf_checkpoint: Path,  # noqa: F811
    expert_ranks: int,
    tmp_path: Path,
):
    """bf16 experts; the engine saves and loads its own checkpoints, of which ours resumes."""
    knobs = {"format": "bf16", "expert_layout": "indexed"}
    stock, ours = (
        run_ranks(2, _run, hf_checkpoint, x, expert_ranks, tmp_path / str(x is None), timeout_s=600)
        for x in (None, knobs)
    )
    resumed = run_ranks(
        2, _run, hf_checkpoint, knobs, expert_ranks, tmp_path / "False", True, timeout_s=600
    )
    for rank, theirs, again in zip(ours, stock, resumed, strict=True):
        assert rank["losses"] == theirs["losses"]
        assert again["losses"] == rank["losses"][-2:]
        for one in (theirs, again):
            assert_same_tensors(one["sent"], rank["sent"], what="sent")


def test_quantized_experts_of_two_ranks_resume_to_the_bit(
    hf_checkpoint: Path,  # noqa: F811
    tmp_path: Path,
):
    """Half of them on each, from a checkpoint whose weights verl writes in bf16."""
    knobs = {"format": "mxfp8_2d", "expert_layout": "indexed"}
    kept, resumed = (
        run_ranks(2, _run, hf_checkpoint, knobs, 2, tmp_path, resumes, timeout_s=600)
        for resumes in (False, True)
    )
    for rank, again in zip(kept, resumed, strict=True):
        assert again["losses"] == rank["losses"][-2:]
        assert_same_tensors(again["exported"], rank["exported"], what="exported")
        assert_same_tensors(rank["sent"], values_of(rank["exported"]), what="sent")
