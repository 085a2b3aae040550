"""Recipes resolve to exactly what their files say, and refuse everything else by name."""

import os
import platform
import sys
from functools import cache, partial
from pathlib import Path

import pytest

from moe_optim.commands.plan.costs import left_out
from moe_optim.commands.plan.experts import plan_experts
from moe_optim.config import MoEOptimConfig, recipes
from moe_optim.config.recipe_yaml import MAX_BYTES
from moe_optim.config.recipes import check_requirements, load_recipe, unmet_requirements
from moe_optim.environment import Gpu
from moe_optim.errors import ConfigError
from moe_optim.formats import FORMATS
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
MODELS = [path for path in SHIPPED if path.stem.startswith(("qwen", "deepseek", "gpt", "kimi"))]
"""Real ones, of sizes that were not run."""


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


SPELLINGS = (  # YAML value -> what Megatron's parser is given after the flag
    ("true", ["--flag"]),
    ("false", []),
    ("", []),
    ("010", ["--flag", "010"]),
    ("40_000_000", ["--flag", "40_000_000"]),
    ("([0]*1+[1]*3)", ["--flag", "([0]*1+[1]*3)"]),
    ("-1", ["--flag=-1"]),
    ("-1e-3", ["--flag=-1e-3"]),  # which argparse takes for a flag
    ("[0.3, a, 0.7, b]", ["--flag", "0.3", "a", "0.7", "b"]),
    ("${megatron_args.--other}", ["--flag", "5e-1"]),
    ("9" * 5000, ["--flag", "9" * 5000]),
)


def test_a_flag_reaches_megatron_as_it_is_written_in_a_file_or_an_override(write):
    for value, argv in SPELLINGS:
        path = write(f"megatron_args:\n  --flag: {value}\n  --other: 5e-1\n")
        assert load_recipe(path).megatron_argv() == [*argv, "--other", "5e-1"]
        path = write("megatron_args:\n  --flag: before\n  --other: 5e-1\n")
        recipe = load_recipe(path, [f"megatron_args.--flag={value}"])
        assert recipe.megatron_argv() == [*argv, "--other", "5e-1"]


CHOICES = " or ".join(("auto", "bf16", *FORMATS))  # as messages list them

MARK = "a key among base, requires, megatron_args, moe_optim"
REFUSED_FILES = (  # text of run.yaml -> what the message must say
    ("", "run.yaml: expected a mapping with keys among base, requires, megatron_args"),
    (
        "megatron_args:\n  --a: 1\n  --a: 2\n",
        "run.yaml: line 3: expected YAML, got: the key '--a' for the second time.",
    ),
    ("base: !!python/name:os.system\n", "run.yaml: line 1: expected YAML"),
    ("moe_optin: {}\n", f"{MARK}, got 'moe_optin'. Write moe_optim, the closest of them."),
    (
        "requires: {torch: 2.11}\n",
        "requires: torch: expected a version specifier, got '2.11'. Write for example '>=2.11'.",
    ),
    (
        "megatron_args: {num_layers: 2}\n",
        "run.yaml: megatron_args: expected one of Megatron's flags with its leading dashes, got "
        "'num_layers'. Write --num-layers.",
    ),
    (
        "megatron_args: {--a: '${nothing}'}\n",
        "run.yaml: megatron_args.--a: expected an interpolation that resolves",
    ),
    ("moe_optim: {fromat: bf16}\n", "run.yaml: moe_optim: expected a key among"),
    (
        "moe_optim: {format: mxfp6}\n",
        f"run.yaml: moe_optim: format: expected {CHOICES}, got 'mxfp6'. Write mxfp8.",
    ),
    # Hostile ones
    ("megatron_args: {--a: !!python/object/apply:os.getcwd []}\n", "got: a tag"),
    (f"base: {'[' * 9000}{']' * 9000}\n", "values nested too deep"),
    ("megatron_args: {<<: {--a: 1}}\n", "expected YAML, got: a merge key (<<)"),
)


def test_a_file_is_refused_with_its_name_and_key_in_one_error(write):
    for text, message in REFUSED_FILES:
        with pytest.raises(ConfigError) as error:
            load_recipe(write(text))
        assert str(error.value).startswith("run.yaml: ")
        assert message in str(error.value)
        assert len(str(error.value)) < 1500


REFUSED_OVERRIDES = (
    ("--train-iters=20", "Write megatron_args.--train-iters=20."),
    ("format=bf16", "Write moe_optim.format=bf16."),
    ("moe_optim.format", "Write moe_optim.format=VALUE."),
    ("moe_optim=3", "Write moe_optim.KEY=3."),
    ('megatron_args.--a="\\0"', "--a: expected text that a command line can carry"),
    ("megatron_args.--a=[", "expected YAML"),
    (f"moe_optim.format={'[' * 9000}", "expected YAML"),
)


def test_an_override_is_refused_with_the_right_spelling(write):
    path = write("moe_optim:\n")
    for override, message in REFUSED_OVERRIDES:
        with pytest.raises(ConfigError) as error:
            load_recipe(path, [override])
        assert str(error.value).startswith(f"override '{override[:16]}")
        assert message in str(error.value)
        assert len(str(error.value)) < 1500


def test_only_regular_files_are_opened(write):
    """A pipe had been waited for, and /dev/zero read until memory ended."""
    os.mkfifo("pipe")
    Path("folder").mkdir()
    for kind in ("pipe", "folder", "/dev/zero"):
        write(f"base: {kind}\n")
        for path, remedy in (
            (kind, "Correct the path"),
            ("run.yaml", "Correct `base` in run.yaml"),
        ):
            with pytest.raises(ConfigError) as error:
                load_recipe(path)
            assert str(error.value) == (
                f"{kind}: expected a readable recipe, got: no regular file. {remedy}."
            )


