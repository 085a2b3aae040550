"""Trains with moe_optim in slime or miles.

With this folder on the Python path of all workers, add to the arguments of their `train.py`

    --custom-megatron-init-path slime_and_miles.install

Both call the function after Megatron's setup, before the model is built. Their scripts keep bf16
weights, so the step is fused and nothing is quantized; docs/rollouts.md describes how to quantize.
"""

from typing import Any

import moe_optim


def install(_args: Any) -> None:
    """Make moe_optim train the model that is built next, configured as below."""
    # to resume from checkpoints of stock Megatron with --optimizer-cpu-offload, which name Adam's
    # classes: moe_optim.MoEOptimConfig(trust_checkpoint_code=True)
    moe_optim.install(moe_optim.MoEOptimConfig())
