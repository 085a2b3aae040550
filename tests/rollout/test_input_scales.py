"""Experts in NVFP4 are exported with the scale of their inputs, as their conventions define it."""

from typing import Any

import pytest
import torch

from moe_optim import ops
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.formats import NVFP4, NVFP4_ROWS
from moe_optim.rollout.conventions import CONVENTIONS, find_convention
from moe_optim.rollout.expert_tensors import export_experts
from tests.rollout.test_export_weights import EXPERTS, Setup, build
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.inputs import normal_weights
from tests.support.ranks import run_ranks
from tests.support.states.life_cycle import initialize

AMAXES = [1.0, 0.1, 3.0, 448.0, 2.0**-20, 1e30, 12345.678]


def scale_of(convention: str, amax: float) -> torch.Tensor:
    """Return what ModelOpt stores, ``amax / 2688``, or compressed-tensors, ``2688 / amax``."""
    value = torch.tensor(amax)
    if convention == "modelopt":
        return (value.double() / 2688).float()
    from compressed_tensors.quantization.utils.helpers import generate_gparam

    return generate_gparam(-value / 2, value)


@pytest.mark.parametrize("convention", ["modelopt", "compressed_tensors"])
@pytest.mark.parametrize("format", [NVFP4, NVFP4_ROWS], ids=lambda one: one.name)
def test_the_scale_is_that_of_the_reference(format, convention):
    """Bit for bit, for gate and up alike; weights are exported as without it."""
    if convention == "compressed_tensors":
        pytest.importorskip("compressed_tensors")
    quantized = ops.quantize(normal_weights(2, 64, 32, seed=1), format)
    found = find_convention(format, convention)
    plain = export_experts(quantized, found, parts=2)
    for amax in AMAXES:
        scaled = export_experts(quantized, found, parts=2, input_amax=amax)
        for ours, theirs in zip(sum(scaled, []), sum(plain, []), strict=True):
            assert_bytes_equal(ours.pop(found.input_scale), scale_of(convention, amax))
            assert_same_tensors(ours, theirs)


# Of a live model

PIPELINE = {"pipeline_model_parallel_size": 2}
NAMES = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}
STACKED = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}


def amax_of(layer: int, linear: str) -> float:
    return 1.1 + layer + (0.3 if linear == "linear_fc2" else 0)


def _export(setup: Setup) -> dict[str, Any]:
    """Return what is exported in both conventions and layouts, and the errors before."""
    import moe_optim
    from moe_optim.calibration.linears import expert_linears
    from moe_optim.weights.names import modules_by_name, with_global_layers

    initialize()
    chunks, _ = build(setup)
    found: dict[str, Any] = {}
    with pytest.raises((ConfigError, LayoutError)) as error:
        list(moe_optim.export_weights(chunks, input_scales=True))
    found["error"] = str(error.value)
    for linear in expert_linears(chunks[0]):
        name = with_global_layers(linear.name, modules_by_name(chunks[0]))
        amax = amax_of(int(name.split("layers.")[1].split(".")[0]), name.rpartition(".")[2])
        moe_optim.set_calibrated_input_amax(linear.module, torch.tensor(amax))
    if setup.knobs["format"] != "nvfp4":
        return found
    for convention in ("modelopt", "compressed_tensors"):
        for layout in ("hf_per_expert", "hf"):
            options = {"convention": convention, "layout": layout}
            plain = {n: one.clone() for n, one in moe_optim.export_weights(chunks, **options)}
            scaled = {
                name: one.clone()
                for name, one in moe_optim.export_weights(chunks, input_scales=True, **options)
            }
            assert_same_tensors({n: scaled[n] for n in plain}, plain)
            found[f"{convention} {layout}"] = {n: scaled[n] for n in scaled.keys() - plain.keys()}
    return found


@pytest.mark.slow
def test_every_rank_yields_the_scales_of_all_layers():
    """Over pipeline stages, of which each holds amaxes of its own layer."""
    for found in run_ranks(2, _export, Setup(sizes=PIPELINE, knobs={"format": "nvfp4"})):
        assert (
            "linear_fc1: expected a calibrated amax of inputs above zero, got None"
            in (found["error"])
        )
        for convention, suffix in (
            ("modelopt", "input_scale"),
            ("compressed_tensors", "input_global_scale"),
        ):
            apart, stacked = {}, {}
            for layer in range(2):
                stem = f"model.layers.{layer}.mlp.experts"
                for linear, names in NAMES.items():
                    scale = scale_of(convention, amax_of(layer, linear))
                    for name in names:
                        for expert in range(EXPERTS):
                            apart[f"{stem}.{expert}.{name}.{suffix}"] = scale
                    all_of = torch.stack([scale] * EXPERTS)
                    stacked[f"{stem}.{STACKED[linear]}_{suffix}"] = all_of
            assert_same_tensors(found[f"{convention} hf_per_expert"], apart)
            assert_same_tensors(found[f"{convention} hf"], stacked)


def test_formats_whose_inputs_have_no_stored_scale_are_refused():
    setup = Setup(knobs={"format": "mxfp8"})
    ((found),) = run_ranks(1, _export, setup)
    assert "input_scales: expected experts in nvfp4, " in found["error"]
    assert "got mxfp8 in compressed_tensors" in found["error"]
    assert {one.format for one in CONVENTIONS if one.input_scale} == {"nvfp4"}
