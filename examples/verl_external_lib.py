"""Trains with moe_optim in verl's Megatron workers.

With this folder on the Python path of all workers, add to the command line of verl

    actor_rollout_ref.model.external_lib=verl_external_lib

Every worker imports it with the model's configuration, before the model is built. Weights that the
recipe keeps in bf16 stay so, and the step is fused; docs/rollouts.md describes how to quantize.
"""

import moe_optim

moe_optim.install(moe_optim.MoEOptimConfig())
