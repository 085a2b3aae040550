"""Every field has a meaning, a default that works here, and a refusal that says what to write."""

from typing import get_args

import pytest

from moe_optim.config import Compute, Format, MoEOptimConfig
from moe_optim.config.recipe_yaml import parse_yaml
from moe_optim.config.recipes import load_recipe
from moe_optim.errors import ConfigError
from moe_optim.formats import FORMATS

CHOICES = (  # as messages list them
    "auto or bf16 or mxfp8 or mxfp8_2d or nvfp4 or fp8_block or fp8_block_fp32 or mxfp8_rows or "
    "mxfp4 or nvfp4_rows or int4 or int4_g128"
)

REFUSED = (  # field, value -> what the message must say
    (
        "format",
        "fp8",
        f"expected {CHOICES}, got 'fp8'. Write mxfp8 or mxfp8_2d or fp8_block or fp8_block_fp32 or "
        "mxfp8_rows.",
    ),
    ("format", "mxfp6", f"expected {CHOICES}, got 'mxfp6'. Write mxfp8."),
    ("wire", ["bf16"], "expected quantized or bf16, got ['bf16']."),
    ("fuse_wgrad_accumulation", 1, "expected true or false, got 1"),
    ("health_interval", -1, "expected a number from 0 to 1000000, got -1. Write a number from 0"),
    ("offload_states", 1.5, "expected a number from 0 to 1, got 1.5. Write a number from 0 to 1."),
    ("offload_states", float("nan"), "expected a number from 0 to 1, got nan."),
)


def test_a_value_is_refused_with_field_and_remedy():
    for field, value, message in REFUSED:
        with pytest.raises(ConfigError) as error:
            MoEOptimConfig.from_mapping({field: value}, where="run.yaml: moe_optim")
        assert str(error.value).startswith(f"run.yaml: moe_optim: {field}: expected ")
        assert message in str(error.value)
        with pytest.raises(ConfigError, match=f"^MoEOptimConfig: {field}: "):
            MoEOptimConfig(**{field: value})


def test_an_unknown_key_is_refused_with_its_place():
    for key in ("fromat", 3, None):
        with pytest.raises(ConfigError, match=f"^run.yaml: expected a key among .*{key!r}"):
            MoEOptimConfig.from_mapping({key: "bf16"}, where="run.yaml")


def test_bf16_weights_may_be_multiplied_in_any_format_and_others_in_their_own():
    for compute in (None, *get_args(Compute)):
        assert MoEOptimConfig(format="bf16", compute=compute).compute == compute
    for format in FORMATS:
        for compute in (None, format):
            assert MoEOptimConfig(format=format, compute=compute).compute == compute
    for compute in ("nvfp4", "bf16"):
        with pytest.raises(
            ConfigError, match=f"^run: compute: {compute} with format: auto: .*null"
        ):
            MoEOptimConfig.from_mapping({"compute": compute}, "run")


def test_amaxes_are_recorded_of_quantized_weights_alone():
    """bf16 weights are never requantized: a recipe that asks for their amaxes is mistaken."""
    for format in FORMATS:
        assert MoEOptimConfig(format=format, record_amax=True).record_amax
    message = "^recipe: record_amax: true with format: bf16: .*Write false, or store"
    with pytest.raises(ConfigError, match=message):
        MoEOptimConfig.from_mapping({"format": "bf16", "record_amax": True}, "recipe")
    with pytest.raises(ConfigError, match="^MoEOptimConfig: record_amax: true"):
        MoEOptimConfig(format="bf16", record_amax=True)


def test_row_only_formats_lie_in_plain_tensors():
    """Those of Transformer Engine have columnwise data for the dgrad."""
    for name, format in FORMATS.items():
        knobs = {"format": name, "storage": "transformer_engine"}
        if not format.is_row_only:
            assert MoEOptimConfig(**knobs).storage == "transformer_engine"
            continue
        message = f"^run: storage: transformer_engine with format: {name}: .*Set storage: portable"
        with pytest.raises(ConfigError, match=message):
            MoEOptimConfig.from_mapping(knobs, "run")


def test_formats_are_those_with_a_descriptor_and_bf16():
    assert set(get_args(Format)) == {*FORMATS, "bf16"}


def test_assignments_apply_in_order_and_leave_the_original_alone():
    config = MoEOptimConfig()
    changed = config.replace_from(
        ["format=mxfp8", "format=bf16", "fuse_wgrad_accumulation=false", "compute=null"]
    )
    assert changed == MoEOptimConfig(format="bf16", fuse_wgrad_accumulation=False)
    assert config == MoEOptimConfig()
    assert config.replace_from([]) == config


@pytest.mark.parametrize("word", ["yes", "on", "1e3", "1.10", "12:30", "0x10", "1_0", "2026-01-01"])
def test_text_is_read_as_text_in_assignments_as_in_recipes(word, tmp_path):
    """YAML's own rules would take them for true, numbers and a date: messages say what was
    written."""
    assert parse_yaml("here", word) == word
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"moe_optim:\n  wire: {word}\n")
    said = f"wire: expected quantized or bf16, got '{word}'. Write quantized or bf16."
    for read in (
        lambda: MoEOptimConfig().replace_from([f"wire={word}"]),
        lambda: load_recipe(recipe),
    ):
        with pytest.raises(ConfigError) as error:
            read()
        assert str(error.value).endswith(said)


def test_all_faults_are_told_at_once_a_line_each():
    """Unknown keys, words that are no assignments, and values that no field has."""
    words = ["format=mxfp9", "formt=nvfp4", "wire", "health_interval=-1"]
    with pytest.raises(ConfigError) as error:
        MoEOptimConfig().replace_from(words)
    lines = str(error.value).splitlines()
    for fault in ("format: expected", "got 'formt'", "got 'wire'", "health_interval: expected"):
        assert len([line for line in lines if fault in line]) == 1
    assert len(lines) == len(words) and all(line.startswith("--moe-optim-set") for line in lines)
    with pytest.raises(ConfigError) as error:
        MoEOptimConfig.from_mapping({"format": "mxfp9", "formt": "nvfp4"}, "run.yaml")
    assert len(str(error.value).splitlines()) == 2
