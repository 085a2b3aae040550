"""What published recipes set is found without a GPU, and asked of the plug-in's own checks."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tools.upstream.stand_in_imports import find_bridge

MADE_UP = {
    "training/config.py": """
from dataclasses import dataclass, field
from typing import Any
import modelopt.torch.opt
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.bridge.models import GPTModelProvider
from megatron.bridge.training.utils.absent_here import Settings

@dataclass
class ConfigContainer:
    model: GPTModelProvider | None
    mixed_precision: Any
    optimizer: Any = field(default_factory=lambda: OptimizerConfig(use_distributed_optimizer=True))
    ddp: Any = field(default_factory=DistributedDataParallelConfig)
    dist: Any = field(default_factory=Settings)
    comm_overlap: Any = None
""",
    "training/mixed_precision.py": """
class Precision:
    def __init__(self, recipe):
        self.recipe = recipe

    def setup(self, model, optimizer, ddp):
        model.fp8, model.fp8_recipe, model.fp8_param = "e4m3", self.recipe, True

def get_mixed_precision_config(name):
    return Precision(name)
""",
    "recipes/base.py": """
from transformers import AutoConfig
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer

def base_config():
    hub = AutoBridge.from_hf_pretrained("made/up", config=AutoConfig.from_pretrained("made/up"))
    model = hub.to_megatron_provider(load_weights=False)
    assert model.qk_clip is False and model.vocab_size > 0 and not model.of_another_megatron
    return ConfigContainer(model, "mxfp8")
""",
    "perf_recipes/made_up/gb200/a.py": """
import os
from megatron.bridge.recipes.base import base_config

def plain_config():
    return base_config()

def sharded_config():
    config = base_config()
    config.dist.use_megatron_fsdp = True
    config.ddp.nccl_ub = True
    return config

def per_tensor_config():
    config = base_config()
    config.mixed_precision = "tensorwise"
    return config

def broken_config():
    return open(os.path.join(os.path.dirname(__file__), "absent.cfg"))

def _private_config():
    raise AssertionError
""",
    "perf_recipes/made_up/gb200/b.py": "raise ValueError('wants a GPU')",
    "perf_recipes/other_family/gb200/c.py": "raise AssertionError",
}


def _write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def _read_bridge(folder: Path, families: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return answers by name, and modules left behind, in a process of its own."""
    import sys

    from tools.upstream.published_recipes import bridge_answers

    sys.path.insert(0, str(folder))  # where transformers is installed
    before = set(sys.modules)
    answers = {one.name: one for one in bridge_answers(folder, families)}
    foreign = {"transformers", "modelopt", "megatron.bridge"}
    return answers, sorted(foreign & (set(sys.modules) - before))


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    package = {f"megatron/bridge/{name}": text for name, text in MADE_UP.items()}
    folders = {parent for name in package for parent in Path(name).parents[:-2]}
    package |= {str(folder / "__init__.py"): "" for folder in folders}
    package["transformers.py"] = "raise AssertionError('it would ask the network')"
    folder = _write(tmp_path_factory.mktemp("bridge"), package)
    return run_ranks(1, _read_bridge, folder, ["made_up"])[0]


def test_recipes_are_run_without_what_their_modules_import(made_up):
    """Functions of one file each, of the families asked for, and none that is private or imported;
    what a recipe leaves alone is Megatron's default."""
    answers, left_behind = made_up
    own = {"plain_config", "sharded_config", "per_tensor_config", "broken_config"}
    assert set(answers) == own | {"megatron.bridge.perf_recipes.made_up.gb200.b"}
    assert answers["plain_config"].kept == "mxfp8"
    assert not left_behind


def test_all_that_is_refused_of_a_recipe_is_named_at_once(made_up):
    answers, _ = made_up
    assert answers["plain_config"].refused == ()
    refused = ("--use-megatron-fsdp", "--use-nccl-ub with quantized weights")
    assert answers["sharded_config"].refused == refused
    assert answers["per_tensor_config"].kept == "tensorwise"
    assert answers["per_tensor_config"].refused == ()


def test_a_recipe_that_cannot_be_read_hides_no_other(made_up):
    answers, _ = made_up
    assert "FileNotFoundError" in answers["broken_config"].unread
    unread = answers["megatron.bridge.perf_recipes.made_up.gb200.b"].unread
    assert unread == "ValueError: wants a GPU"


