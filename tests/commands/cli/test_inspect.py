"""``moe-optim inspect`` says what a checkpoint holds, in words and as JSON."""

import json
import math

import pytest
import torch

import moe_optim
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.sealing import mark_unfinished, record_checksums
from moe_optim.commands.cli import main as cli
from moe_optim.formats.reference.dequantizing import dequantize
from tests.support.checkpoints.stored_checkpoints import (
    EXPERTS,
    FC1,
    FC2,
    FFN,
    HIDDEN,
    LAYERS,
    STATES,
    common_state,
    stored_tensors,
    write_torch_dist,
)
from tests.support.hostile.damage import flip_in, flip_in_archive, save_legacy


@pytest.fixture
def inspect(capsys, monkeypatch):
    """Return a function that runs the command; it gives exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        code = cli.main(["inspect", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_report_says_what_was_stored(inspect, tmp_path):
    tensors, sizes = stored_tensors(), {"expert_model_parallel_size": 2, "data_parallel_size": 4}
    folder = write_torch_dist(tmp_path / "c", tensors, common_state(4, **sizes))
    code, out, _ = inspect(folder, "--json")
    report = json.loads(out)
    assert (code, report["defects"], report["faults"]) == (0, [], [])
    assert (report["format"], report["iteration"], report["version"]) == ("torch_dist", 7, "3.0")
    assert report["glu_interleave"] == 4
    assert report["parallel_sizes"] == {"expert": 2, "data": 4}
    assert report["optimizer"]["sharding"] == "fully_reshardable"
    assert report["tensors"] == len(tensors)
    assert report["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert len(report["experts"]) == LAYERS * (1 + len(STATES))
    assert report["experts"][0] == {
        "prefix": "decoder.layers.0.mlp.experts.",
        "holds": "weights",
        "layout": "grouped",
        "experts": EXPERTS,
        "hidden": HIDDEN,
        "ffn": FFN,
        "biases": False,
        "dtype": "bfloat16",
        "bytes": EXPERTS * 3 * FFN * HIDDEN * 2,
    }


def test_a_checkpoint_that_is_not_whole_exits_with_1_and_names_the_file(inspect, tmp_path):
    folder = write_torch_dist(tmp_path / "c", stored_tensors(), one_file=False)
    lost = TorchDistReader(folder).blobs[FC1][0].file
    (folder / lost).unlink()
    code, out, _ = inspect(folder)
    assert code == 1
    assert f"complete       no: {lost} is missing" in out
    (defect,) = json.loads(inspect(folder, "--json")[1])["defects"]
    assert defect.startswith(f"{lost} is missing")


def test_thorough_finds_a_flipped_bit_that_sizes_do_not_show(inspect, tmp_path):
    folder = write_torch_dist(tmp_path / "c", stored_tensors())
    flip_in(folder, FC1)
    assert inspect(folder)[0] == 0
    code, out, _ = inspect(folder, "--thorough")
    assert code == 1
    assert "__0_0.distcp" in out and FC1 in "".join(out.split())
    assert inspect(folder, "--thorough", "--workers", "2")[:2] == (code, out)
    assert cli.main(["verify", str(folder), str(folder), "--workers", "2"]) == 2


def test_files_of_ranks_are_looked_at_without_being_loaded(inspect, tmp_path):
    """Of ``--ckpt-format torch``: whole, flipped, without a file, and while they are written."""
    save_legacy(tmp_path, (20,))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    folder = tmp_path / "iter_0000020"
    file = folder / "mp_rank_01" / "distrib_optim.pt"
    record_checksums(folder)
    code, out, err = inspect(tmp_path, "--thorough")
    assert (code, "iter_0000020" in err) == (0, True)
    assert "4 files of 2 ranks" in out
    flip_in_archive(file)
    assert inspect(folder)[0] == 0
    (defect,) = json.loads(inspect(folder, "--thorough", "--json")[1])["defects"]
    assert defect.startswith("mp_rank_01/distrib_optim.pt damaged archive: Bad CRC-32")
    file.unlink()
    code, out, _ = inspect(folder)
    assert (code, "mp_rank_01/distrib_optim.pt is missing" in out) == (1, True)
    mark_unfinished(folder)
    code, out, _ = inspect(folder)
    assert (code, "no: it was not saved to the end" in out) == (1, True)
    assert cli.main(["verify", str(folder), str(folder)]) == 2


def mxfp8_of(weight):
    """Return what MXFP8 stores of a weight, by torch's own E4M3 cast: no block saturates, as its
    scale is the next power of two above amax / 448."""
    blocks = weight.float().view(*weight.shape[:-1], -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).view(weight.shape)


def test_errors_of_formats_are_those_of_the_stored_weights_quantized(inspect, tmp_path):
    """Against plain torch, of each linear of each layer over all of its experts; the same from
    masters, beside which weights are not read, and with experts read by two processes."""
    torch.manual_seed(8777)
    shapes = {FC1: (2, 3, 64, 96), FC2: (2, 3, 96, 32)}
    weights = {key: torch.randn(shape).bfloat16() for key, shape in shapes.items()}
    weights[FC2][0, 1, :, ::2] *= 2.0**-20  # flushed beside large ones
    folder = write_torch_dist(tmp_path / "c", weights, common_state())
    code, out, _ = inspect(folder, "--formats", "mxfp8", "nvfp4", "--json")
    rows = json.loads(out)["errors"]
    assert code == 0
    assert [(row["prefix"], row["linear"], row["format"]) for row in rows] == [
        (f"decoder.layers.{layer}.mlp.experts.", linear, format)
        for layer in range(2)
        for linear in ("linear_fc1", "linear_fc2")
        for format in ("mxfp8", "nvfp4")
    ]
    for row in rows:
        stored = weights[FC1 if row["linear"] == "linear_fc1" else FC2]
        weight = stored[int(row["prefix"].split(".")[2])].float()
        value = mxfp8_of(weight)
        if row["format"] == "nvfp4":
            value = dequantize(moe_optim.quantize(weight, "nvfp4"))
        errors = (value.double() - weight.double()).square().sum((1, 2))
        norms = weight.double().square().sum((1, 2))
        assert row["error"] == pytest.approx(float((errors.sum() / norms.sum()).sqrt()))
        assert row["worst_error"] == pytest.approx(float((errors / norms).sqrt().max()))
        assert row["worst_expert"] == int((errors / norms).argmax())
        assert row["flushed"] == float(((weight != 0) & (value == 0)).double().mean())
        assert row["saturated"] == 0 or row["format"] == "nvfp4"
    assert max(row["flushed"] for row in rows if row["format"] == "mxfp8") > 0.1
    assert {row["of"] for row in rows} == {"weights"}
    masters = {f"optimizer.state.param.{key}": one.float() for key, one in weights.items()}
    zeros = {key: torch.zeros_like(one) for key, one in weights.items()}
    other = write_torch_dist(tmp_path / "masters", zeros | masters, common_state())
    twice = ("--formats", "mxfp8", "nvfp4", "mxfp8", "--json")
    of_masters = json.loads(inspect(other, *twice)[1])["errors"]
    assert of_masters == [row | {"of": "masters"} for row in rows]
    words = ("--formats", "mxfp8", "nvfp4", "--json", "--workers", "2")
    assert json.loads(inspect(folder, *words)[1])["errors"] == rows
    weights[FC1][0, :2] = torch.tensor([0.0, math.nan])[:, None, None]
    broken = write_torch_dist(tmp_path / "broken", weights, common_state())
    first = json.loads(inspect(broken, "--formats", "mxfp8", "--json")[1])["errors"][0]
    assert (first["worst_expert"], first["error"]) == (1, None)


def test_weights_that_do_not_fit_a_format_or_are_codes_have_no_errors(inspect, tmp_path):
    folder = write_torch_dist(tmp_path / "c", stored_tensors())
    code, _, err = inspect(folder, "--formats", "mxfp8")
    assert code == 2
    assert "decoder.layers.0.mlp.experts.linear_fc1" in err
