"""NeMo-RL's Megatron policy worker: it imports Hugging Face's weights, trains, makes room for
an engine, streams its weights, computes probabilities of its reference, saves and resumes, whole.

``NEMO_RL_PATH`` names its checkout, and ``MEGATRON_BRIDGE_PATH`` what it imports, as in
``tests/integration/test_bridge_package.py``: Bridge's main, nvidia-resiliency-ext 0.6 and antlr4
4.9.3, with Megatron's main on ``PYTHONPATH``. Ray, the engine and its socket are stood in for.
"""

import importlib
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integration.test_bridge_package import find_packages_on_a_cpu
from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks
from tests.support.training_runs.actors import values_of
from tools.stacks.stand_ins import STAND_INS
from tools.upstream.stand_in_imports import StandIn, find_bridge, stand_in_for

CHECKOUT = os.environ.get("NEMO_RL_PATH", "")
pytestmark = [
    pytest.mark.skipif(not (CHECKOUT and find_bridge()), reason="NEMO_RL_PATH is not set"),
    pytest.mark.skipif(
        pytest.importorskip("megatron.core").__version__ < "0.20", reason="needs megatron-core 0.20"
    ),
]
WORKERS = "nemo_rl.models.policy.workers"
ROOT = Path(__file__).parents[2]
STEPS, BATCH, LENGTH, VOCABULARY = 3, 4, 32, 256
FUSIONS = ("moe_permute_fusion", "apply_rope_fusion", "bias_activation_fusion",
           "gradient_accumulation_fusion")  # fmt: skip
OTHER_FUSIONS = ("masked_softmax_fusion", "bias_dropout_fusion", "persist_layer_norm",
                 "cross_entropy_loss_fusion", "moe_router_fusion")  # fmt: skip


class _Decorator(StandIn):
    def __new__(cls, *_: Any, **__: Any) -> Any:
        return lambda decorated: decorated


@pytest.fixture(scope="module")
def hf_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with Hugging Face's files of a model and of a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4,
        num_experts_per_tok=2, vocab_size=VOCABULARY, rope_theta=10000.0, rms_norm_eps=1e-6,
        tie_word_embeddings=False, initializer_range=0.2, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("qwen3_moe")
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="t1", eos_token="t2"
    ).save_pretrained(folder)
    return folder


def _choose_layers(grouped: bool) -> None:
    """Have Bridge describe models that a CPU trains, one linear an expert if not ``grouped``."""
    bridge: Any = importlib.import_module("megatron.bridge").AutoBridge
    describe = bridge.to_megatron_provider

    def describe_plainly(self: Any, *args: Any, **kwargs: Any) -> Any:
        provider = describe(self, *args, **kwargs)
        for name in (*FUSIONS, *OTHER_FUSIONS):
            setattr(provider, name, False)
        provider.moe_grouped_gemm = grouped
        return provider

    bridge.to_megatron_provider = describe_plainly


def _import(folder: Path) -> Any:
    """Return the module of the worker, on ranks that gloo joins."""
    find_packages_on_a_cpu()
    sys.path.insert(0, CHECKOUT)
    stand_in_for(STAND_INS["nemo_rl"], {"remote": _Decorator})
    for name in ("pretrain", "gpt_step"):
        importlib.import_module(f"megatron.bridge.training.{name}")
    join = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda *_, **kwargs: join("gloo", **kwargs)
    torch.cuda.current_device = lambda: 0
    torch.cuda.mem_get_info = lambda *_: (64 << 30, 80 << 30)
    os.environ |= {
        "NRL_MEGATRON_CHECKPOINT_DIR": str(folder / "imported"),
        "NRL_DISABLE_NUMA_BINDING": "1",
    }
    importlib.import_module("transformers").__version__ = "5.11.0"  # its policy asserts below 5.12
    importlib.import_module("ray").get_gpu_ids = lambda: [0]
    return importlib.import_module(f"{WORKERS}.megatron_policy_worker")


def _policy(hugging_face: Path) -> dict[str, Any]:
    """Return the policy of its configuration for GRPO, for a model that a CPU trains."""
    omegaconf = importlib.import_module("omegaconf")
    configs = importlib.import_module("nemo_rl.utils.config")
    configs.register_omegaconf_resolvers()
    policy = configs.load_config(f"{CHECKOUT}/examples/configs/grpo_math_1B_megatron.yaml").policy
    policy.model_name = str(hugging_face)
    policy.train_global_batch_size, policy.train_micro_batch_size = BATCH, 1
    policy.max_total_sequence_length, policy.max_grad_norm = LENGTH, 0.0
    policy.sequence_packing.enabled = False
    chosen = policy.megatron_cfg
    chosen.train_iters, chosen.checkpoint.async_save = 10, False
    chosen.use_gloo_process_groups, chosen.attention_backend = True, "auto"
    chosen.update(dict.fromkeys(FUSIONS, False))
    chosen.optimizer.use_precision_aware_optimizer = False
    chosen.optimizer.lr = chosen.optimizer.min_lr = 1e-2
    chosen.scheduler.lr_warmup_iters, chosen.scheduler.lr_warmup_init = 0, 0.0
    chosen.distributed_data_parallel_config.grad_reduce_in_fp32 = True
    found: dict[str, Any] = omegaconf.OmegaConf.to_container(policy, resolve=True)
    return found


