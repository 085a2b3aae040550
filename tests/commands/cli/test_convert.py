"""``moe-optim convert`` does what its options ask for, says so, and refuses in one line."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.commands.cli import main as cli
from moe_optim.commands.conversion.opening import open_checkpoint
from tests.support.checkpoints.hf_checkpoints import write_megatron
from tests.support.checkpoints.stored_checkpoints import (
    EXPERTS,
    FC1,
    FC2,
    LAYERS,
    ROUTER,
    STATES,
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


def test_the_summary_names_what_is_omitted(convert, source, tmp_path):
    words = ["--experts", "indexed", "--format", "safetensors", "--weights-only"]
    code, lines, err = convert(source, tmp_path / "out", *words)
    assert (code, err) == (0, "")  # no bar where there is no terminal
    assert "/s; peak memory" in lines[1]
    count = len(STATES) * (2 * LAYERS + 2)
    assert lines[-1].startswith(f"Omitted: {count} optimizer tensors and 2 objects")
    assert lines[-1].endswith("(--weights-only).")


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
    reader = open_checkpoint(back)
    assert reader.path.name == "release"  # no iteration was recorded
    assert reader.recorded.glu_interleave == 4
    assert cli.main(["verify", str(source), str(back)]) == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_whole_model_goes_to_hugging_face_and_back(family, convert, tmp_path, capsys):
    """Both ways say what was done, counting the same tensors; on the way back, also how Megatron is
    started. The two are not compared, nor is what is Hugging Face's converted again."""
    source = write_megatron(tmp_path / "c", family)
    code, lines, err = convert(source, tmp_path / "hf", "--to", "hf")
    assert (code, err) == (0, "")
    architecture = {"qwen3_moe": "Qwen3MoeForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
    assert lines[0].startswith(f"{tmp_path / 'hf'}: {architecture[family]}, 2 layers, ")
    there = re.match(r"(\d+) tensors become (\d+), ", lines[1])
    assert lines[-1].startswith("Omitted: 2 objects")
    code, _, err = convert(tmp_path / "hf", tmp_path / "again", "--to", "hf")
    assert code == 2 and "got one that is Hugging Face's already. Use it as it is." in err
    assert cli.main(["verify", str(tmp_path / "hf"), str(source)]) == 2
    said = capsys.readouterr().err
    assert "verify: expected names of one kind, got Hugging Face's in A and Megatron's in B" in said
    assert f"moe-optim convert --to megatron {tmp_path / 'hf'} DIR" in said
    assert (tmp_path / "hf" / "config.json").is_file()
    code, lines, _ = convert(tmp_path / "hf", tmp_path / "back", "--to", "megatron")
    assert code == 0
    back = re.match(r"(\d+) tensors become (\d+), ", lines[1])
    assert there.groups() == back.groups()[::-1]
    assert lines[2].startswith("Megatron's flags: --swiglu --disable-bias-linear")
    assert " --transformer-impl transformer_engine" in lines[2]
    assert lines[3].startswith("These flags start a run with Transformer Engine, which ")
    assert ("convert with --transformer-impl local" in lines[3]) == (family == "qwen3_moe")
    assert cli.main(["verify", str(source), str(tmp_path / "back")]) == 0


REFUSED = {
    "--to hf: expected only its own options, got --from; --format; --weights-only; --rename": [
        *("--to", "hf", "--from", "hf", "--format", "safetensors", "--weights-only"),
        *("--rename", "a=b"),
    ],
    "--experts hf: expected only its own options, got --tokenizer; --transformer-impl": [
        *("--experts", "hf", "--tokenizer", ".", "--transformer-impl", "local")
    ],
    ".*: expected safetensors for --to megatron, got torch_dist": ["--to", "megatron"],
    ".*: expected arguments of a model that transformers": ["--to", "hf"],
    "--experts hf: expected one of grouped, indexed, sequential for torch_dist": [
        "--experts",
        "hf",
    ],
    "--source-glu-interleave 8: .* records a GLU interleave of 4": [
        *("--experts", "grouped", "--source-glu-interleave", "8")
    ],
    "--rename: expected FROM=TO": ["--experts", "grouped", "--rename", "decoder"],
    "--rename nowhere=x: expected keys": ["--experts", "grouped", "--rename", "nowhere=x"],
}


def test_what_cannot_be_done_is_one_line_exits_with_2_and_writes_nothing(convert, source, tmp_path):
    for message, words in REFUSED.items():
        code, lines, err = convert(source, tmp_path / "out", *words)
        assert (code, lines, err.count("error: ")) == (2, [], 1)
        assert re.match(f"error: {message}", err), err
    assert list(tmp_path.iterdir()) == []


def test_a_number_of_experts_that_does_not_divide_is_named_with_what_it_must_divide(
    convert, tmp_path
):
    """6 = E*F rows of the second weight are those of 1, 2, 3 or 6 experts."""
    weights = {"experts.weight1": torch.zeros(5, 12), "experts.weight2": torch.zeros(6, 5)}
    source = tmp_path / "legacy.safetensors"
    save_file(weights, source)
    words = [source, tmp_path / "out", "--experts", "hf", "--from", "legacy"]
    code, _, err = convert(*words, "--num-experts", 4)
    assert code == 2
    assert "(H, E*2F), of E = 4 experts: 8 must divide E*2F, got [5, 12]" in err
    assert "(E*F, H), of E = 4 experts: 4 must divide E*F, got [6, 5]" in err
    assert "Give it" not in err
    assert "how many experts is not in them. Give it" in convert(*words)[2]
    assert convert(*words, "--num-experts", 3)[0] == 0


def test_a_wrong_value_is_named_with_its_option(convert, source, tmp_path, capsys):
    for option in (
        ["--to", "grouped"],  # whole models; a layout is asked for with --experts
        ["--to", "hf", "--experts", "hf"],
        ["--experts", "fused"],
        ["--experts", "hf", "--glu-interleave", "-1"],
        ["--experts", "hf", "--num-experts", "0"],
    ):
        with pytest.raises(SystemExit) as exit:
            convert(source, tmp_path / "out", *option)
        assert exit.value.code == 2
        assert f"argument {option[-2]}: " in capsys.readouterr().err
