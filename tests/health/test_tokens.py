"""What counts as a token of an expert."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from moe_optim.health.tokens import TokenCounts
from tests.support.ranks import on_ranks

GIVEN = torch.tensor([3, 0, 5])


class Experts(torch.nn.Module):
    """Has the signature of Megatron's, and experts 6, 7 and 8 of its layer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.tp_group = SimpleNamespace(rank=lambda: rank)

    def forward(self, tokens, tokens_per_expert, probs):
        return tokens * 2


class Chunk(torch.nn.Module):
    """A stage whose only layer is the model's fourth."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        layer = torch.nn.Module()
        layer.layer_number = 4
        layer.mlp = torch.nn.Module()
        layer.mlp.local_expert_indices = [6, 7, 8]
        layer.mlp.experts = Experts(rank)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([layer])

    def forward(self, tokens):
        return self.decoder.layers[0].mlp.experts(tokens, GIVEN, None)


def count(passes, rank=0):
    """Return what was counted of each layer while ``passes`` ran a chunk."""
    chunk = Chunk(rank)
    counts = TokenCounts([chunk])
    passes(chunk, torch.ones(8, 2, requires_grad=True))
    first, second = (counts.loads_of(counts.reduce()) for _ in range(2))
    assert second == ()  # it begins again
    return [(load.layer, load.experts, load.tokens.tolist()) for load in first]


def train_twice(chunk, tokens):
    for _ in range(2):
        chunk(tokens).sum().backward()


def recompute(chunk, tokens):
    for _ in range(2):
        checkpoint(chunk, tokens, use_reentrant=True).sum().backward()


def evaluate(chunk, tokens):
    with torch.no_grad():
        chunk(tokens)
    with torch.inference_mode():
        chunk(tokens.detach())


def train_for_another_optimizer(chunk, tokens):
    """Counts of an optimizer that is built in the middle, and of one before it."""
    train_twice(chunk, tokens)
    experts = chunk.decoder.layers[0].mlp.experts
    for _ in range(2):
        TokenCounts([chunk])
        assert len(experts._forward_pre_hooks) == 1
    train_twice(chunk, tokens)


@on_ranks(1)
def test_passes_that_are_trained_on_count_once():
    """Recomputed ones do, of which Megatron runs the first without gradients; evaluations and
    rollouts do not count. The optimizer that was built last counts alone, and the first of the
    ranks that share slices of experts, which are given the same tokens."""
    dist.init_process_group("gloo")
    from moe_optim import use_cpu

    use_cpu()
    passes = (train_twice, recompute, train_for_another_optimizer, evaluate)
    ((trained, recomputed, built_again, evaluated), of_slices) = (
        [count(one) for one in passes],
        count(train_twice, rank=1),
    )
    assert trained == [("layers.3.experts", (6, 7, 8), [6.0, 0.0, 10.0])]
    assert recomputed == built_again == trained
    assert evaluated == of_slices == []
