"""The three flags of the plug-in: their names, what they ask for, and that nothing drops them."""

import argparse
import sys
from types import SimpleNamespace

import pytest

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError
from moe_optim.integration.arguments import add_moe_optim_arguments, config_from_argv
from tests.support.ranks import on_ranks

SURFACE = {  # flag -> action, what it takes, default
    "--use-moe-grouped-optim": ("_SwitchOn", None, False),
    "--moe-optim-recipe": ("_StoreAction", "PATH", None),
    "--moe-optim-set": ("_AppendAction", "KEY=VALUE", []),
}
FLAG = "--use-moe-grouped-optim"


@pytest.fixture
def recipe(tmp_path):
    """Return the path of a recipe that asks for indexed bf16 experts, among other things."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "requires: {ranks: 2}\n"
        "megatron_args: {--num-layers: 2}\n"
        "moe_optim: {format: bf16, expert_layout: indexed}\n"
    )
    return str(path)


def options(parser):
    return [action for action in parser._actions if action.dest != "help"]


def test_the_flags_are_frozen():
    parser = add_moe_optim_arguments(argparse.ArgumentParser())
    got = {
        flag: (type(action).__name__, action.metavar, action.default)
        for action in options(parser)
        for flag in action.option_strings
    }
    assert got == SURFACE


@pytest.mark.parametrize("is_given", [True, False], ids=["with the flag", "without it"])
def test_the_flag_implies_megatrons_distributed_optimizer(is_given):
    """Wherever the two stand among others, and where the second is not given at all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    add_moe_optim_arguments(parser)
    args = parser.parse_args([FLAG] * is_given)
    assert args.use_moe_grouped_optim == args.use_distributed_optimizer == is_given


# What a command line asks for

ASKS = {  # argv -> configuration
    "nothing": ([], None),
    "Megatron's flags alone": (["--num-layers", "2", "--bf16", "positional"], None),
    "the flag": ([FLAG], MoEOptimConfig()),
    "a field": ([FLAG, "--moe-optim-set", "format=bf16"], MoEOptimConfig(format="bf16")),
    "a field with an equals sign": (
        [FLAG, "--moe-optim-set=expert_layout=indexed"],
        MoEOptimConfig(expert_layout="indexed"),
    ),
    "two fields": (
        [FLAG, "--moe-optim-set", "format=bf16", "--moe-optim-set", "expert_layout=indexed"],
        MoEOptimConfig(format="bf16", expert_layout="indexed"),
    ),
}


@pytest.mark.parametrize(("argv", "config"), ASKS.values(), ids=ASKS.keys())
def test_what_a_command_line_asks_for(argv, config):
    before = list(argv)
    assert config_from_argv(argv) == config
    assert argv == before


@pytest.mark.parametrize("recipe_first", [True, False], ids=["recipe first", "recipe last"])
def test_fields_go_over_the_recipe_wherever_they_stand(recipe, recipe_first):
    parts = [["--moe-optim-recipe", recipe], ["--moe-optim-set", "format=mxfp8"]]
    first, last = parts if recipe_first else reversed(parts)
    expected = MoEOptimConfig(format="mxfp8", expert_layout="indexed")
    assert config_from_argv([*first, FLAG, *last]) == expected


REFUSED = {  # argv -> what the error names
    "a recipe without the flag": (["--moe-optim-recipe", "run.yaml"], f"need {FLAG}.* Add {FLAG}"),
    "a field without the flag": (["--moe-optim-set", "format=bf16"], f"need {FLAG}"),
    "an unknown field": ([FLAG, "--moe-optim-set", "fromat=bf16"], "'fromat'. Write format"),
    "a recipe that is not there": ([FLAG, "--moe-optim-recipe", "/no/run.yaml"], "/no/run.yaml"),
}


@pytest.mark.parametrize(("argv", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_request_is_refused_by_name(argv, message):
    with pytest.raises(ConfigError, match=message):
        config_from_argv(argv)


# What Megatron does to arguments


@on_ranks(1)
def test_nothing_that_megatron_does_to_arguments_loses_what_the_command_line_asks_for(tmp_path):
    """``--yaml-cfg`` replaces its args, ours included; ``--use-checkpoint-args`` takes the model's
    shape from the file, and not our flags."""
    file = tmp_path / "megatron.yaml"
    file.write_text("{num_layers: 2, disable_msc_deprecated: false, enable_msc: false}")
    from megatron.training import checkpointing
    from megatron.training.arguments import parse_args

    own = [FLAG, "--moe-optim-set", "format=bf16"]
    found = []
    sources = (["--num-layers", "2"], ["--yaml-cfg", str(file)], ["--use-checkpoint-args"])
    for argv in sources:
        sys.argv = ["pretrain", *argv, "--load", "x", *own]
        args = parse_args(extra_args_provider=add_moe_optim_arguments)
        if argv == sources[-1]:  # saved without the plug-in
            own_values = {"use_moe_grouped_optim": False, "moe_optim_set": [], "num_experts": 4}
            state = {"args": SimpleNamespace(**vars(args) | own_values), "iteration": 3}
            loaded = state | {"checkpoint_version": 3.0}, "iter_0000003", False, None
            checkpointing._load_base_checkpoint = lambda *_, loaded=loaded, **__: loaded
            checkpointing.load_args_from_checkpoint(args)
            assert args.num_experts == 4
        on = getattr(args, "use_moe_grouped_optim", None)
        found.append((on, getattr(args, "moe_optim_set", None), config_from_argv(sys.argv[1:])))
    flags, from_file, from_checkpoint = found
    bf16 = MoEOptimConfig(format="bf16")
    assert flags == from_checkpoint == (True, ["format=bf16"], bf16)
    assert from_file == (None, None, bf16)
