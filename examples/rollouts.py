"""Trains a small MoE GPT and passes its quantized weights to an inference engine after each round.

    torchrun --nproc-per-node 2 examples/rollouts.py

Uses one GPU per process, or the CPU if there is none. `Engine` stands in for an inference engine;
its input is that of `load_weights` of vLLM's models.
"""

import torch
import torch.distributed as dist
from train_small_moe import ON_GPUS, build, parallel_state, train

import moe_optim


class Engine:
    """Keeps the received weights by name."""

    def load_weights(self, weights):
        """Copy all weights: they are views of those in training."""
        self.weights = {name: tensor.clone() for name, tensor in weights}

    def describe(self):
        """Return the number of expert tensors."""
        experts = [one for name, one in self.weights.items() if ".experts." in name]
        return f"{len(experts)} tensors of experts, {sum(one.nbytes for one in experts):,} bytes"


@torch.no_grad()
def generate(model):
    """Return the most likely next tokens, computed by the model in training."""
    prompt = torch.arange(16, device=torch.cuda.current_device()).view(2, 8)
    positions = torch.arange(8, device=prompt.device).expand(2, 8)
    return model(prompt, positions, None).argmax(-1)


def main():
    """Train, export, release memory for the engine, restore it, generate, and continue training."""
    torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if ON_GPUS else "gloo")
    parallel_state.initialize_model_parallel()
    moe_optim.install(moe_optim.MoEOptimConfig(format="mxfp8"))  # before the model is built
    model, optimizer = build(overlap=True)
    every_buffer = (*model.buffers, *model.expert_parallel_buffers)
    experts = [buffer for buffer in every_buffer if buffer.managed]
    engine = Engine()

    for first in (0, 10, 20):
        losses = train(model, optimizer, range(first, first + 10))
        engine.load_weights(moe_optim.export_weights([model], layout="sequential"))
        for buffer in experts:
            buffer.offload_to_cpu()  # frees weights and gradients for the engine
        for buffer in experts:
            buffer.reload_from_cpu()
        tokens = generate(model)
        if dist.get_rank() == 0:
            print(f"step {first + 10}: loss {losses[-1]:.4f}, engine: {engine.describe()}")
            print(f"  after 0 to 7 comes {tokens[0].tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
