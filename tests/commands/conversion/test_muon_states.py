"""Masters and momentum of Muon go with their experts, by the names of either of its optimizers."""

import pytest
import torch

from moe_optim.commands.cli import main as cli
from tests.support.bytes import assert_bytes_equal
from tests.support.checkpoints.exported_models import MASTERS, in_files, stored, write
from tests.support.checkpoints.stored_checkpoints import (
    FC1,
    FC2,
    ROUTER,
    common_state,
    interleaved,
    random_bits,
    read_with_torch,
    stored_tensors,
    write_torch_dist,
)

PREFIXES = {"by name": "", "layer-wise": "chained_0."}
KINDS = ("fp32_param", "momentum_buffer")
NORM = "optimizer.state.exp_avg.decoder.final_layernorm.weight"


def muons_tensors(prefix: str) -> dict[str, torch.Tensor]:
    """Return weights, masters and momentum of matrices, and a moment of another parameter."""
    tensors = stored_tensors(states=False)
    states = {
        f"{prefix}optimizer.state.{kind}.{key}": random_bits(tensors[key].shape, torch.float32, 5)
        for kind in KINDS
        for key in (FC1, FC2, ROUTER)
    }
    return tensors | states | {NORM: torch.ones(8)}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES.keys())
def test_momentum_is_converted_with_its_weights_and_named(prefix, tmp_path, capsys):
    """Rows of fc1 are interleaved in all three; everything else stays as it is."""
    tensors = muons_tensors(prefix)
    source = write_torch_dist(tmp_path / "source", tensors, common_state())
    out = tmp_path / "out"
    words = ["--experts", "grouped", "--format", "torch_dist", "--glu-interleave", "4"]
    assert cli.main(["convert", str(source), str(out), *words]) == 0
    got = read_with_torch(out / "iter_0000007")
    for key, values in tensors.items():
        want = interleaved(values, 4) if key.endswith(FC1) else values
        assert_bytes_equal(got[key], want, what=key)
    assert cli.main(["verify", str(source), str(out)]) == 0
    capsys.readouterr()
    assert cli.main(["inspect", str(source)]) == 0
    shown = capsys.readouterr().out
    assert "fp32_param float32, exp_avg float32, momentum_buffer float32" in shown
    (table,) = shown.split("experts in ")[1:]
    assert [line.split()[0] for line in table.splitlines()[2:5]] == ["weights", *KINDS]


@pytest.mark.parametrize(("kind", "prefix"), [*zip(KINDS, PREFIXES.values(), strict=True)])
def test_experts_without_one_of_the_two_are_refused(kind, prefix, tmp_path, capsys):
    tensors = muons_tensors(prefix)
    for key in (FC1, FC2):
        del tensors[f"{prefix}optimizer.state.{kind}.{key}"]
    source = write_torch_dist(tmp_path / "source", tensors, common_state())
    words = ["--experts", "hf", "--format", "safetensors"]
    assert cli.main(["convert", str(source), str(tmp_path / "out"), *words]) == 2
    said = capsys.readouterr().err
    assert "expected fp32_param and momentum_buffer of a layer's experts or none" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES.keys())
def test_exports_take_masters_of_muon(prefix, tmp_path):
    tensors = stored()
    of_muon = {
        key.replace(MASTERS, f"{prefix}optimizer.state.fp32_param."): values
        for key, values in tensors.items()
    }
    outs = []
    for number, one in enumerate((tensors, of_muon, stored(with_masters=False))):
        source = write(tmp_path / f"source{number}", one)
        outs.append(tmp_path / f"out{number}")
        words = ["--format", "mxfp8"]
        assert cli.main(["export", str(source), str(outs[-1]), *words]) == 0
    want, got, of_weights = map(in_files, outs)
    for name, values in want.items():
        assert_bytes_equal(got[name].view(torch.uint8), values.view(torch.uint8), what=name)
    assert any(not torch.equal(of_weights[name], values) for name, values in want.items())
