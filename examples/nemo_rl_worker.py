"""Trains with moe_optim in NeMo-RL's Megatron policy workers.

With this folder on the Python path of all workers, name the class where the policy is built:

    Policy(..., worker_extension_cls_fqn="nemo_rl_worker.MoEOptimPolicyWorker")

Weights that the recipe keeps in bf16 stay so, and the step is fused.
"""

from typing import Any

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

import moe_optim


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class MoEOptimPolicyWorker(MegatronPolicyWorkerImpl):  # type: ignore[misc]
    """NeMo-RL's worker, whose optimizer is ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        moe_optim.install(moe_optim.MoEOptimConfig())  # before the model is built
        super().__init__(*args, **kwargs)
