"""What MoE runs turn on around the experts: Megatron's layers stay Megatron's, to the bit."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optim.config import MoEOptimConfig
from tests.support.modules.experts import PROBS_ON_INPUT, by_layer, make_config, start_ranks
from tests.support.ranks import run_ranks
from tests.support.training import (
    OVERLAP,
    Record,
    assert_same_run,
    assert_same_tensors,
    install_experts,
    pretrain,
)

SHARED = {"moe_shared_expert_intermediate_size": 96}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "shared experts": SHARED,
    "shared experts overlapped": SHARED | {"moe_shared_expert_overlap": True},
    "shared experts with a gate": SHARED | {"moe_shared_expert_gate": True},
    "experts padded to a capacity": {
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
    },
    "tokens dropped over a capacity": {"moe_expert_capacity_factor": 0.5},
    "all-gathered tokens": {"moe_token_dispatcher_type": "allgather"},
    "layers recomputed one by one": FULL | {"recompute_method": "uniform"},
    "a block of layers recomputed": FULL | {"recompute_method": "block"},
    "experts recomputed": SELECTIVE | {"recompute_modules": ["moe"]},
    "shared experts recomputed": SHARED | SELECTIVE | {"recompute_modules": ["shared_experts"]},
    "probs on input": PROBS_ON_INPUT,
    "probs on input recomputed": PROBS_ON_INPUT | SELECTIVE | {"recompute_modules": ["moe"]},
}
SAME_AS = {  # what moves no bit -> what it is compared with
    "layers recomputed one by one": "none",
    "a block of layers recomputed": "none",
    "experts recomputed": "none",
    "shared experts recomputed": "shared experts",
    "probs on input recomputed": "probs on input",
}
DIFFERENT = FEATURES.keys() - SAME_AS.keys() - {"none", "all-gathered tokens"}

KNOBS = {
    "grouped": MoEOptimConfig(format="bf16"),
    "indexed": MoEOptimConfig(format="bf16", expert_layout="indexed"),
    "mxfp8": MoEOptimConfig(format="mxfp8"),
    "compute": MoEOptimConfig(format="bf16", compute="nvfp4"),
}
NARROW = ("mxfp8", "compute")
Tensors = dict[str, Tensor]


def _make_block(changes: dict[str, Any]) -> torch.nn.Module:
    """Return two transformer layers of Megatron's local spec, drawn with seed 1."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlock

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    settings = {
        "num_layers": 2,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_token_dispatcher_type": "alltoall",
        "normalization": "RMSNorm",
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    spec = get_gpt_layer_local_spec(4, moe_grouped_gemm=True, normalization="RMSNorm")
    return TransformerBlock(make_config(**settings | changes), spec, post_layer_norm=False)


@dataclass
class Passes:
    """What a forward and a backward pass of a block were, and what they gave."""

    experts: str  # class
    expert_passes: int  # forward, of both layers
    tensors: Tensors  # output, dgrad and every gradient


def _count_passes(model: torch.nn.Module) -> list[str]:
    """Return a list that gets one entry for every forward pass of any layer's experts."""
    passes: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(".mlp.experts"):
            module.register_forward_hook(lambda *_, name=name: passes.append(name))
    return passes


def _run_block(changes: dict[str, Any]) -> Passes:
    block = _make_block(changes).train()
    passes = _count_passes(block)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(8, 2, 64, generator=generator).bfloat16().requires_grad_()
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)[None, None]
    output = block(tokens, mask)
    output.backward(torch.randn(output.shape, generator=generator).bfloat16())
    found: Tensors = {"output": output.detach(), "dgrad": tokens.grad}
    for name, parameter in block.named_parameters():
        found |= by_layer({name: parameter.grad}) or {name: parameter.grad}
    return Passes(type(block.layers[0].mlp.experts).__name__, len(passes), found)


