"""A whole model becomes another program's, tensor by tensor, or nothing is written."""

import json
import re

import pytest
import torch

from moe_optim.checkpoint.integrity import checkpoint_defect, corrupt_files
from moe_optim.commands.cli import main as cli
from moe_optim.commands.conversion.model_conversion import ModelRequest, plan_model
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.errors import ConfigError, LayoutError
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.checkpoints.exported_models import in_files, stored, write
from tests.support.checkpoints.hf_checkpoints import (
    MTP,
    STORED,
    stored_model,
    write_hf,
    write_megatron,
)
from tests.support.checkpoints.stored_checkpoints import interleaved, read_with_torch

FAMILIES = list(STORED)
FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"


def plan_of(source, to, **request):
    return plan_model(open_checkpoint(source), ModelRequest(to=to, **request))


def convert(source, target, to, **request):
    plan_of(source, to, **request).write(target)
    return target


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def source(family, tmp_path_factory):
    return write_megatron(tmp_path_factory.mktemp("source") / "c", family)


@pytest.fixture(scope="module")
def hf(source, tmp_path_factory):
    return convert(source, tmp_path_factory.mktemp("hf") / "hf", "hf")


def test_there_and_back_gives_every_bit_again(family, source, hf, tmp_path):
    """Under the names of Transformer Engine's layers: the default. It is whole, with checksums."""
    back = convert(hf, tmp_path / "back", "megatron")
    folder = open_checkpoint(back).path
    assert_same_tensors(read_with_torch(folder), stored_model(family))
    assert (checkpoint_defect(folder), list(corrupt_files(folder))) == (None, [])
    assert (folder.name, (back / "latest_checkpointed_iteration.txt").read_text()) == (
        "release",
        "release",
    )


def test_gate_and_up_of_an_expert_are_halves_of_fc1_whatever_the_interleave(tmp_path):
    stored = stored_model("qwen3_moe")
    plain = stored[FC1].clone()
    stored[FC1] = interleaved(plain, 4)
    source = write_megatron(tmp_path / "c", "qwen3_moe", stored, moe_mlp_glu_interleave_size=4)
    got = in_files(convert(source, tmp_path / "hf", "hf"))
    for expert in range(3):
        halves = plain[1, expert].chunk(2)
        for name, rows in zip(("gate", "up"), halves, strict=True):
            key = f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"
            assert_bytes_equal(got[key], rows, what=key)
    back = convert(tmp_path / "hf", tmp_path / "back", "megatron", glu_interleave=4)
    folder = open_checkpoint(back)
    assert folder.recorded.glu_interleave == 4
    assert_bytes_equal(read_with_torch(folder.path)[FC1], stored[FC1], what=FC1)


def test_all_that_is_missing_or_of_wrong_rows_is_named_and_nothing_is_written(tmp_path):
    stored = stored_model("deepseek_v3")
    del stored["decoder.layers.1.mlp.router.expert_bias"]
    del stored["decoder.layers.1.mlp.experts.experts.linear_fc2.weight"]
    stored["decoder.layers.0.mlp.linear_fc1.weight"] = torch.zeros(39, 12)
    stored["decoder.layers.0.pre_mlp_layernorm.weight"] = torch.zeros(12)
    source = write_megatron(tmp_path / "c", "deepseek_v3", stored)
    with pytest.raises(LayoutError) as raised:
        plan_of(source, "hf")
    said = str(raised.value)
    for fault in (
        "decoder.layers.1.mlp.router.expert_bias: missing",
        "decoder.layers.1.mlp.experts.linear_fc2.weight: missing",
        "decoder.layers.0.mlp.linear_fc1.weight: expected rows of gate and up, got [39, 12]",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight and "
        "decoder.layers.0.pre_mlp_layernorm.weight: there is one too many",
    ):
        assert fault in said
    assert "found 4 problems" in said


def test_what_is_left_over_is_named(tmp_path):
    """A model without its adapters would be another model."""
    keys = (
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.1.self_attention.linear_qkv.adapter.linear_in.weight",
        "decoder.layers.1.mlp.experts.experts.linear_fc1.adapter.linear_in.weight",
    )
    more = dict.fromkeys(keys, torch.zeros(48, 2))
    source = write_megatron(tmp_path / "c", "qwen3_moe", stored_model("qwen3_moe") | more)
    with pytest.raises(LayoutError) as raised:
        plan_of(source, "hf")
    assert all(f"  {key}: left over" in str(raised.value) for key in keys)


def test_a_model_of_hugging_face_is_complete_or_refused_with_all_faults(hf, tmp_path):
    tensors = in_files(hf)
    config = json.loads((hf / "config.json").read_text())
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    del tensors[lost], tensors["model.norm.weight"]
    broken = write_hf(tmp_path / "broken", tensors, config)
    with pytest.raises(LayoutError) as raised:
        plan_of(broken, "megatron")
    assert f"{lost}: missing" in str(raised.value)
    assert "model.norm.weight: missing" in str(raised.value)
    quantized = in_files(hf) | {"model.layers.0.self_attn.o_proj.weight_scale_inv": torch.ones(1)}
    with pytest.raises(LayoutError, match="weight_scale_inv: left over"):
        plan_of(write_hf(tmp_path / "quantized", quantized, config), "megatron")