ARGS = """
DEPENDENCIES: {image: made/up}
ARGS:
  bf16: true
  no_save_optim: true
  num_experts: 8
  moe_grouped_gemm: true
  use_distributed_optimizer: true
  transformer_impl: transformer_engine
  experimental_attention_variant: of_another_megatron
  chunked_state_of_another_megatron: true
  fp8_format: e4m3
"""
EXAMPLES = {
    "a/h100/blockwise.yaml": f"{ARGS}  fp8_recipe: blockwise\n  fp8_param_gather: true\n",
    "a/gb200/sgd.yaml": f"{ARGS}  fp8_recipe: mxfp8\n  fp8_param_gather: true\n  optimizer: sgd\n",
    "b/gb200/gathers_bf16.yaml": f"{ARGS}  fp8_recipe: mxfp8\n  fp8_param_gather: false\n",
    "b/gb200/broken.yaml": "no arguments",
}
FUNCTIONAL_TESTS = {
    "moe/trains/model_config.yaml": "MODEL_ARGS: {--num-experts: 8, --train-iters: 50}",
    "moe/shards/model_config.yaml": "MODEL_ARGS: {--num-experts: 8, --train-samples: 9, "
    "--use-megatron-fsdp: true}",
    "moe/serves/model_config.yaml": "MODEL_ARGS: {--num-experts: 8}",
    "gpt/dense/model_config.yaml": "MODEL_ARGS: {--train-iters: 50}",
    "gpt/stages/model_config.yaml": "MODEL_ARGS:",
}


def _read_megatron_lm(checkout: Path, report: Path) -> tuple[int, str]:
    import contextlib
    import io

    from tools.upstream.published_recipes import main

    os.environ.pop("MEGATRON_BRIDGE_PATH", None)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main(["--megatron-lm", str(checkout), "--json", str(report)])
    return status, printed.getvalue()


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict[str, Any]]:
    """Exit status, what is printed, and the report by name."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    _write(folder / "examples/moe_recipes", EXAMPLES)
    _write(folder / "tests/functional_tests/test_cases", FUNCTIONAL_TESTS)
    status, printed = run_ranks(1, _read_megatron_lm, folder, folder / "report.json")[0]
    report = {
        one["name"]: one for one in json.loads((folder / "report.json").read_text())["recipes"]
    }
    return status, printed, report


def test_arguments_of_another_megatron_are_passed_over(examples):
    """Flags, and values of flags, that the installed one does not take."""
    _, _, report = examples
    examples = [one for one in report.values() if one["source"] == "Megatron-LM"]
    kept = {one["name"]: one["kept"] for one in examples if not one["unread"]}
    assert kept == {
        "a/h100/blockwise": "blockwise",
        "a/gb200/sgd": "mxfp8",
        "b/gb200/gathers_bf16": "bf16",
    }


def test_counts_are_of_what_passes_is_refused_and_is_unread(examples):
    status, printed, report = examples
    assert status == 1  # one is unread
    assert report["a/h100/blockwise"]["refused"] == []
    assert report["a/gb200/sgd"]["refused"] == ["--optimizer sgd (give adam)"]
    assert report["b/gb200/broken"]["unread"]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines()]
    for kept, counts in {"blockwise": "1100", "mxfp8": "1010", "unknown": "1001"}.items():
        assert ["Megatron-LM", kept, *counts] in rows


def test_command_lines_of_functional_tests_that_train_experts_are_asked(examples):
    """With the plug-in's flag added, which implies that of Megatron's distributed optimizer."""
    _, _, report = examples
    source = "Megatron-LM's functional tests"
    refused = {name: one["refused"] for name, one in report.items() if one["source"] == source}
    assert refused == {"moe/trains": [], "moe/shards": ["--use-megatron-fsdp"]}


def _graph_settings() -> list[str]:
    from tools.upstream.published_recipes import full_iteration

    asked = [("local", "full_iteration"), ("local", ["attn"]), ("transformer_engine", None)]
    return [full_iteration(*one) for one in [*asked, (None, None), ("full_iteration", [])]]


def test_scopes_of_old_ask_for_whole_iterations():
    settled = ["full_iteration", "local", "transformer_engine", "none", "full_iteration"]
    assert run_ranks(1, _graph_settings)[0] == settled


# What launches Megatron elsewhere

LAUNCHES = {
    "scripts/models/made_up.sh": """
