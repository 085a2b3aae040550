"""Megatron-Bridge's ``pretrain()`` on CPU ranks or GPUs: train, evaluate, save, resume, convert."""

import importlib
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.stacks.attention import replace_core_attention
from tools.stacks.bridge_recipes import (
    GLOBAL_BATCH,
    RECIPES,
    SEQUENCE,
    keep_weights_in_blockwise_fp8,
    read_recipe,
)
from tools.stacks.ranks import STOPPED, run_ranks, where_it_stopped

STOCK = "stock"
STOCK_FP8 = "stock fp8_block"
CPU_FORMATS = (STOCK, "bf16", "mxfp8_2d")
GPU_FORMATS = (STOCK, "bf16", STOCK_FP8, "fp8_block")
ITERATIONS = 4
EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Case:
    """A recipe, the format of its expert weights, and the number of ranks.

    :data:`STOCK` and :data:`STOCK_FP8` are Megatron's own optimizer, with weights in bf16 and in
    blockwise FP8. On GPUs layers and experts are Transformer Engine's.
    """

    recipe: str
    format: str
    ranks: int
    on_gpu: bool = False

    @property
    def is_stock(self) -> bool:
        """Whether the plug-in takes no part."""
        return self.format in (STOCK, STOCK_FP8)


def import_stack(on_gpu: bool = False) -> None:
    """Import what a rank needs; on a CPU before ranks are forked from this process."""
    import moe_optim

    if on_gpu:  # algorithms that give the same bits again
        os.environ |= {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    else:
        moe_optim.use_cpu()
    for recipe in RECIPES.values():
        importlib.import_module(recipe.module)
    for name in ("pretrain", "gpt_step", "callbacks"):
        importlib.import_module(f"megatron.bridge.training.{name}")
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Train; resume from the middle; read the exported model in transformers.

    Returns:
        JSON: ``losses`` and ``evaluations``; of the exported model, read by transformers, the names
        ``missing`` and ``left_over``, and by which part of their norm ``logits_differ``; whether
        the run ``resumes_to_the_bit``; and where it ``stopped``, if it did.
    """
    start = partial(run_ranks, start_method="spawn" if case.on_gpu else "fork")
    whole = start(case.ranks, folder / "whole", _train, case, folder, None)
    if STOPPED in whole:
        return whole
    resumed = start(case.ranks, folder / "resumed", _train, case, folder, ITERATIONS // 2)
    if STOPPED in resumed:
        return whole | {STOPPED: f"resume: {resumed[STOPPED]}"}
    export = whole.pop("export")
    if STOPPED in export:
        export = {STOPPED: f"export: {export[STOPPED]}"}
    seen = ("losses", "logits")
    rest = {"losses": whole["losses"][ITERATIONS // 2 :], "logits": whole.pop("logits")}
    is_equal = {name: resumed[name] for name in seen} == rest
    return whole | export | {"resumes_to_the_bit": is_equal}


def _train(case: Case, folder: Path, first: int | None) -> dict[str, Any]:
    """Run ``pretrain()``, from a checkpoint if ``first`` names its iteration. A rank function."""
    if case.on_gpu:
        import_stack(on_gpu=True)
    recipe = RECIPES[case.recipe]
    config = read_recipe(recipe, case.ranks, folder / "checkpoints", ITERATIONS, case.on_gpu)
    if config.model.multi_latent_attention and not case.on_gpu:
        replace_core_attention()
    if first is not None:
        config.checkpoint.load, config.checkpoint.ckpt_step = config.checkpoint.save, first
        config.checkpoint.save = None
    if case.format in (STOCK_FP8, "fp8_block"):
        keep_weights_in_blockwise_fp8(config)
    # stock's local experts are one linear each
    config.model.moe_grouped_gemm = case.on_gpu or not case.is_stock
    if not case.is_stock:
        example = importlib.import_module("megatron_bridge")
        knobs = {} if case.on_gpu else {"format": case.format, "expert_layout": "indexed"}
        example.train_with_moe_optim(config, **knobs)
    training: Any = importlib.import_module("megatron.bridge.training.pretrain")
    step: Any = importlib.import_module("megatron.bridge.training.gpt_step")
    watch = _watch(
        recipe.hf_config(case.on_gpu), None if first is not None else folder / "hugging_face"
    )
    training.pretrain(config, step.forward_step, callbacks=[watch])
    found: dict[str, Any] = watch.found
    return found


def _watch(hf_config: Any, folder: Path | None) -> Any:
    """Return a callback that keeps what a run computes, and exports the model to ``folder``."""
    callbacks: Any = importlib.import_module("megatron.bridge.training.callbacks")

    class Watch(callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.found: dict[str, Any] = {"losses": [], "evaluations": []}

        def on_train_step_end(self, context: Any) -> None:
            self.found["losses"].append(context.loss_dict["lm loss"].item())

        def on_eval_end(self, context: Any) -> None:
            self.found["evaluations"].append(context.total_loss_dict["lm loss"].item())

        def on_test_end(self, context: Any) -> None:
            """Compute and export at the end, when the weights are those of the last step."""
            logits = _logits(context.model)
            self.found["logits"] = logits.double().sum().item()
            if folder is None:
                return
            try:
                self.found["export"] = _export(hf_config, context.model, folder, logits)
            except Exception as error:  # the rest of the run stays of interest
                self.found["export"] = {STOPPED: where_it_stopped(error)}

    return Watch()


def _tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 255, (GLOBAL_BATCH, SEQUENCE), generator=generator)


@torch.no_grad()
def _logits(model: list[Any]) -> torch.Tensor:
    device = next(model[0].parameters()).device
    tokens = _tokens().to(device)
    positions = torch.arange(SEQUENCE, device=device)[None].expand_as(tokens)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)
    return model[0](tokens, positions, mask)[..., :256].float().cpu()


@torch.no_grad()
def _export(
    hf_config: Any, model: list[Any], folder: Path, expected: torch.Tensor
) -> dict[str, Any]:
    """Convert with Bridge's own exporter; return how transformers takes the result."""
    from megatron.bridge import AutoBridge
    from transformers import AutoModelForCausalLM

    AutoBridge.from_hf_config(hf_config).save_hf_pretrained(model, folder, show_progress=False)
    read, report = AutoModelForCausalLM.from_pretrained(
        folder, config=hf_config, output_loading_info=True, dtype=torch.float32
    )
    logits = read(_tokens()).logits
    predicting = f"model.layers.{hf_config.num_hidden_layers}."  # transformers has no such layer
    return {
        "missing": sorted(report["missing_keys"]),
        "left_over": sorted(
            name for name in report["unexpected_keys"] if not name.startswith(predicting)
        ),
        "logits_differ": ((logits - expected).norm() / expected.norm()).item(),
    }
