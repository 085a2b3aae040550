"""What the factory takes out of Megatron's configuration, since it is done here in another way."""

from types import SimpleNamespace

import pytest

from moe_optim.buckets.bucket_group import GroupedBucketGroup
from moe_optim.config import MoEOptimConfig
from moe_optim.optimizer import factory
from moe_optim.rules import Setup

TAKEN_OUT = (
    "optimizer_cuda_graph",
    "optimizer_cpu_offload",
    "reuse_grad_buf_for_mxfp8_param_ag",
)
PRECISION_AWARE = (
    "use_precision_aware_optimizer",
    "use_precision_aware_optimizer_no_fp8_or_ds_fp8",
)


def config(**flags):
    """Return what of Megatron's ``OptimizerConfig`` is looked at."""
    plain = dict.fromkeys(PRECISION_AWARE, False) | {"main_params_dtype": "torch.float32"}
    return SimpleNamespace(**plain, **dict.fromkeys(TAKEN_OUT, False) | flags)


@pytest.mark.parametrize("flag", TAKEN_OUT)
def test_megatron_does_nothing_that_is_done_here(flag):
    """And the configuration that was given stays as it is: others read it, too."""
    given = config(**{flag: True})
    setup = Setup(config=MoEOptimConfig(step="fused"), optimizer=given)
    settled = factory._without_replaced_flags(given, setup)
    assert not any(getattr(settled, name) for name in TAKEN_OUT)
    assert getattr(given, flag) is True


def test_a_configuration_with_nothing_to_take_out_is_handed_on():
    given = config()
    setup = Setup(config=MoEOptimConfig(step="stock"), optimizer=given)
    assert factory._without_replaced_flags(given, setup) is given


@pytest.mark.parametrize("ours", [True, False], ids=["some are managed", "none is managed"])
def test_a_model_is_adopted_where_all_of_its_buffers_are_megatrons(ours):
    """Beside quantized experts that are trained alone there are empty ones."""
    groups = [object(), object.__new__(GroupedBucketGroup) if ours else object()]
    chunk = SimpleNamespace(bucket_groups=groups, expert_parallel_bucket_groups=[])
    assert factory._is_adopted([chunk]) is not ours
