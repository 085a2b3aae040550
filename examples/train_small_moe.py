"""Builds, trains, evaluates, saves and resumes a small MoE GPT with megatron-core and moe_optim.

    torchrun --nproc-per-node 2 examples/train_small_moe.py --save runs/small_moe

Uses one GPU per process, or the CPU if there is none. With ``--optimizer muon``, Muon steps the
matrices and Adam all else.
"""

import argparse
import logging
from pathlib import Path

import torch
import torch.distributed as dist

import moe_optim

logging.basicConfig(level=logging.WARNING)  # else Megatron configures verbose logging
ON_GPUS = torch.cuda.is_available()
if not ON_GPUS:
    moe_optim.use_cpu()  # before the first import of megatron, else it raises

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

EXPERTS, VOCABULARY, LENGTH, BATCH = 4, 64, 32, 8


def build(overlap=False, optimizer="adam"):
    """Return a new wrapped model and its optimizer. All ranks must call it.

    ``overlap`` overlaps gradient reduction with the backward pass and the parameter gather with the
    forward pass. ``optimizer`` is the one that ``moe_optim.install`` was called with.
    """
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=2,
        num_moe_experts=EXPERTS, moe_ffn_hidden_size=96, moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,  # the plug-in keeps all experts of a linear in one weight
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,  # SwiGLU
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        bf16=True, params_dtype=torch.bfloat16,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=True)
    gpt = GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope").cuda()
    buffers = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap, overlap_param_gather=overlap,
    )  # fmt: skip
    model = DistributedDataParallel(config, buffers, Float16Module(config, gpt))
    settings = OptimizerConfig(
        optimizer=optimizer, lr=3e-3, bf16=True,
        use_distributed_optimizer=True, overlap_param_gather=overlap,
    )  # fmt: skip
    return model, moe_optim.get_megatron_optimizer(settings, [model])


def loss_of(model, batch):
    """Run the model on synthetic text: every token is 3 times the one before, plus 1."""
    generator = torch.Generator().manual_seed(batch * dist.get_world_size() + dist.get_rank())
    text = [torch.randint(VOCABULARY, (BATCH, 1), generator=generator)]
    for _ in range(LENGTH):
        text.append((3 * text[-1] + 1) % VOCABULARY)
    text = torch.cat(text, dim=1).cuda()
    positions = torch.arange(LENGTH, device=text.device).expand(BATCH, LENGTH)
    return model(text[:, :-1], positions, None, labels=text[:, 1:]).mean()


def mean_over_ranks(loss):
    """Return the loss averaged over ranks, as a float."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def train(model, optimizer, steps):
    """Train on one batch per step, and return the losses."""
    losses = []
    for step in steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        finalize_model_grads([model])  # reduces gradients over the ranks
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


@torch.no_grad()
def evaluate(model):
    """Return the loss on a held-out batch."""
    model.eval()
    loss = mean_over_ranks(loss_of(model, 1_000_000))
    model.train()
    return loss


def checkpoint_state(model, optimizer, is_loading=False):
    """Return this rank's part of a checkpoint. All ranks must call it."""
    # Megatron's loop derives both from --dist-ckpt-optim-fully-reshardable. The optimizer requires
    # the first: it determines the layout of masters and moments in the files. Without the second,
    # their keys depend on the number of optimizers, and so on the expert-parallel size.
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    state = {"model": model.module.module.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading, metadata=metadata)
    return state


def main(folder, name):
    """Train, save and continue; then rebuild, load, continue from there, and compare."""
    torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if ON_GPUS else "gloo")
    parallel_state.initialize_model_parallel()
    config = moe_optim.MoEOptimConfig(format="mxfp8")
    moe_optim.install(config, optimizer=name)  # before the model is built

    model, optimizer = build(optimizer=name)
    losses = train(model, optimizer, range(30))
    held_out = evaluate(model)
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()  # until the folder exists
    dist_checkpointing.save(checkpoint_state(model, optimizer), str(folder))
    continued = train(model, optimizer, range(30, 35))

    model, optimizer = build(optimizer=name)
    template = checkpoint_state(model, optimizer, is_loading=True)
    state = dist_checkpointing.load(template, str(folder))
    model.module.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    held_out_again = evaluate(model)
    resumed = train(model, optimizer, range(30, 35))

    if dist.get_rank() == 0:
        print(f"trained: loss {losses[0]:.4f} -> {losses[-1]:.4f}, held out {held_out:.4f}")
        print(f"continued: loss {continued[0]:.4f} -> {continued[-1]:.4f}")
        print(f"resumed: loss {resumed[0]:.4f} -> {resumed[-1]:.4f}, held out {held_out_again:.4f}")
    assert losses[-1] < losses[0] and held_out_again == held_out and resumed == continued
    dist.destroy_process_group()


# A save starts processes that import this file; without the guard each would train and hang.
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path, default=Path("runs/small_moe"))
    parser.add_argument("--optimizer", choices=["adam", "muon"], default="adam")
    given = parser.parse_args()
    main(given.save, given.optimizer)