MODEL_ARGS=(
   --num-experts 8 --moe-grouped-gemm
)
""",
    "scripts/run.sh": """
SCRIPT_DIR="$(dirname "$0")"
source "${SCRIPT_DIR}/models/made_up.sh"
OPTIMIZER_ARGS=(
   --optimizer adam  # as everywhere
   #--optimizer sgd
   --lr=1e-6
   --of-this-launcher-alone $(seq 1 2) "${NAME}" \\
   --optimizer-cpu-offload
   --use-precision-aware-optimizer
)
ray job submit -- python3 train.py "${MODEL_ARGS[@]}" "${OPTIMIZER_ARGS[@]}"
""",
    "scripts/muon.sh": """
source models/made_up.sh
ARGS=(--optimizer dist_muon --optimizer-offload-fraction ${FRACTION})
""",
    "scripts/dense.sh": "ARGS=(--optimizer adam --num-layers 2)\n",
    "tests/recorded/run.txt": """### 0
ray stop
### 1
python3 /repo/train.py
  --num-experts 8
  --optimizer adam
  --fp8-recipe blockwise --fp8-format e4m3
### 2
python3 /repo/train.py --num-layers 2 --optimizer adam
""",
}


def _read_launches(checkout: Path) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return answers by name, and the flags of one script."""
    from tools.upstream.launches import find_launches
    from tools.upstream.published_recipes import launch_answers

    answers = {one.name: one for one in launch_answers(checkout)}
    return answers, dict(find_launches(checkout))["scripts/run.sh"]


def test_scripts_and_recorded_command_lines_are_asked_without_running_them(tmp_path):
    """Of models with experts: what is sourced counts, what stands in comments does not."""
    folder = _write(tmp_path / "launcher", LAUNCHES)
    answers, flags = run_ranks(1, _read_launches, folder)[0]
    assert set(answers) == {"scripts/run.sh", "scripts/muon.sh", "tests/recorded/run.txt"}
    assert {one.source for one in answers.values()} == {"launcher"}
    assert not any(one.unread for one in answers.values())
    assert answers["scripts/run.sh"].refused == answers["tests/recorded/run.txt"].refused == ()
    assert answers["scripts/muon.sh"].refused == ("--optimizer dist_muon (give adam)",)
    assert flags == {
        "--num-experts": ["8"],
        "--moe-grouped-gemm": [],
        "--optimizer": ["adam"],
        "--lr": ["1e-6"],
        "--of-this-launcher-alone": ["$(seq", "1", "2)", "${NAME}"],
        "--optimizer-cpu-offload": [],
        "--use-precision-aware-optimizer": [],
    }


# The published ones

BRIDGE = find_bridge()
MEGATRON_LM = os.environ.get("MEGATRON_LM_PATH", "")
DOCUMENT = Path(__file__).parents[2] / "docs/megatron-bridge.md"
NARROW = {"mxfp8", "nvfp4", "blockwise"}


def _undocumented(answers: Iterable[Any]) -> dict[str, tuple[str, ...]]:
    """Return the recipes of quantized weights with a refusal that the document does not name."""
    document = DOCUMENT.read_text(encoding="utf-8")
    narrow = {one.name: one.refused for one in answers if one.kept in NARROW}
    assert narrow
    return {
        name: refused
        for name, refused in narrow.items()
        if not all(flag.partition(" (")[0] in document for flag in refused)
    }


@pytest.mark.skipif(BRIDGE is None, reason="MEGATRON_BRIDGE_PATH names no Megatron-Bridge")
def test_recipes_of_megatron_bridge_are_refused_for_what_is_documented():
    from tools.upstream.published_recipes import FAMILIES

    answers, _ = run_ranks(1, _read_bridge, BRIDGE, list(FAMILIES))[0]
    assert all("te_quant.cfg" in one.unread for one in answers.values() if one.unread)  # not in it
    assert not _undocumented(answers.values())


def _megatron_lm_answers() -> list[Any]:
    from tools.upstream.published_recipes import megatron_lm_answers

    return megatron_lm_answers(Path(MEGATRON_LM))


@pytest.mark.skipif(not MEGATRON_LM, reason="MEGATRON_LM_PATH names no Megatron-LM")
def test_all_recipes_of_megatron_lm_pass():
    answers = run_ranks(1, _megatron_lm_answers)[0]
    assert answers
    assert not any(one.refused or one.unread for one in answers)