def _start(module: Any, hugging_face: Path, knobs: dict[str, Any] | None, saved: str | None) -> Any:
    import numpy
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from transformers import AutoTokenizer

    import moe_optim

    policy_worker = module.MegatronPolicyWorkerImpl
    if knobs is not None:
        sys.path.insert(0, str(ROOT / "examples"))
        example: Any = importlib.import_module("nemo_rl_worker")
        config = partial(moe_optim.MoEOptimConfig, **knobs)
        example.moe_optim = SimpleNamespace(install=moe_optim.install, MoEOptimConfig=config)
        policy_worker = example.MoEOptimPolicyWorker
    _choose_layers(grouped=knobs is not None)

    class Worker(policy_worker):  # type: ignore[misc,valid-type]
        _transformer_layer_spec = partial(
            get_gpt_decoder_block_spec, use_transformer_engine=False, normalization="RMSNorm"
        )

    ranks = int(os.environ["WORLD_SIZE"])
    sharding = importlib.import_module("nemo_rl.distributed.named_sharding").NamedSharding(
        layout=numpy.arange(ranks).reshape(1, ranks, 1, 1),
        names=["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"],
    )
    return Worker(
        _policy(hugging_face), AutoTokenizer.from_pretrained(hugging_face), saved, saved,
        worker_sharding_annotations=sharding,
    )  # fmt: skip


def _batch(seed: int) -> Any:
    batches = importlib.import_module("nemo_rl.distributed.batched_data_dict")
    drawn = torch.Generator().manual_seed(10 * seed + torch.distributed.get_rank())
    rows = BATCH // torch.distributed.get_world_size()
    return batches.BatchedDataDict(
        {
            "input_ids": torch.randint(3, VOCABULARY, (rows, LENGTH), generator=drawn),
            "input_lengths": torch.full((rows,), LENGTH),
            "token_mask": torch.ones(rows, LENGTH),
            "sample_mask": torch.ones(rows),
        }
    )


class _Socket:
    """Unpacks what the worker streams, where its engine would map the memory."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.info, self.received = info, {}

    def send_pyobj(self, payload: Any) -> None:
        if not isinstance(payload, tuple):
            return
        buffer, names, _ = payload
        aligned = importlib.import_module("nemo_rl.models.policy.utils").calculate_aligned_size
        start = 0
        for name in names:
            shape, dtype = self.info[name]
            size = shape.numel() * dtype.itemsize
            self.received[name] = buffer[start : start + size].view(dtype).view(shape).clone()
            start += aligned(size)

    def recv(self) -> bytes:
        return b""


def _refit(worker: Any) -> dict[str, torch.Tensor]:
    """Return what the engine has after the calls that a refit makes."""
    utilities = importlib.import_module("nemo_rl.models.policy.utils")
    utilities.get_handle_from_tensor = lambda buffer: buffer.clone()
    worker.offload_before_refit()
    worker.zmq_socket = _Socket(worker.prepare_refit_info())
    worker.stream_weights_via_ipc_zmq(buffer_size_bytes=1 << 18)
    worker.offload_after_refit()
    found: dict[str, torch.Tensor] = worker.zmq_socket.received
    return found


def _run(
    folder: Path, hugging_face: Path, knobs: dict[str, Any] | None, resumes: bool = False
) -> dict[str, Any]:
    """Return losses, log probabilities of policy and reference, and what the engine was sent.

    A run saves before its last step, which is all that one that resumes makes.
    """
    module = _import(folder)
    saved = str(folder / "saved")
    worker = _start(module, hugging_face, knobs, saved if resumes else None)
    loss = importlib.import_module("nemo_rl.algorithms.loss.loss_functions").NLLLossFn()
    found: dict[str, Any] = {"losses": [], "logprobs": []}
    for step in range(STEPS - 1 if resumes else 0, STEPS):
        worker.prepare_for_lp_inference()
        found["logprobs"] += [
            worker.get_logprobs(data=_batch(step))["logprobs"],
            worker.get_reference_policy_logprobs(data=_batch(step))["reference_logprobs"],
        ]
        worker.prepare_for_training()
        found["losses"].append(float(worker.train(_batch(step), loss)["global_loss"].sum()))
        if not resumes and step == STEPS - 2:
            worker.save_checkpoint(saved, saved)
        found["sent"] = _refit(worker)
    if knobs is not None:
        import moe_optim

        worker.prepare_for_training()
        exported = moe_optim.export_weights([worker.model])
        found["exported"] = {name: tensor.clone() for name, tensor in exported}
    return found


def test_bf16_experts_train_and_are_streamed_as_by_stock(hf_checkpoint: Path, tmp_path: Path):
    knobs = {"format": "bf16", "expert_layout": "indexed"}
    (ours,), (stock,) = (
        run_ranks(1, _run, tmp_path / str(x is None), hf_checkpoint, x, timeout_s=900)
        for x in (knobs, None)
    )
    assert ours["losses"] == stock["losses"]
    assert all(map(torch.equal, ours["logprobs"], stock["logprobs"]))
    assert_same_tensors(ours["sent"], stock["sent"], what="sent")


def test_quantized_experts_are_streamed_with_their_values_and_resume_to_the_bit(
    hf_checkpoint: Path, tmp_path: Path
):
    """The reference takes their place in between, and they come back with all of their bytes."""
    knobs = {"format": "mxfp8", "expert_layout": "indexed"}
    (kept,), (resumed,) = (
        run_ranks(1, _run, tmp_path, hf_checkpoint, knobs, resumes, timeout_s=900)
        for resumes in (False, True)
    )
    assert_same_tensors(kept["sent"], values_of(kept["exported"]), what="sent")
    assert resumed["losses"] == kept["losses"][-1:]
    assert all(map(torch.equal, resumed["logprobs"], kept["logprobs"][-2:]))
    assert_same_tensors(resumed["exported"], kept["exported"], what="exported")
