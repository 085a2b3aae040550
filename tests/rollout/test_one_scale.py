"""Experts with per-tensor scaling are exported as what their quantizer made of them, or refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.errors import ConfigError
from tests.support.bytes import assert_bytes_equal
from tests.support.modules.calibrating import LINEARS, Kind, make, whole_weights
from tests.support.ranks import on_ranks
from tests.support.te.te_stand_ins import Float8CurrentScalingQuantizer, Float8Tensor, as_tensor

pytest.importorskip("megatron.core")

KIND = Kind(owner="Transformer Engine", format="bf16", single=False)
E5M2 = SimpleNamespace(name="kFloat8E5M2")


def _experts_with_one_scale() -> Any:
    """Return Megatron's experts with weights of the class that current scaling has."""
    module = make(KIND)
    for name in LINEARS:
        linear = module.get_submodule(name)
        for key, master in zip(linear._parameters, whole_weights(name), strict=True):
            weight = Float8Tensor(master.float(), Float8CurrentScalingQuantizer())
            linear._parameters[key] = as_tensor(weight)
    return module


@on_ranks(1)
def test_elements_of_e4m3_are_exported_and_those_of_e5m2_refused_by_name():
    """No convention says E5M2 of weights: engines would read other values from its bytes."""
    from moe_optim.experts.keys.layouts import get_layout
    from moe_optim.rollout.experts import local_experts
    from moe_optim.rollout.exported_as import ExportedAs
    from tests.support.modules import experts

    experts.start_ranks()
    module = _experts_with_one_scale()
    exported_as = ExportedAs(get_layout("sequential"), None)
    found = 0
    for local in local_experts(module):
        stacked = exported_as.tensors(local.held, local.buffers(0, local.held.count))
        masters = whole_weights(local.held.linear)
        for master, data, scale in zip(masters, *stacked, strict=True):
            factor = master.float().abs().max() / 448.0
            want = (master.float() / factor).to(torch.float8_e4m3fn)
            assert_bytes_equal(data.view(torch.uint8), want.view(torch.uint8))
            assert_bytes_equal(scale, factor.expand(len(master), 1).contiguous())
            found += 1
    errors = []
    for field, bucket in (("dtype", "_quantizer"), ("_fp8_dtype", None)):
        module = _experts_with_one_scale()
        weight = module.linear_fc2.weight3
        setattr(getattr(weight, bucket) if bucket else weight, field, E5M2)
        with pytest.raises(ConfigError) as error:
            list(local_experts(module))
        errors.append(str(error.value))
    assert found == 2 * 4
    for error in errors:
        assert "linear_fc2: expected elements of E4M3, got kFloat8E5M2" in error
