"""``moe-optim convert`` does what its options ask for, says so, and refuses in one line."""

import re

import pytest
from safetensors.torch import load_file, save_file

from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.commands.cli import main as cli
from moe_optim.commands.conversion.opening import open_checkpoint
from tests.support.checkpoints.stored_checkpoints import (
    EXPERTS,
    FC1,
    FC2,
    ROUTER,
    common_state,
    stored_tensors,
    write_torch_dist,
)
from tests.support.hostile.damage import flip_in


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "c"
    return write_torch_dist(folder, stored_tensors(), common_state(4))


@pytest.fixture
def convert(capsys, monkeypatch):
    """Return a function that runs the command; it gives exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        code = cli.main(["convert", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    return run


@pytest.mark.parametrize(
    ("key", "format"),
    [
        (FC1, "safetensors"),
        (f"optimizer.state.exp_avg.{FC2}", "torch_dist"),
        (ROUTER, "torch_dist"),
        ("common_state/", "safetensors"),
    ],
)
def test_one_flipped_bit_is_not_written_under_new_checksums(convert, key, format, tmp_path):
    """Sizes are right and torch reads the file: the bit would pass for the truth from then on."""
    folder = write_torch_dist(tmp_path / "c", stored_tensors())
    blobs = TorchDistReader(folder).blobs
    (blob,) = next(blobs[name] for name in blobs if name.startswith(key))
    flip_in(folder, key)
    code, lines, err = convert(folder, tmp_path / "out", "--experts", "indexed", "--format", format)
    assert (code, lines) == (2, [])
    said = " ".join(err.split())
    assert f"{folder / blob.file}: {blob.name}: expected what torch.save wrote" in said
    assert "CRC-32" in said
    assert not (tmp_path / "out").exists()


def test_every_option_reaches_the_conversion(convert, source, tmp_path):
    """Away to a layout that does not tell the number of experts, unsaid interleave, and back."""
    there, back = tmp_path / "there", tmp_path / "back"
    convert(
        source, there, "--experts", "legacy", "--format", "safetensors", "--rename", "decoder.=d."
    )
    (there / "model.safetensors.index.json").unlink()
    for path in there.glob("*.safetensors"):  # as if written by another program
        save_file(load_file(path), path)
    words = [back, "--experts", "sequential", "--format", "torch_dist", "--rename", "d.=decoder."]
    words += ["--glu-interleave", "4", "--source-glu-interleave", "0", "--from", "legacy"]
    code, lines, _ = convert(there, *words, "--num-experts", EXPERTS)
    assert code == 0
    assert "torch_dist stores grouped, indexed and sequential experts alike." in lines
    written = lines[1]
    reader = open_checkpoint(back)
    assert written.startswith(f"{len(reader.tensors)} tensors written, ")
    assert reader.path.name == "release"  # no iteration was recorded
    assert reader.recorded.glu_interleave == 4
    assert cli.main(["verify", str(source), str(back)]) == 0


REFUSED = {
    "--to hf: expected only its own options, got --from; --format; --weights-only; --rename": [
        *("--to", "hf", "--from", "hf", "--format", "safetensors", "--weights-only"),
        *("--rename", "a=b"),
    ],
    ".*: expected safetensors for --to megatron, got torch_dist": ["--to", "megatron"],
    "--experts hf: expected one of grouped, indexed, sequential for torch_dist": [
        "--experts",
        "hf",
    ],
    "--source-glu-interleave 8: .* records a GLU interleave of 4": [
        *("--experts", "grouped", "--source-glu-interleave", "8")
    ],
    "--rename nowhere=x: expected keys": ["--experts", "grouped", "--rename", "nowhere=x"],
}


def test_what_cannot_be_done_is_one_line_exits_with_2_and_writes_nothing(convert, source, tmp_path):
    for message, words in REFUSED.items():
        code, lines, err = convert(source, tmp_path / "out", *words)
        assert (code, lines, err.count("error: ")) == (2, [], 1)
        assert re.match(f"error: {message}", err), err
    assert list(tmp_path.iterdir()) == []
