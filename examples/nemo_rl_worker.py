"""Trains with moe_optim in NeMo-RL's Megatron policy workers.

With this folder on the Python path of all workers, import this module in the script that builds the
policy, and name the class there; NeMo-RL's own scripts do not pass the argument:

    Policy(..., worker_extension_cls_fqn="nemo_rl_worker.MoEOptimPolicyWorker")

Weights that the recipe keeps in bf16 stay so. With `use_precision_aware_optimizer: true`, which
most recipes set, Megatron steps them; set it to false for a fused step.
"""

from typing import Any

import ray
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

import moe_optim

STOCK = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
ACTOR_ENVIRONMENT_REGISTRY[f"{__name__}.MoEOptimPolicyWorker"] = ACTOR_ENVIRONMENT_REGISTRY[STOCK]


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class MoEOptimPolicyWorker(MegatronPolicyWorkerImpl):  # type: ignore[misc]
    """NeMo-RL's worker, whose optimizer is ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        moe_optim.install(moe_optim.MoEOptimConfig())  # before the model is built
        super().__init__(*args, **kwargs)

    def _iter_params_with_optional_kv_scales(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the weights of the last step, which overlap_param_gather leaves to the next."""
        self.model.start_param_sync(force_sync=True)
        yield from super()._iter_params_with_optional_kv_scales(*args, **kwargs)
