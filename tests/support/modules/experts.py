"""Megatron's sequential experts and the portable ones side by side, alone in their ranks."""

import re
from dataclasses import dataclass
from typing import Any

import torch

from moe_optim.config import MoEOptimConfig

HIDDEN, FFN, EXPERTS = 64, 96, 3
LAYOUTS = ("grouped", "indexed")
COUNTS = (5, 0, 9)
"""Tokens of each expert; the second one has none."""
PROBS_ON_INPUT = {"moe_apply_probs_on_input": True}
PROBS_ON_INPUT |= {"moe_router_topk": 1, "moe_router_pre_softmax": True}
"""Changes with which routing weights scale the input of experts."""
READ_BY_MEGATRON = ("allreduce", "tensor_model_parallel", "partition_stride", "sequence_parallel")


def start_ranks(**parallel: int) -> None:
    """Make this process a rank of Megatron on the CPU, with other groups if it is one already;
    fused functions run step by step.
    """
    from megatron.core import parallel_state

    from moe_optim.integration import cpu_runtime

    cpu_runtime.install()
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
    else:
        torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**parallel)
    torch.compiler.set_stance("force_eager")  # compiled for other shapes, they may round otherwise


def make_config(**changes: Any) -> Any:
    """Return a transformer configuration of SwiGLU experts in bf16, with ``changes``."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "ffn_hidden_size": FFN,
        "moe_ffn_hidden_size": FFN,
        "num_moe_experts": EXPERTS,
        "moe_grouped_gemm": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "init_method_std": 0.2,
        "use_cpu_initialization": False,
    }
    return TransformerConfig(**settings | changes)


def make_stock(config: Any) -> torch.nn.Module:
    """Return Megatron's own experts, drawn with seed 1."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return SequentialMLP(EXPERTS, config, linears, pg_collection=_seeded_groups())


def make_ours(config: Any, **knobs: Any) -> torch.nn.Module:
    """Return the portable experts, drawn with seed 1; bf16 unless ``knobs`` say otherwise."""
    from moe_optim.experts.module import GroupedExperts

    return GroupedExperts(
        EXPERTS,
        config,
        moe_optim_config=MoEOptimConfig(**{"format": "bf16"} | knobs),
        pg_collection=_seeded_groups(),
        name="experts",
    )


def _seeded_groups() -> Any:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    return get_default_pg_collection()


def by_expert(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return parameters of any layout as ``EXPERT.LINEAR.KIND``, and each one of its expert."""
    found = {}
    for name, tensor in named.items():
        linear, kind = re.search(r"(linear_fc[12])\.(weight|bias)", name).groups()
        index = re.search(r"local_experts\.(\d+)|(?:weight|bias)(\d+)", name)
        if index is None:
            found |= {f"{i}.{linear}.{kind}": part for i, part in enumerate(tensor)}
        else:
            found[f"{index[1] or index[2]}.{linear}.{kind}"] = tensor
    return found


def values_of(experts: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the values of all parameters by expert; writes into them reach the parameters."""
    return by_expert({name: p.data for name, p in experts.named_parameters()})


def attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return what Megatron reads of a parameter, by linear and kind of parameter."""
    found = {}
    for name, parameter in module.named_parameters():
        linear, kind = re.search(r"(linear_fc[12])\.(weight|bias)", name).groups()
        found[f"{linear}.{kind}"] = {
            key: getattr(parameter, key) for key in READ_BY_MEGATRON if hasattr(parameter, key)
        }
    return found


def by_layer(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return parameters of experts in a model as ``LAYER.EXPERT.LINEAR.KIND``; leave others out."""
    found = {}
    for name, tensor in named.items():
        layer, is_expert, rest = name.partition(".mlp.experts.")
        if is_expert:
            found |= {f"{layer}.{key}": value for key, value in by_expert({rest: tensor}).items()}
    return found


def trained_values(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters of experts in a wrapped model, by layer and expert, in fp32."""
    return by_layer({name: p.detach().float() for name, p in chunk.module.named_parameters()})


@dataclass
class Passes:
    """What a forward and a backward pass gave."""

    output: torch.Tensor
    tokens_grad: torch.Tensor
    probs_grad: torch.Tensor
    grads: dict[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all of it under names."""
        return {
            "output": self.output,
            "dgrad": self.tokens_grad,
            "gradient of the routing weights": self.probs_grad,
            **self.grads,
        }


def run_passes(
    experts: torch.nn.Module,
    counts: tuple[int, ...] = COUNTS,
    *,
    seed: int = 2,
    probs_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Passes:
    """Send tokens of ``seed`` through experts, and a gradient back."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(sum(counts), HIDDEN, generator=generator).to(device, torch.bfloat16)
    probs = torch.rand(sum(counts), generator=generator).to(device, probs_dtype)
    tokens.requires_grad_()
    probs.requires_grad_()
    output_grad = torch.randn(sum(counts), HIDDEN, generator=generator).to(device, torch.bfloat16)
    output, bias = experts(tokens, torch.tensor(counts), probs)
    assert bias is None
    output.backward(output_grad)
    experts.backward_dw()
    grads = by_expert({name: p.grad for name, p in experts.named_parameters()})
    return Passes(output.detach(), tokens.grad, probs.grad, grads)


def hook_as_ddp(weight: Any) -> Any:
    """Add to ``main_grad`` what GEMMs have not added, as Megatron's DDP does after each pass.

    Keep the node that is returned: the weight does not.
    """

    def add(*_: Any) -> None:
        assert weight.grad is not None
        if not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    weight.grad_added_to_main_grad = False
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(add)
    return node


def randomize_biases(experts: torch.nn.Module) -> None:
    """Give every bias values of its own, the same in any layout."""
    for index, (name, values) in enumerate(sorted(values_of(experts).items())):
        if name.endswith("bias"):
            generator = torch.Generator().manual_seed(index)
            values.copy_(torch.randn(values.shape, generator=generator))


def compare_kinds(config: Any, **passes: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Return initial values, passes and attributes of Megatron's experts and of both layouts."""
    built = {"stock": make_stock(config)}
    built |= {layout: make_ours(config, expert_layout=layout) for layout in LAYOUTS}
    found = {}
    for name, module in built.items():
        initial = {key: value.clone() for key, value in values_of(module).items()}
        randomize_biases(module)
        found[name] = initial, run_passes(module, **passes).tensors(), attributes_of(module)
    return found