def test_layers_that_predict_further_tokens_have_the_names_that_deepseek_publishes(tmp_path):
    """One bit of a copy that differs from what Megatron shares, and they are refused."""
    hf = convert(write_megatron(tmp_path / "c", MTP), tmp_path / "hf", "hf")
    tensors, config = in_files(hf), json.loads((hf / "config.json").read_text())
    copies = ("embed_tokens", "shared_head.head")
    for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", *copies):
        assert f"model.layers.3.{name}.weight" in tensors
    for copy in copies:
        name = f"model.layers.3.{copy}.weight"
        changed = tensors | {name: tensors[name].clone()}
        changed[name].view(torch.int16)[5, 7] ^= 1
        other = write_hf(tmp_path / copy, changed, config)
        with pytest.raises(LayoutError, match=f"{re.escape(name)}: expected the values of"):
            convert(other, tmp_path / "back", "megatron")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_layers_that_a_configuration_promises_and_no_file_holds_are_one_fault(key, tmp_path):
    """As transformers saves DeepSeek-V3: it drops layers that predict further tokens, and its
    configuration goes on to count them. What the message advises converts."""
    hf = convert(write_megatron(tmp_path / "c", "deepseek_v3"), tmp_path / "hf", "hf")
    config = json.loads((hf / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (hf / "config.json").write_text(json.dumps(config | {key: 1}))
    with pytest.raises(ConfigError) as raised:
        plan_of(hf, "megatron")
    said = str(raised.value)
    assert f"{hf / 'config.json'}: {key}: expected 1 layer(s) behind the 2 others" in said
    assert "Set it to 0" in said and "missing" not in said
    (hf / "config.json").write_text(json.dumps(config | {key: 0}))
    assert plan_of(hf, "megatron").files


def test_layers_that_differ_in_shape_are_refused_where_megatron_stores_them_as_one(tmp_path):
    source = write_megatron(tmp_path / "c", "qwen3_moe")
    hf = convert(source, tmp_path / "hf", "hf")
    tensors, config = in_files(hf), json.loads((hf / "config.json").read_text())
    tensors["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(12, 30)
    with pytest.raises(LayoutError, match=r"layers\.1\.self_attn\.o_proj\.weight: .*\[12, 30\]"):
        plan_of(write_hf(tmp_path / "odd", tensors, config), "megatron")


def test_config_names_dtype_family_and_special_tokens_of_the_tokenizer(source, family, tmp_path):
    """Tokenizer files are passed on as they are, and nothing else of their folder."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes(b'{"a": 1}')
    (tokenizer / "config.json").write_text(json.dumps({"eos_token_id": 3, "vocab_size": 5}))
    (tokenizer / "model.safetensors").write_bytes(b"")
    hf = convert(source, tmp_path / "hf", "hf", tokenizer=tokenizer)
    config = json.loads((hf / "config.json").read_text())
    assert config["model_type"] == family.partition(" ")[0]
    assert config.get("num_nextn_predict_layers", 0) == (2 if family == MTP else 0)
    assert (config["torch_dtype"], config["vocab_size"]) == ("bfloat16", 16)
    assert (config["eos_token_id"], config["bos_token_id"]) == (3, None)
    assert (hf / "tokenizer.json").read_bytes() == b'{"a": 1}'
    (tokenizer / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="expected files of a tokenizer"):
        convert(source, tmp_path / "other", "hf", tokenizer=tokenizer)
    assert not (tmp_path / "other").exists()


@pytest.fixture
def words(tmp_path):
    """A folder with a tokenizer."""
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("command", "name"), [("convert", "tokenizer.json"), ("export", "config.json")]
)
def test_a_link_that_leads_out_of_the_tokenizers_folder_is_bad_input(
    name, command, words, tmp_path, capsys
):
    """It could bring any file of this machine into what is published."""
    (tmp_path / "secret").write_text("{}")
    (words / name).unlink(missing_ok=True)
    (words / name).symlink_to("../secret")
    (words / "merges.txt").write_text("")
    source, target = write(tmp_path / "c", stored()), tmp_path / "out"
    asked = ["--to", "hf"] if command == "convert" else ["--format", "mxfp8"]
    assert cli.main([command, str(source), str(target), *asked, "--tokenizer", str(words)]) == 2
    said = capsys.readouterr().err
    assert f"{words / name}: expected" in said and "points outside" in said
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_arguments_is_refused_with_a_reason(tmp_path):
    from tests.support.checkpoints.stored_checkpoints import write_torch_dist

    common = {"checkpoint_version": 3.0, "iteration": 7}
    source = write_torch_dist(tmp_path / "c", stored_model("qwen3_moe"), common)
    with pytest.raises(ConfigError, match="expected Megatron's arguments"):
        plan_of(source, "hf")
