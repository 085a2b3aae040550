"""A plan reads flags and cuts layers and buckets as Megatron does, without importing it."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from moe_optim.commands.plan import flags as plan_flags
from moe_optim.commands.plan.flags import RECORD, parse_flags
from moe_optim.commands.plan.stages import count_moe_layers
from moe_optim.config.recipes import load_recipe, shipped_recipes
from moe_optim.errors import ConfigError
from tools.documents.megatron_flags import PLAIN, megatron_parser, recorded, spell_flags

# Flags


@recorded
def test_the_recorded_flags_are_those_of_the_megatron_that_is_installed():
    assert RECORD.read_text() == spell_flags(), "run make docs"


def parsed_plainly(args):
    """Return what is a number or a text; others have types of Megatron's."""
    return {
        name: value
        for name, value in vars(args).items()
        if type(value) in PLAIN or name == "moe_layer_freq"
    }


def test_flags_of_every_recipe_are_read_as_megatron_reads_them():
    patterns = ("3", "([0]*3+[1]*58)", "([1]*3+[0]*2)*2", "[0,1,1]")
    lines = [load_recipe(Path(name), []).megatron_argv() for name in shipped_recipes()]
    parser = megatron_parser()
    for argv in [*lines, *(["--moe-layer-freq", text] for text in patterns)]:
        expected = parsed_plainly(parser.parse_args(argv))
        found = vars(parse_flags(argv))
        assert {name: found[name] for name in expected} == expected


def test_a_pattern_of_layers_is_not_run_as_code():
    with pytest.raises(ConfigError, match="moe-layer-freq|values that Megatron takes"):
        parse_flags(["--moe-layer-freq", "[print('run')]"])


def test_another_megatron_is_asked_itself(monkeypatch):
    other = SimpleNamespace(version="0.20.0", checkout=False)
    monkeypatch.setattr(plan_flags, "find_package", lambda name: other)
    monkeypatch.setattr(plan_flags, "parse_with_megatron", list)
    assert parse_flags(["--bf16"]) == ["--bf16"]


def test_without_megatron_wrong_flags_are_named_all_the_same(monkeypatch):
    monkeypatch.setattr(plan_flags, "find_package", lambda name: None)
    assert parse_flags(["--num-layers", "4"]).num_layers == 4
    for argv in (["--num-layer", "4"], ["--num-layers", "four"], ["--optimizer", "adamw"]):
        with pytest.raises(ConfigError, match="expected flags that Megatron takes, got"):
            parse_flags(argv)


def test_wrong_flags_are_named_with_remedies_without_importing_megatron(monkeypatch):
    monkeypatch.setattr(plan_flags, "parse_with_megatron", None)  # not called
    wrong = ["--num-layres", "4", "--lr", "fast", "--hidden-size"]
    with pytest.raises(ConfigError) as raised:
        parse_flags(wrong)
    for fault in (
        "--num-layres: no such flag. Write --num-layers, the closest one.",
        "--lr: invalid float value: 'fast'. Change the value.",
        "--hidden-size: expected one argument. Give the value.",
    ):
        assert fault in str(raised.value)


# Stages


def flags_of_stages(**given):
    names = {
        "num_layers": 8,
        "moe_layer_freq": 1,
        "mtp_num_layers": None,
        "pipeline_model_parallel_size": 1,
        "pipeline_model_parallel_layout": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "num_virtual_stages_per_pipeline_rank": None,
        "num_layers_per_virtual_pipeline_stage": None,
    }
    return SimpleNamespace(**names | given)


def megatrons_stages(args, pattern):
    """Return what Megatron builds; raises AssertionError where it does."""
    virtual = args.num_virtual_stages_per_pipeline_rank or 1
    config = SimpleNamespace(
        num_layers=args.num_layers,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=args.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=args.account_for_loss_in_pipeline_split,
    )

    def count(chunk, stage):
        index = chunk if virtual > 1 else None
        first = get_transformer_layer_offset(config, index, stage)
        return sum(pattern[first : first + get_num_layers_to_build(config, index, stage)])

    return [
        tuple(count(chunk, stage) for chunk in range(virtual))
        for stage in range(args.pipeline_model_parallel_size)
    ]


@settings(max_examples=60)
@given(data=st.data())
def test_layers_are_cut_where_megatron_cuts_them(data):
    draw = data.draw
    pipeline = draw(st.integers(1, 4))
    own = st.one_of(st.none(), st.integers(1, 4))
    uneven = draw(st.booleans()) and pipeline > 2
    pattern = draw(st.lists(st.integers(0, 1), min_size=4, max_size=24).map(lambda p: [*p, 1]))
    args = flags_of_stages(
        num_layers=len(pattern),
        moe_layer_freq=pattern,
        pipeline_model_parallel_size=pipeline,
        num_virtual_stages_per_pipeline_rank=draw(st.integers(1, 3)) if pipeline > 1 else None,
        decoder_first_pipeline_num_layers=draw(own) if uneven else None,
        decoder_last_pipeline_num_layers=draw(own) if uneven else None,
        account_for_embedding_in_pipeline_split=not uneven and draw(st.booleans()),
        account_for_loss_in_pipeline_split=not uneven and draw(st.booleans()),
    )
    ends = (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)
    assume(sum(count or 0 for count in ends) <= len(pattern))  # Megatron makes less than none of it
    try:
        expected = megatrons_stages(args, pattern)
    except AssertionError:
        with pytest.raises(ConfigError, match="expected stages that Megatron can fill"):
            count_moe_layers(args)
    else:
        assert count_moe_layers(args) == expected


LAYOUTS = ["Ett|tt|tt|ttL", "Et*4|(tt|)*1ttL", "E,t*2|(t|)*2,t*4|L", "Et|ttttttt|m|L", "t*8|EL"]
LAYOUTS += ["Ettttttttm|L", "Ettttttt|t|x|L", "E(tt|)*4L", "Ett|tt|tt|ttmL", "Ettt|tt|tm|ttL"]


@pytest.mark.parametrize(("pipeline", "further"), list(product((1, 2, 4), (None, 1))))
@pytest.mark.parametrize("text", LAYOUTS)
def test_layouts_of_stages_are_read_as_megatron_reads_them(text, pipeline, further):
    pattern = [0, 1, 1, 0, 1, 0, 0, 1]
    args = flags_of_stages(
        moe_layer_freq=pattern,
        mtp_num_layers=further,
        pipeline_model_parallel_size=pipeline,
        pipeline_model_parallel_layout=text,
    )
    try:
        layout = PipelineParallelLayerLayout(text, pipeline)
        layout.validate_layer_layout(8, further or 0)
    except AssertionError:
        with pytest.raises(ConfigError, match="expected one that Megatron takes"):
            count_moe_layers(args)
        return
    experts = iter(pattern)
    expected = [[] for _ in range(pipeline)]
    for chunk in zip(*layout.layout, strict=True):
        for stage, kinds in enumerate(chunk):
            own = sum(next(experts) for kind in kinds if kind is LayerType.decoder)
            expected[stage].append(own + kinds.count(LayerType.mtp))
    assert count_moe_layers(args) == [tuple(chunks) for chunks in expected]