def _run_all() -> dict[tuple[str, str], Passes]:
    from moe_optim.integration import installation

    start_ranks()
    found = {}
    for feature, changes in FEATURES.items():
        found[feature, "stock"] = _run_block(changes)
        for name, config in KNOBS.items():
            if name in NARROW and feature not in {*SAME_AS, *SAME_AS.values()}:
                continue
            install_experts(config)
            found[feature, name] = _run_block(changes)
            installation.uninstall()
    return found


@pytest.fixture(scope="module")
def blocks() -> dict[tuple[str, str], Passes]:
    return run_ranks(1, _run_all)[0]


@pytest.mark.parametrize("feature", FEATURES)
def test_layers_with_portable_experts_are_megatrons(blocks, feature: str):
    """Outputs and all gradients, of routers, attention, norms and shared experts too, are those of
    the same layers with Megatron's sequential experts."""
    theirs = blocks[feature, "stock"]
    assert len(theirs.tensors) >= 2 + 2 * (4 * 2 + 5)  # layers x (experts x linears + the others)
    for layout in ("grouped", "indexed"):
        ours = blocks[feature, layout]
        assert (ours.experts, theirs.experts) == ("GroupedExperts", "SequentialMLP")
        assert_same_tensors(ours.tensors, theirs.tensors, what=f"{feature}, {layout}")


@pytest.mark.parametrize("feature", SAME_AS)
def test_what_moves_no_bit_of_bf16_experts_moves_none_of_narrow_ones(blocks, feature: str):
    """Recomputed, stored or multiplied in a narrow format; each layer's experts run forward once
    more where they are recomputed."""
    for knobs in NARROW:
        got, want = blocks[feature, knobs].tensors, blocks[SAME_AS[feature], knobs].tensors
        assert_same_tensors(got, want, what=feature)
        bf16 = blocks[feature, "stock"].tensors
        assert not torch.equal(got["output"], bf16["output"])  # it is narrow
    recomputes = "layers" in feature or feature in {
        "experts recomputed",
        "probs on input recomputed",
    }
    expected = {"a block of layers recomputed": 3}.get(feature, 4 if recomputes else 2)
    for knobs in ("stock", *KNOBS):
        assert blocks[feature, knobs].expert_passes == expected


@pytest.mark.parametrize("feature", sorted(DIFFERENT))
def test_what_changes_the_model_is_really_on(blocks, feature: str):
    """Else the tests above would compare a plain layer with itself."""
    plain = blocks["none", "grouped"].tensors["output"]
    assert not torch.equal(blocks[feature, "grouped"].tensors["output"], plain)


# All of it in a training run

RUN = ["--train-iters", "3", "--eval-interval", "2", *OVERLAP, "--clip-grad", "1.0"]
RUN += ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
RUN += ["--expert-tensor-parallel-size", "1", "--moe-shared-expert-intermediate-size", "96"]
RECOMPUTED = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
RECOMPUTED += ["--recompute-num-layers", "1"]


def _train(flags: list[str]) -> Record:
    """Train; ``extra`` is how often experts ran forward."""
    passes: list[list[str]] = []

    def watch(model: list[Any], _optimizer: Any) -> None:
        passes.append(_count_passes(model[0]))

    config = MoEOptimConfig(format="mxfp8")
    return pretrain(flags, config, after_setup=watch, observe=lambda *_: len(passes[0]))


def test_recomputed_layers_train_as_kept_ones():
    """Quantized experts beside shared ones, sequence parallel, gathers overlapped: the second
    forward pass of a layer, in the middle of the backward one, finds the weights of the first, and
    three steps give the same losses, masters, moments and bytes."""
    kept, recomputed = (run_ranks(2, _train, [*RUN, *more]) for more in ([], RECOMPUTED))
    for ours, expected in zip(recomputed, kept, strict=True):
        assert len(ours.losses) == 3
        assert ours.extra > expected.extra
        assert any(name.endswith("rowwise_data") for name in ours.weights)
        assert_same_run(ours, expected, what="recomputed")
