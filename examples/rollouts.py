"""Trains a small MoE GPT and hands its weights to an engine after each round, experts quantized.

    torchrun --nproc-per-node 2 examples/rollouts.py

It takes a GPU for each process, or, where there is none, the CPU. `Engine` stands for one of
inference: what it is given is what `load_weights` of vLLM's models takes.
"""

import torch
import torch.distributed as dist
from train_small_moe import ON_GPUS, build, parallel_state, train

import moe_optim


class Engine:
    """Keeps what it is given, by name."""

    def load_weights(self, weights):
        """Copy all weights: they are views of those that train."""
        self.weights = {name: tensor.clone() for name, tensor in weights}

    def describe(self):
        """Say how many tensors of experts there are."""
        experts = [one for name, one in self.weights.items() if ".experts." in name]
        return f"{len(experts)} tensors of experts, {sum(one.nbytes for one in experts):,} bytes"


@torch.no_grad()
def generate(model):
    """Return the most likely next tokens, by the model that trains, its hooks on."""
    prompt = torch.arange(16, device=torch.cuda.current_device()).view(2, 8)
    positions = torch.arange(8, device=prompt.device).expand(2, 8)
    return model(prompt, positions, None).argmax(-1)


def main():
    """Train, export, give the memory to the engine, take it back, generate, and train on."""
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
            buffer.offload_to_cpu()  # their weights and gradients: the engine works meanwhile
        for buffer in experts:
            buffer.reload_from_cpu()
        tokens = generate(model)
        if dist.get_rank() == 0:
            print(f"step {first + 10}: loss {losses[-1]:.4f}, engine: {engine.describe()}")
            print(f"  after 0 to 7 comes {tokens[0].tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
