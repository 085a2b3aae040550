"""Recipes resolve to exactly what their files say, and refuse everything else by name."""

import argparse
import dataclasses
import platform
import shlex
from pathlib import Path

import pytest

from moe_optim import recipes
from moe_optim.config import MoEOptimConfig, available_values, spell
from moe_optim.environment import Gpu
from moe_optim.errors import ConfigError
from moe_optim.recipes import check_requirements, load_recipe, unmet_requirements
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
QUICKSTARTS = [path for path in SHIPPED if path.stem.startswith("quickstart")]
UNSEEN = [path for path in SHIPPED if load_recipe(path).requires.get("sm", 0) >= 100]
"""Recipes for GPUs newer than any that this version was run on."""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a recipe and gives back its path, short enough to compare."""
    monkeypatch.chdir(tmp_path)

    def write_recipe(text, name="run.yaml"):
        path = Path(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write_recipe


SPELLINGS = {  # YAML value -> what Megatron's parser is given after the flag
    "flag alone": ("true", ["--flag"]),
    "absent": ("false", []),
    "null": ("null", []),
    "nothing": ("", []),
    "float with exponent": ("2e-3", ["--flag", "2e-3"]),
    "float with trailing zero": ("1.10", ["--flag", "1.10"]),
    "float without leading zero": (".5", ["--flag", ".5"]),
    "whole number": ("400", ["--flag", "400"]),
    "zero": ("0", ["--flag", "0"]),
    "leading zero": ("010", ["--flag", "010"]),
    "digit groups": ("40_000_000", ["--flag", "40_000_000"]),
    "time": ("12:30:00", ["--flag", "12:30:00"]),
    "date": ("2026-11-21", ["--flag", "2026-11-21"]),
    "words that YAML 1.1 takes for a switch": ("no", ["--flag", "no"]),
    "quoted": ("'true'", ["--flag", "true"]),
    "empty text": ("''", ["--flag", ""]),
    "text with spaces": ("a b", ["--flag", "a b"]),
    "expression": ("([0]*1+[1]*3)", ["--flag", "([0]*1+[1]*3)"]),
    "negative": ("-1", ["--flag=-1"]),
    "negative that argparse takes for a flag": ("-1e-3", ["--flag=-1e-3"]),
    "list": ("[0.3, a, 0.7, b]", ["--flag", "0.3", "a", "0.7", "b"]),
    "list with 0 and 1": ("[0, 1]", ["--flag", "0", "1"]),
    "interpolation": ("${megatron_args.--other}", ["--flag", "5e-1"]),
    "interpolation inside text": ("x/${megatron_args.--other}", ["--flag", "x/5e-1"]),
}


@pytest.mark.parametrize(("value", "argv"), SPELLINGS.values(), ids=SPELLINGS.keys())
def test_a_flag_reaches_megatron_as_it_is_written(write, value, argv):
    path = write(f"megatron_args:\n  --flag: {value}\n  --other: 5e-1\n")
    assert load_recipe(path).megatron_argv() == [*argv, "--other", "5e-1"]


@pytest.mark.parametrize(("value", "argv"), SPELLINGS.values(), ids=SPELLINGS.keys())
def test_an_override_is_spelt_like_the_file(write, value, argv):
    path = write("megatron_args:\n  --flag: before\n  --other: 5e-1\n")
    recipe = load_recipe(path, [f"megatron_args.--flag={value}"])
    assert recipe.megatron_argv() == [*argv, "--other", "5e-1"]


def test_a_variant_holds_only_differences(write):
    write("megatron_args: {--a: 1, --b: true, --c: [1, 2]}\nrequires: {ranks: 2, gpus: 1}\n")
    write("base: run.yaml\nmegatron_args: {--b: null, --c: [3], --d: x}\n", "middle.yaml")
    path = write("base: ../middle.yaml\nmoe_optim: {format: bf16}\nrequires: {gpus: null}\n", "v/x")
    recipe = load_recipe(path)
    assert recipe.path == path
    assert recipe.megatron_argv() == ["--a", "1", "--c", "3", "--d", "x"]
    assert dict(recipe.requires) == {"ranks": 2}
    assert recipe.moe_optim == MoEOptimConfig(format="bf16")


def test_the_last_override_wins(write):
    path = write("moe_optim: {format: mxfp8}\n")
    overrides = ["moe_optim.format=mxfp8", "moe_optim.format=bf16", "requires.ranks=4"]
    recipe = load_recipe(path, overrides)
    assert (recipe.moe_optim.format, recipe.ranks) == ("bf16", 4)


def test_a_recipe_without_anything_optional_has_defaults(write):
    recipe = load_recipe(write("moe_optim:\n"))
    assert (recipe.ranks, recipe.megatron_argv()) == (1, [])
    assert recipe.moe_optim == MoEOptimConfig()


CHOICES = "bf16 or mxfp8 or mxfp8_2d or nvfp4 or fp8_block"  # as messages list them

REFUSED_FILES = {  # text of run.yaml -> what the message must say
    "empty": ("", "run.yaml: expected a mapping with keys among base, requires, megatron_args"),
    "list": ("- a\n", "got a list"),
    "syntax": ("a: 1\nb: [\n", "run.yaml: line 3: expected YAML"),
    "repeated key": (
        "megatron_args:\n  --a: 1\n  --a: 2\n",
        "run.yaml: line 3: expected YAML, got: the key '--a' occurs twice",
    ),
    "python object": ("base: !!python/name:os.system\n", "run.yaml: line 1: expected YAML"),
    "control character": ("a: \0\n", "run.yaml: expected YAML"),
    "unknown section": ("moe_optin: {}\n", "got 'moe_optin'. Write moe_optim, the closest"),
    "section of another type": ("moe_optim: mxfp8\n", "run.yaml: moe_optim: expected a mapping"),
    "base of another type": ("base: [a]\n", "base: expected the path of a recipe, got a list"),
    "unknown requirement": ("requires: {torc: '>=2'}\n", "requires: expected a key among python"),
    "requirement not a version": (
        "requires: {torch: 2.11}\n",
        "run.yaml: requires: torch: expected a version specifier, got '2.11'. Write for example "
        "'>=2.11'.",
    ),
    "requirement not a number": ("requires: {sm: 9.0}\n", "sm: expected a positive whole number"),
    "no ranks": ("requires: {ranks: 0}\n", "ranks: expected a positive whole number, got 0"),
    "switch for a number": ("requires: {gpus: true}\n", "gpus: expected a positive whole number"),
    "flag without dashes": (
        "megatron_args: {num_layers: 2}\n",
        "run.yaml: megatron_args: expected one of Megatron's flags with its leading dashes, got "
        "'num_layers'. Write --num-layers.",
    ),
    "flag with its value": ("megatron_args: {--lr=1: true}\n", "got '--lr=1'"),
    "mapping for a flag": ("megatron_args: {--a: {b: 1}}\n", "--a: expected true, false, a value"),
    "null in a list": ("megatron_args: {--a: [1, null]}\n", "--a: expected true, false, a value"),
    "interpolated mapping": ("megatron_args: {--a: '${moe_optim}'}\n", "--a: expected true, false"),
    "dangling interpolation": (
        "megatron_args: {--a: '${nothing}'}\n",
        "run.yaml: megatron_args.--a: expected an interpolation that resolves",
    ),
    "broken interpolation": ("megatron_args: {--a: '${b'}\n", "megatron_args.--a: expected an int"),
    "unknown knob": ("moe_optim: {fromat: bf16}\n", "run.yaml: moe_optim: expected a key among"),
    "knob of another type": (
        "moe_optim: {format: [bf16]}\n",
        "format: expected one value, got a l",
    ),
    "unknown value": (
        "moe_optim: {format: mxfp6}\n",
        f"run.yaml: moe_optim: format: expected {CHOICES}, got 'mxfp6'. Write mxfp8.",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED_FILES.values(), ids=REFUSED_FILES.keys())
def test_a_file_is_refused_with_its_name_and_key(write, text, message):
    with pytest.raises(ConfigError) as error:
        load_recipe(write(text))
    assert str(error.value).startswith("run.yaml: ")
    assert message in str(error.value)


REFUSED_OVERRIDES = {
    "flag without section": ("--train-iters=20", "Write megatron_args.--train-iters=20."),
    "flag without dashes": ("train-iters=20", "Write megatron_args.--train-iters=20."),
    "knob without section": ("format=bf16", "Write moe_optim.format=bf16."),
    "requirement without section": ("ranks=4", "Write requires.ranks=4."),
    "no value": ("moe_optim.format", "Write moe_optim.format=VALUE."),
    "unknown knob": ("moe_optim.fromat=bf16", "expected a key among format"),
    "flag with section, without dashes": ("megatron_args.lr=1", "Write --lr."),
    "half a list": ("megatron_args.--a=[", "expected YAML"),
    "mapping": ("megatron_args.--a={b: 1}", "expected true, false, a value"),
}


@pytest.mark.parametrize(
    ("override", "message"), REFUSED_OVERRIDES.values(), ids=REFUSED_OVERRIDES.keys()
)
def test_an_override_is_refused_with_the_right_spelling(write, override, message):
    with pytest.raises(ConfigError) as error:
        load_recipe(write("moe_optim:\n"), [override])
    assert str(error.value).startswith(f"override {override!r}: ")
    assert message in str(error.value)


def test_a_value_refused_after_merging_names_the_override(write):
    with pytest.raises(ConfigError, match=r"^run.yaml with moe_optim.format=bf17: moe_optim: form"):
        load_recipe(write("moe_optim:\n"), ["moe_optim.format=bf17"])


@pytest.mark.parametrize("path", ["missing.yaml", "."])
def test_a_recipe_that_cannot_be_read_is_refused(path):
    with pytest.raises(ConfigError, match="expected a readable recipe, got: "):
        load_recipe(path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="expected a readable recipe, got: not UTF-8 text"):
        load_recipe(tmp_path / "run.yaml")


def test_a_missing_base_names_the_recipe_that_asks_for_it(write):
    with pytest.raises(ConfigError, match=r"^gone.yaml: .*Correct `base` in .*run.yaml\.$"):
        load_recipe(write("base: gone.yaml\n"))


def test_a_cycle_of_bases_is_refused_with_its_chain(write):
    write("base: run.yaml\n", "other.yaml")
    with pytest.raises(ConfigError, match=r"run.yaml -> .*other.yaml -> .*run.yaml\. Remove one"):
        load_recipe(write("base: other.yaml\n"))


def test_every_unmet_requirement_is_named_once_with_its_remedy(write, monkeypatch):
    monkeypatch.setattr(recipes, "find_gpus", lambda: (Gpu(name="H100", sm=90, memory_gib=79.6),))
    requires = "python: '<3', torch: '>=99', apex: '>=0.1', sm: 100, gpus: 2"
    recipe = load_recipe(write(f"requires: {{{requires}}}\n"))
    unmet = unmet_requirements(recipe)
    assert [line.partition(":")[0] for line in unmet] == ["python", "torch", "apex", "gpus", "sm"]
    assert unmet[0].startswith(f"python: expected <3, got {platform.python_version()}. ")
    assert unmet[1].endswith("pip install 'torch>=99'")
    assert "expected compute capability 100 or newer, got 90 (H100)" in unmet[4]
    with pytest.raises(ConfigError) as error:
        check_requirements(recipe)
    assert all(line in str(error.value) for line in unmet)


def test_met_requirements_pass(write, monkeypatch):
    monkeypatch.setattr(recipes, "find_gpus", lambda: (Gpu(name="B200", sm=100, memory_gib=178),))
    recipe = load_recipe(write("requires: {python: '>=3.12', sm: 90, gpus: 1, ranks: 64}\n"))
    assert unmet_requirements(recipe) == []
    check_requirements(recipe)


def test_a_machine_without_gpus_lacks_any_capability(write, monkeypatch):
    monkeypatch.setattr(recipes, "find_gpus", lambda: ())
    assert unmet_requirements(load_recipe(write("requires: {sm: 90}\n"))) == [
        "gpus: expected 1 or more, got 0. Use a machine with more, or a recipe for fewer."
    ]


@pytest.mark.parametrize("path", QUICKSTARTS, ids=lambda path: path.stem)
def test_a_quickstart_asks_for_nothing_this_machine_lacks(path):
    assert unmet_requirements(load_recipe(path)) == []


def test_variants_of_the_quickstart_differ_only_where_their_name_says():
    quickstart, bf16, ep2 = (
        load_recipe(ROOT / "recipes" / f"quickstart{suffix}.yaml")
        for suffix in ("", "_bf16", "_ep2")
    )
    assert (quickstart.ranks, quickstart.moe_optim.format) == (2, "mxfp8")
    assert bf16.moe_optim.format == "bf16"
    assert bf16.megatron_args == quickstart.megatron_args
    assert ep2.ranks == 4
    assert ep2.megatron_args == {**quickstart.megatron_args, "--expert-model-parallel-size": 2}
    assert ep2.moe_optim == quickstart.moe_optim


@pytest.fixture(scope="module")
def megatron_parser():
    arguments = pytest.importorskip("megatron.training.arguments")
    return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_megatron_knows_every_flag_of_a_shipped_recipe(path, megatron_parser):
    recipe = load_recipe(path)
    flags = {flag for action in megatron_parser._actions for flag in action.option_strings}
    assert set(recipe.megatron_args) <= flags
    args = megatron_parser.parse_args(recipe.megatron_argv())
    assert (args.lr, args.bf16, args.num_experts) == (
        float(recipe.megatron_args["--lr"]),
        True,
        int(recipe.megatron_args["--num-experts"]),
    )


@pytest.mark.parametrize("path", UNSEEN, ids=lambda path: path.stem)
def test_a_recipe_that_was_not_run_says_so_first_and_can_be_planned(path):
    """Its ranks are a number of GPUs that holds the model, in every format it offers."""
    from moe_optim.cli.plan_costs import plan_rows
    from moe_optim.megatron.planned_experts import plan_experts

    recipe = load_recipe(path)
    header = path.read_text().partition("requires:")[0]
    assert "NOT RUN" in header
    assert recipe.requires["gpus"] == recipe.ranks
    rows = list(plan_rows(plan_experts(recipe.megatron_argv(), grouped=True), [recipe.ranks]))
    planned = {row["format"] for row in rows if row["gpus"] == recipe.ranks}
    offered = {"mxfp8", "mxfp8_2d", "nvfp4"}
    assert offered <= planned
    assert all(name in header for name in offered)


SHRUNKEN = shlex.split("""
--hidden-size 64 --ffn-hidden-size 96 --moe-ffn-hidden-size 64 --num-attention-heads 4
--num-query-groups 2 --kv-channels 16 --num-experts 16 --expert-model-parallel-size 1
--seq-length 32 --vocab-size 63 --make-vocab-size-divisible-by 32 --global-batch-size 4
--train-iters 2 --eval-interval 2 --num-workers 0 --no-bias-swiglu-fusion
""")
LAYERS = {  # recipe -> few layers that are cut as its many are
    "qwen3_30b_a3b": "--num-layers 2",
    "deepseek_v3_5layers": "--moe-shared-expert-intermediate-size 64",
    "deepseek_v3": "--num-layers 4 --decoder-last-pipeline-num-layers 1"
    " --pipeline-model-parallel-size 2 --moe-layer-freq ([0]*1+[1]*3)"
    " --moe-shared-expert-intermediate-size 64",
}


def _train_shrunken(path: Path):
    from tests.support import training

    recipe = load_recipe(path)
    training.MODEL[:] = recipe.megatron_argv()
    return training.pretrain([*SHRUNKEN, *shlex.split(LAYERS[path.stem])], recipe.moe_optim)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=[pytest.mark.extended] * (path.stem in {"qwen3_30b_a3b", "deepseek_v3_5layers"}),
        )
        for path in UNSEEN
    ],
)
def test_a_recipe_that_was_not_run_trains_with_its_sizes_shrunk(path):
    """All of its flags together, on two CPU ranks: Megatron accepts and builds what they ask for,
    and its experts are stored in the recipe's format."""
    *_, last = run_ranks(2, _train_shrunken, path)
    assert set(last.losses) == {1, 2}
    assert last.classes == {"GroupedDistributedOptimizer"}
    assert any(name.endswith("rowwise_data") for name in last.weights)


def test_the_recipes_readme_lists_every_recipe_and_every_knob_with_its_values():
    readme = (ROOT / "recipes" / "README.md").read_text()
    for path in SHIPPED:
        assert f"| `{path.name}` | {load_recipe(path).ranks}," in readme
    for field in dataclasses.fields(MoEOptimConfig):
        values = ", ".join(f"`{spell(value)}`" for value in available_values(field.name))
        assert f"| `{field.name}` | {values} | `{spell(field.default)}` |" in readme