def test_a_file_larger_than_any_recipe_is_not_parsed(write):
    path = write(f"# {'x' * MAX_BYTES}\n")
    with pytest.raises(ConfigError, match="got: more than 262,144 bytes"):
        load_recipe(path)
    assert load_recipe(write(f"# {'x' * (MAX_BYTES - 16)}\nmoe_optim:\n")).ranks == 1


def test_a_recipe_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"missing.yaml: no such recipe\. "):
        load_recipe("missing.yaml")
    for path in ("a\0b", "x" * 5000, tmp_path / "bytes", tmp_path / "loop"):
        with pytest.raises(ConfigError, match="expected a readable recipe, got: "):
            load_recipe(path)


def test_a_missing_base_names_the_recipe_that_asks_for_it(write):
    with pytest.raises(ConfigError, match=r"^gone.yaml: .*Correct `base` in .*run.yaml\.$"):
        load_recipe(write("base: gone.yaml\n"))
    with pytest.raises(ConfigError, match=r"Write `base: quickstart.yaml` in .*run.yaml, and run"):
        load_recipe(write("base: quickstart\n"))


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


def test_a_machine_without_gpus_lacks_any_capability(write, monkeypatch):
    monkeypatch.setattr(recipes, "find_gpus", lambda: ())
    assert unmet_requirements(load_recipe(write("requires: {sm: 90}\n"))) == [
        "gpus: expected 1 or more, got 0. Use a recipe for fewer, or a machine with more."
    ]
    (many,) = unmet_requirements(load_recipe(write("requires: {gpus: 256}\n")))
    command = "torchrun --nnodes 32 --nproc-per-node 8 --rdzv-backend c10d"
    assert f"start it on 32 machines with 8 GPUs, on each: {command}" in many
    assert many.endswith("moe-optim run --recipe run.yaml pretrain_gpt.py")


FORMAT_FLAGS = {  # format -> flag, and what it has to be for that format
    "mxfp8": ("--fp8-recipe", "mxfp8"),
    "nvfp4": ("--fp4-recipe", "nvfp4"),
    "fp8_block": ("--fp8-recipe", "blockwise"),
}


ENDS = {"nvfp4": ("nvfp4",), "fp8_block": ("fp8_block", "deepseek_v4_flash", "kimi_k2")}
"""Format -> ends of the names of its recipes; others are in MXFP8."""


def format_of(path):
    return next((name for name, ends in ENDS.items() if path.stem.endswith(ends)), "mxfp8")


def test_a_recipe_of_a_model_says_that_it_was_not_run_and_can_be_planned():
    """Its ranks are a number of GPUs that holds the model; its format is that of its flags."""
    for path in MODELS:
        recipe = load_recipe(path)
        assert "# NOT RUN" in path.read_text().partition("\nbase:")[0].partition("\nrequires:")[0]
        assert recipe.requires["gpus"] == recipe.ranks
        flag, value = FORMAT_FLAGS[format_of(path)]
        assert recipe.megatron_args[flag] == value
        grouped = "--moe-single-grouped-weight" in recipe.megatron_args
        layout = "grouped" if grouped else "indexed"
        assert recipe.moe_optim == MoEOptimConfig(expert_layout=layout)
        experts = plan_experts(recipe.megatron_argv(), grouped=grouped)
        assert experts.expert_dp_size(recipe.ranks) >= 1
        assert format_of(path) not in left_out(experts)


def test_formats_of_a_model_train_the_same_model():
    """What differs is not the model: numbers of layers, heads and experts, routing, positions."""
    whats = ("--num-", "--hidden-", "--ffn-", "--moe-ffn-", "--moe-router-", "--rotary-", "--norm")
    own = ("--moe-router-padding-for-quantization", "--num-layers-per-virtual-pipeline-stage")

    @cache
    def model(path):
        args = load_recipe(path).megatron_args
        return {k: v for k, v in args.items() if k.startswith(whats) and k not in own and v}

    for path in MODELS:
        base = path.with_stem(path.stem.removesuffix(f"_{format_of(path)}"))
        assert model(path) == model(base)


def _list_faults_with_transformer_engine():
    """Return what the preflight finds wrong with each recipe, as if its kernels were here."""
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils
    from megatron.training.arguments import parse_and_validate_args
    from packaging.version import Version

    from moe_optim.commands.train.pretrain import refuse_unsupported
    from moe_optim.integration import cpu_runtime, script_arguments
    from moe_optim.integration.arguments import add_moe_optim_arguments
    from moe_optim.integration.preflight import list_faults

    cpu_runtime.install()
    utils._te_version = Version("2.20.2")
    script_arguments.import_error = lambda: None
    for module in (rope_utils, moe_utils):
        for name, value in vars(module).items():
            if name.startswith("fused_") and value is None:
                setattr(module, name, print)  # never called
    parse = partial(parse_and_validate_args, extra_args_provider=add_moe_optim_arguments)
    found = {}
    for path in MODELS:
        recipe = load_recipe(path)
        os.environ["WORLD_SIZE"] = str(recipe.ranks)
        argv = [*recipe.megatron_argv(), "--use-moe-grouped-optim"]
        is_overlapped = "--overlap-moe-expert-parallel-comm" in argv
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32" if is_overlapped else "1"
        sys.argv = ["script", *argv]
        found[path.stem] = list_faults(parse, argv, refuse_unsupported)
    return found


def test_megatron_and_the_plug_in_refuse_no_recipe_of_a_model():
    """At their ranks and sizes, by all checks that are made of arguments and configurations."""
    assert run_ranks(1, _list_faults_with_transformer_engine)[0] == {
        path.stem: [] for path in MODELS
    }
