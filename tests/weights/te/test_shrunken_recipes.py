"""Recipes of real models train with Transformer Engine's experts, their sizes shrunk, on a CPU.

Attention, dispatch and norms are Megatron's local ones there, and so is what else wants a GPU; a
layer that predicts a further token has bf16 experts in NVFP4. Needs ``TRANSFORMER_ENGINE_PATH`` as
``test_modules.py`` does.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.weights.te.test_modules import CLASSES, HAS_GPU, PATH

pytestmark = [
    pytest.mark.skipif(HAS_GPU or not PATH, reason="needs a CPU and TRANSFORMER_ENGINE_PATH"),
    pytest.mark.extended,
]
ROOT = Path(__file__).parents[3]
RECIPES = {  # recipe -> its format
    f"{model}{suffix}": format
    for model in ("qwen3_30b_a3b", "qwen3_235b_a22b", "deepseek_v3", "gpt_oss_120b")
    for suffix, format in (("", "mxfp8"), ("_nvfp4", "nvfp4"), ("_fp8_block", "fp8_block"))
    if (model, format) != ("gpt_oss_120b", "fp8_block")
}
LEFT_OUT = shlex.split("""
--moe-router-fusion --moe-permute-fusion --moe-flex-dispatcher-backend --moe-hybridep-num-sms
--moe-shared-expert-overlap --overlap-moe-expert-parallel-comm --delay-wgrad-compute
--use-flash-attn --cross-entropy-loss-fusion --cross-entropy-fusion-impl --cuda-graph-impl
--cuda-graph-modules --te-rng-tracker --recompute-granularity --recompute-modules
--multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim
--v-head-dim --mscale --mscale-all-dim --window-size --window-attn-skip-freq
--pipeline-model-parallel-size --pipeline-model-parallel-layout
--num-layers-per-virtual-pipeline-stage --account-for-embedding-in-pipeline-split
--account-for-loss-in-pipeline-split --tensor-model-parallel-size --sequence-parallel
--use-precision-aware-optimizer --main-grads-dtype --main-params-dtype --exp-avg-dtype
--exp-avg-sq-dtype
""")
"""Flags of what wants a GPU, and of sizes that two ranks have not."""
PUT_IN = {
    **dict.fromkeys(
        [
            "--no-gradient-accumulation-fusion",
            "--no-masked-softmax-fusion",
            "--no-bias-swiglu-fusion",
            "--no-bias-gelu-fusion",
            "--no-persist-layer-norm",
            "--no-rope-fusion",
            "--group-query-attention",
        ],
        "true",
    ),
    **dict.fromkeys(["--hidden-size", "--ffn-hidden-size", "--moe-ffn-hidden-size"], 128),
    **dict.fromkeys(["--num-layers", "--train-iters", "--eval-interval", "--num-query-groups"], 2),
    **dict.fromkeys(["--expert-model-parallel-size", "--micro-batch-size"], 1),
    **dict.fromkeys(["--num-workers", "--clip-grad"], 0),
    **dict.fromkeys(["--kv-channels", "--seq-length", "--make-vocab-size-divisible-by"], 32),
    **dict.fromkeys(["--num-attention-heads", "--global-batch-size"], 4),
    "--transformer-impl": "local",
    "--moe-token-dispatcher-type": "alltoall",
    "--num-experts": 8,
    "--vocab-size": 63,
}
OF_DEEPSEEK = {
    "--moe-layer-freq": "([0]*1+[1]*1)",
    "--moe-shared-expert-intermediate-size": 128,
    "--moe-router-num-groups": 4,
    "--moe-router-group-topk": 2,
    "--moe-router-topk": 2,
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_with_its_sizes_shrunk(name, tmp_path):
    """Two data-parallel ranks see finite losses; quantized experts are in the recipe's format."""
    values = dict.fromkeys(LEFT_OUT, "null") | PUT_IN
    values |= OF_DEEPSEEK if name.startswith("deepseek") else {}
    puts = [f"megatron_args.{flag}={value}" for flag, value in values.items()]
    knobs = json.dumps({"recipe": [str(ROOT / "recipes" / f"{name}.yaml"), *puts]})
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), PATH, os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1",
        "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM": "0",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "-m", "tests.support.te.native_train", str(tmp_path), RECIPES[name], knobs]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    for rank in range(2):
        saw = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        assert set(saw["losses"]) == {1, 2}
        assert all(map(torch.isfinite, map(torch.tensor, saw["losses"].values())))
        assert {weight["class"] for weight in saw["weights"].values()} == {CLASSES[RECIPES[name]]}
        assert not any(weight["has_moved"] for weight in saw["weights"].values())
