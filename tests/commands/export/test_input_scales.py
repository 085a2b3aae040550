"""Checkpoints of calibrated models are exported with scales of inputs, and engines are told so."""

import json

import pytest
import torch

from moe_optim.commands.cli import main as cli
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.commands.export.stored import find_quantized
from tests.support.bytes import assert_same_tensors
from tests.support.checkpoints.exported_models import EXPERTS, LAYERS, in_files, stored, write

KEY = "decoder.layers.mlp.experts.experts.linear_fc{}.calibrated_input_amax"
OPTIONS = {"modelopt": "input_scale", "compressed_tensors": "input_global_scale"}


def calibrated(folder, change=lambda amaxes: None):
    """Write a checkpoint whose linears have amaxes of their inputs, 1.1 to 4.1."""
    amaxes = torch.arange(1.1, 1 + 2 * LAYERS).view(2, LAYERS, 1, 1, 1)
    change(amaxes)
    return write(folder, stored() | {KEY.format(1 + n): one for n, one in enumerate(amaxes)})


@pytest.mark.parametrize("convention", OPTIONS)
def test_each_weight_has_the_scale_of_its_inputs(convention, tmp_path):
    source, suffix = calibrated(tmp_path / "source"), OPTIONS[convention]
    words = ["export", str(source), "--format", "nvfp4", "--convention", convention]
    assert cli.main([*words, str(tmp_path / "plain")]) == 0
    assert cli.main([*words, str(tmp_path / "scaled"), "--input-scales"]) == 0
    plain, scaled = in_files(tmp_path / "plain"), in_files(tmp_path / "scaled")
    want = {}
    for layer in range(LAYERS):
        for linear, names in enumerate((("gate_proj", "up_proj"), ("down_proj",))):
            amax = torch.tensor(1.1 + LAYERS * linear + layer)
            scale = (
                torch.div(amax, torch.tensor(2688.0))
                if convention == "modelopt"
                else (amax.reciprocal() * 2688).view(1)
            )
            for expert in range(EXPERTS):
                for name in names:
                    stem = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                    want[f"{stem}.{suffix}"] = scale
    assert_same_tensors(scaled, plain | want)
    assert find_quantized(open_checkpoint(tmp_path / "scaled").tensors).faults == ()


def engine_config(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def test_engines_are_told_that_inputs_are_quantized(tmp_path):
    """By ModelOpt's name of the algorithm, or by the arguments of compressed-tensors' own preset,
    which finds scales of blocks on the fly."""
    source = calibrated(tmp_path / "source")
    words = ["export", str(source), "--format", "nvfp4"]
    for convention in OPTIONS:
        argv = [*words, str(tmp_path / convention), "--convention", convention, "--input-scales"]
        assert cli.main(argv) == 0
    assert engine_config(tmp_path / "modelopt")["quant_algo"] == "NVFP4"
    quantization = pytest.importorskip("compressed_tensors.quantization")
    found = quantization.QuantizationConfig.model_validate(
        engine_config(tmp_path / "compressed_tensors")
    )
    scheme = found.config_groups["group_0"]
    preset = quantization.preset_name_to_scheme("NVFP4", ["Linear"])
    for ours, theirs in (
        (scheme.weights, preset.weights),
        (scheme.input_activations, preset.input_activations),
    ):
        for name in ("num_bits", "type", "strategy", "symmetric", "dynamic", "group_size"):
            assert getattr(ours, name) == getattr(theirs, name), name


def _set(value):
    return lambda amaxes: amaxes[1, 0].fill_(value)


REFUSED = {
    "another format": (lambda _: None, "mxfp8", "--input-scales: expected experts in nvfp4, whose"),
    "no calibration": (None, "nvfp4", "got None. Call moe_optim.calibrate"),
    "a linear without an amax": (_set(torch.nan), "nvfp4", "linear_fc2.calibrated_input_amax: exp"),
    "zero": (_set(0.0), "nvfp4", "above zero, got 0.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_scales_that_nobody_knows_are_refused_before_anything_is_written(case, tmp_path, capsys):
    change, format, says = REFUSED[case]
    folder = tmp_path / "source"
    source = write(folder, stored()) if change is None else calibrated(folder, change)
    target = tmp_path / "out"
    argv = ["export", str(source), str(target), "--format", format, "--input-scales"]
    assert cli.main(argv) == 2
    assert says in " ".join(capsys.readouterr().err.split()) and not target.exists()
