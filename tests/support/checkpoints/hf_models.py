"""Tiny models of the families that Hugging Face knows, through Megatron on the CPU.

They are built from Megatron's command line, saved and loaded by Megatron's own functions, and asked
for logits. One process builds several, one after the other.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tools.stacks.attention import replace_core_attention

COMMON = shlex.split("""
--transformer-impl local --swiglu --disable-bias-linear --normalization RMSNorm
--position-embedding-type rope --qk-layernorm
--hidden-size 64 --num-attention-heads 4 --moe-ffn-hidden-size 32 --ffn-hidden-size 96
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-3
--attention-dropout 0 --hidden-dropout 0 --no-masked-softmax-fusion --no-bias-swiglu-fusion
--no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion
--seq-length 32 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 1
--lr 1e-3 --train-iters 1 --tokenizer-type NullTokenizer --vocab-size 95
--make-vocab-size-divisible-by 32 --distributed-backend gloo --ckpt-format torch_dist
--init-method-std 0.08 --use-cpu-initialization --no-save-optim --no-save-rng --no-load-optim
--no-load-rng --save-interval 1000
""")
QWEN3_MOE = shlex.split("""
--num-layers 2 --group-query-attention --num-query-groups 2 --kv-channels 24 --num-experts 4
--moe-router-topk 2 --rotary-base 100000 --norm-epsilon 1e-6
--moe-router-load-balancing-type aux_loss --untie-embeddings-and-output-weights
""")
OTHER_QWEN3_MOE = shlex.split("""
--num-layers 3 --kv-channels 16 --num-experts 4 --moe-router-topk 2 --moe-router-pre-softmax
--moe-layer-freq [1,0,1] --rotary-base 10000 --norm-epsilon 1e-5
""")
DEEPSEEK_V3 = shlex.split("""
--num-layers 3 --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16
--qk-pos-emb-head-dim 8 --v-head-dim 12 --rope-type yarn --rotary-base 10000
--rotary-scaling-factor 4 --mscale 1.0 --mscale-all-dim 1.0
--norm-epsilon 1e-6 --num-experts 8 --moe-router-topk 4 --moe-layer-freq ([0]+[1]*2)
--moe-shared-expert-intermediate-size 64 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 4
--moe-router-group-topk 2 --moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss
--untie-embeddings-and-output-weights
""")
OTHER_DEEPSEEK_V3 = shlex.split("""
--num-layers 2 --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16
--qk-pos-emb-head-dim 8 --v-head-dim 16 --rope-type rope --rotary-base 10000
--norm-epsilon 1e-6 --num-experts 4 --moe-router-topk 2
--moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss
--untie-embeddings-and-output-weights
""")
DEEPSEEK_V3_WITHOUT_QUERY_LORA = shlex.split("""
--num-layers 2 --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16
--qk-pos-emb-head-dim 8 --v-head-dim 16 --rope-type rope --rotary-base 50000
--norm-epsilon 1e-6 --num-experts 4 --moe-router-topk 2 --moe-layer-freq ([0]+[1])
--moe-shared-expert-intermediate-size 64 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.446
--moe-router-load-balancing-type seq_aux_loss --untie-embeddings-and-output-weights
""")
MODELS = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe, dense layer, tied, no groups of queries, softmax first": OTHER_QWEN3_MOE,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3, plain positions, one group, no dense layer": OTHER_DEEPSEEK_V3,
}
"""Megatron's flags by what they build; the family stands before the comma."""
PREDICTING = "deepseek_v3, one further token predicted"
"""A model that transformers does not build, but for the layers that the others have, too."""
AT_ONCE = "deepseek_v3, queries projected at once"
"""A model as megatron-core 0.18 and older build it; later ones give queries a norm of their own."""
_FLAGS = MODELS | {
    PREDICTING: [*OTHER_DEEPSEEK_V3, "--mtp-num-layers", "1"],
    AT_ONCE: DEEPSEEK_V3_WITHOUT_QUERY_LORA,
}

TOKENS = 24


@dataclass(frozen=True)
class Job:
    """A model to build in a process, and what to do with it."""

    model: str
    """Of :data:`MODELS`, or :data:`PREDICTING`, or :data:`AT_ONCE`."""
    save: str = ""
    """Folder of checkpoints that it is written to."""
    load: str = ""
    """The same that it is read from, instead of drawn at random."""
    tokens: Sequence[int] = field(default_factory=lambda: tokens())


