"""Models under Megatron's DDP, and the plug-in's optimizer of them."""

from typing import Any


def layer_config(width: int) -> Any:
    """Return the configuration of one layer in bf16."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=width, num_attention_heads=1, bf16=True)


def wrap(config: Any, model: Any, **buffers: Any) -> Any:
    """Return a model in DDP, for a distributed optimizer and reduced in fp32 if not told else."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    defaults = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(**defaults | buffers), model
    )


def build_optimizer(*chunks: Any, **settings: Any) -> Any:
    """Return the plug-in's optimizer of wrapped chunks, Adam if not told else."""
    from megatron.core.optimizer import OptimizerConfig

    import moe_optim

    defaults = {"lr": 1e-3, "bf16": True, "use_distributed_optimizer": True}
    return moe_optim.get_megatron_optimizer(OptimizerConfig(**defaults | settings), list(chunks))
