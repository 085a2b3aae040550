"""A model of experts whose weights are one parameter each, under the real DDP and optimizer."""

from typing import Any

import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import MXFP8
from tests.support.te import te_stand_ins

WIDTH = 32
KINDS = ("portable", "transformer_engine")


class Apart:
    """Experts in one process, whose gradients are given by hand. Nothing is run forward.

    Args:
        kind: one of ``KINDS``: whose weights.
        experts: their number.
        overlap: whether forward passes gather, and not the step.
    """

    def __init__(self, kind: str, experts: int, *, overlap: bool = False) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import MegatronModule, TransformerConfig

        import moe_optim

        self.overlap = overlap
        moe_optim.uninstall()
        moe_optim.install(MoEOptimConfig(format="mxfp8", layout="aligned", step="fused"))
        shared: dict[str, Any] = {
            "use_distributed_optimizer": True,
            "overlap_param_gather": overlap,
        }
        self.generator = torch.Generator().manual_seed(0)
        config = TransformerConfig(
            num_layers=1, hidden_size=WIDTH, num_attention_heads=1, bf16=True
        )
        model, linear = MegatronModule(config=config), self._make_linear(kind, experts)
        model.add_module("experts", linear)
        self.weights = list(linear.parameters())
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(overlap_grad_reduce=overlap, **shared),
            model,
        )
        self.optimizer = moe_optim.get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=1.0, bf16=True, **shared
            ),
            [self.ddp],
        )
        (part,) = self.optimizer.chained_optimizers
        owned = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
        self.masters = {
            param: master for groups in owned for param, master in zip(*groups, strict=True)
        }

    def _make_linear(self, kind: str, experts: int) -> torch.nn.Module:
        values = torch.randn(experts, WIDTH, WIDTH, generator=self.generator)
        if kind == "portable":
            linear = GroupedLinear(*values.shape, format=MXFP8, expert_layout="indexed")
            linear.load_values(values, keep_for_masters=True)
            return linear
        module = torch.nn.Module()
        for expert, value in enumerate(values):
            weight = te_stand_ins.as_parameter(te_stand_ins.MXFP8Tensor(MXFP8, value))
            module.register_parameter(f"weight{expert}", weight)
        return module

    def backward(self) -> None:
        """Give every weight a gradient, and reduce them."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        for weight in self.weights:
            weight.quantized_storage.before_gradient()
            weight.main_grad.normal_(generator=self.generator)
        if self.overlap:
            self.ddp.start_grad_sync()
        self.ddp.finish_grad_sync()

    def gather(self) -> None:
        """Gather as forward passes do; nothing where the step has."""
        if self.overlap:
            self.ddp.start_param_sync(force_sync=True)