def tokens() -> list[int]:
    """Return some tokens of the vocabulary."""
    return torch.randint(0, 95, (TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()


def run_jobs(jobs: Sequence[Job]) -> list[torch.Tensor]:
    """Return the logits [tokens, vocabulary] of each model. A rank function, of one rank."""
    install_runtime()
    torch.set_num_threads(1)
    return [_run(job) for job in jobs]


def install_runtime() -> None:
    """Let Megatron's entry run in this process, without a GPU."""
    from moe_optim.integration import cpu_runtime, patches
    from moe_optim.integration.engine import apply_patches

    cpu_runtime.install()
    apply_patches(patches.TRAIN)


def start_megatron(flags: Sequence[str]) -> Any:
    """Start Megatron with a command line in this process; return its arguments."""
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron

    sys.argv = ["tests", *flags]
    args = parse_and_validate_args()
    destroy_rerun_state_machine()
    initialize_megatron()
    return args


def build_model(args: Any) -> torch.nn.Module:
    """Return the model that Megatron's arguments ask for."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    groups = ProcessGroupCollection.use_mpu_process_groups()
    model: torch.nn.Module = GPTModelBuilder(gpt_config_from_args(args)).build_model(groups)
    return model


def _run(job: Job) -> torch.Tensor:
    from megatron.training import checkpointing, global_vars

    where = ["--save", job.save] if job.save else []
    where += ["--load", job.load, "--finetune"] if job.load else []
    args = start_megatron([*COMMON, *_FLAGS[job.model], *where])
    replace_core_attention()
    if job.model == AT_ONCE:
        _take_norms_from_the_spec()
    model = build_model(args).to(args.params_dtype).eval()
    _randomize(model)
    if job.load:
        iteration, _ = checkpointing.load_checkpoint([model], None, None)
        print("loaded iteration", iteration)
    if job.save:
        checkpointing.save_checkpoint(5, [model], None, None, 0)
    logits = _logits(model, job.tokens)
    global_vars.unset_global_variables()
    return logits


@torch.no_grad()
def _randomize(model: torch.nn.Module) -> None:
    """Draw what begins as ones or zeros, so that swapped norms and a lost bias show."""
    generator = torch.Generator().manual_seed(11)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name:
            value.copy_(1 + 0.3 * torch.randn(value.shape, generator=generator))
        elif name.endswith(("expert_bias", "e_score_correction_bias")):
            value.copy_(0.3 * torch.randn(value.shape, generator=generator))


@torch.no_grad()
def _logits(model: torch.nn.Module, given: Sequence[int]) -> torch.Tensor:
    row = torch.tensor([list(given)])
    places = torch.arange(row.shape[1])[None]
    mask = torch.ones(1, 1, row.shape[1], row.shape[1], dtype=torch.bool).triu(1)
    logits: torch.Tensor = model(row, places, mask)
    return logits[0].float()


def _take_norms_from_the_spec() -> None:
    """Let latent attention have the linears and norms that its spec names, as before 0.19."""
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm")
    QKNormConfigResolver.resolve = lambda self: {
        name: getattr(self.submodules, name) for name in (*names, "kv_layernorm")
    }


def draw_in_transformers(name: str) -> Any:
    """Return a random model of transformers, in fp32, like that of :data:`MODELS`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
        "moe_intermediate_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, "initializer_range": 0.08,
    }  # fmt: skip
    own = {
        "qwen3_moe": {
            "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 24, "num_experts": 4,
            "num_experts_per_tok": 2, "norm_topk_prob": True, "rope_theta": 100000.0,
        },
        list(MODELS)[1]: {
            "num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 16, "num_experts": 4,
            "num_experts_per_tok": 2, "norm_topk_prob": False, "mlp_only_layers": [1],
            "tie_word_embeddings": True, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
        },
        list(MODELS)[3]: {
            "num_hidden_layers": 2, "num_key_value_heads": 4, "q_lora_rank": 24,
            "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
            "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "rope_theta": 10000.0,
        },
        "deepseek_v3": {
            "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 32,
            "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
            "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 4, "n_group": 4,
            "topk_group": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
    }[name]  # fmt: skip
    torch.manual_seed(5)
    config = AutoConfig.for_model(name.partition(",")[0], **(common | own))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model)
    return model
