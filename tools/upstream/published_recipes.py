"""Reports which published recipes pass the checks of moe_optim, and which flags others fail on.

    python -m tools.upstream.published_recipes [--bridge PATH] [--megatron-lm PATH]
        [--launches PATH ...] [--json FILE] [--totals FILE]

``--bridge`` is a folder with the unpacked package ``megatron/bridge``, by default
``MEGATRON_BRIDGE_PATH``; ``--megatron-lm`` a checkout with ``examples/moe_recipes`` and
``tests/functional_tests``, by default ``MEGATRON_LM_PATH``; ``--launches`` checkouts of projects
that launch Megatron, such as slime and miles, named by their folders. Builds nothing, and needs
neither a GPU nor Transformer Engine. The knob ``format`` is the recipe's format, or ``auto`` if
that is not one of ours. Exit status: 1 if a recipe could not be read.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.arguments import add_megatron_arguments
from rich.console import Console
from rich.table import Table

from moe_optim.commands.console.provenance import commit
from moe_optim.config import MoEOptimConfig
from moe_optim.integration.arguments import extend_distributed_optimizer
from moe_optim.rules import Setup, refusals
from tools.upstream.launches import find_launches
from tools.upstream.stand_in_imports import StandIn, find_bridge, standing_in

FAMILIES = ("deepseek", "glm_moe_dsa", "gpt_oss", "kimi", "nemotronh", "qwen", "qwen_vl")
"""Families of ``perf_recipes`` with experts."""

BRIDGE = "megatron.bridge"
REAL = tuple(
    f"{BRIDGE}.{name}"
    for name in (
        "data.base",
        "perf_recipes",
        "recipes",
        "training.comm_overlap",
        "training.config",
        "training.flex_dispatcher_backend",
        "training.mixed_precision",
        "training.utils.config_utils",
        "utils.cuda_graph",
    )
)
"""Modules of Megatron-Bridge that define settings of recipes."""

STATES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}
"""Dtype of optimizer states in flags -> torch dtype."""

FORMATS = {"mxfp8": "mxfp8", "blockwise": "fp8_block", "nvfp4": "nvfp4"}
"""Recipe of Transformer Engine -> knob ``format``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    source: str
    family: str
    name: str
    kept: str = ""
    """Format of weights between steps: a recipe of Transformer Engine, or bf16."""
    refused: tuple[str, ...] = ()
    unread: str = ""


# Configurations


def settled(cls: type, values: Mapping[str, Any]) -> Any:
    """Return a configuration with ``values`` for its fields, without Megatron's checks.

    The checks require its versions, GPUs and Transformer Engine.
    """
    made = object.__new__(cls)
    for field in dataclasses.fields(cls):
        missing = field.default_factory is dataclasses.MISSING
        made.__dict__[field.name] = field.default if missing else field.default_factory()
    known = {field.name for field in dataclasses.fields(cls)}
    made.__dict__.update({name: value for name, value in values.items() if name in known})
    return made


def full_iteration(impl: str | None, scope: Any) -> str:
    """Return ``cuda_graph_impl`` as Megatron derives it from the deprecated scope."""
    scopes = scope if isinstance(scope, list) else [scope]
    names = {getattr(one, "name", one) for one in scopes}
    return "full_iteration" if impl == "local" and "full_iteration" in names else impl or "none"


def kept_in(model: Any) -> str:
    if model.fp8 and model.fp8_param:
        return str(getattr(model.fp8_recipe, "value", model.fp8_recipe))
    return str(model.fp4_recipe) if model.fp4 and model.fp4_param else "bf16"


def judge(optimizer: Any, ddp: Any, model: Any, **identity: str) -> Answer:
    kept = kept_in(model)
    config = MoEOptimConfig(format=FORMATS.get(kept, "auto"))
    lines = refusals(Setup.of_flags(config, optimizer, ddp, [model]))
    refused = tuple(line.partition(": ")[0] for line in lines)
    return Answer(**identity, kept=kept, refused=refused)


def answered(read: Callable[[], tuple[Any, Any, Any]], **identity: str) -> Answer:
    """Judge the result of ``read``, or record why it failed."""
    try:
        return judge(*read(), **identity)
    except Exception as error:  # one broken recipe must not hide the others
        return Answer(**identity, unread=f"{type(error).__name__}: {error}")


# Megatron-Bridge


def bridge_answers(folder: Path, families: Sequence[str] = FAMILIES) -> list[Answer]:
    """Return the results for every recipe of some families of ``perf_recipes``."""

    class Model(StandIn):
        """A model provider; unset fields are Megatron's defaults."""

        UNSET = {**vars(settled(MLATransformerConfig, {})), "vocab_size": 131072}

    class FromHub(StandIn):
        """A converter, which would download the model's configuration."""

        def __getattr__(self, name: str) -> Any:
            return Model

    bases = {"AutoBridge": FromHub, f"{BRIDGE}.models": Model}
    with standing_in(folder, BRIDGE, REAL, bases, hidden={"transformers"}):  # it would download
        return [answer for family in families for answer in _family(folder, family)]


def _family(folder: Path, family: str) -> Iterator[Answer]:
    root = folder / BRIDGE.replace(".", "/") / "perf_recipes" / family
    for path in sorted(root.glob("*/*.py")):
        if path.name == "__init__.py":
            continue
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        identity = {"source": "Megatron-Bridge", "family": family}
        try:
            recipes = _recipes_in(importlib.import_module(module))
        except Exception as error:  # one broken file must not hide the others
            yield Answer(**identity, name=module, unread=f"{type(error).__name__}: {error}")
            continue
        for name, recipe in recipes.items():
            yield answered(lambda recipe=recipe: _settle_bridge(recipe()), **identity, name=name)


def _recipes_in(module: Any) -> dict[str, Callable[[], Any]]:
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and name.endswith("_config")
        and not name.startswith("_")
    }


def _settle_bridge(config: Any) -> tuple[Any, Any, Any]:
    """Return optimizer, DDP and model configurations as Megatron-Bridge would pass them."""
    mixed = config.mixed_precision
    if isinstance(mixed, str):
        precision = importlib.import_module(f"{BRIDGE}.training.mixed_precision")
        mixed = precision.get_mixed_precision_config(mixed)
    if mixed is not None:
        mixed.setup(config.model, config.optimizer, config.ddp)
    model, optimizer, ddp = config.model, config.optimizer, config.ddp
    ddp.use_megatron_fsdp = ddp.use_megatron_fsdp or config.dist.use_megatron_fsdp
    optimizer.use_distributed_optimizer |= ddp.use_distributed_optimizer
    extend_distributed_optimizer(optimizer)  # as MoEOptimizerConfig.finalize
    model.cuda_graph_impl = full_iteration(model.cuda_graph_impl, model.cuda_graph_scope)
    overlap = config.comm_overlap
    if overlap is not None and overlap.overlap_param_gather_with_optimizer_step:
        optimizer.overlap_param_gather_with_optimizer_step = True
    return optimizer, ddp, model


# Megatron-LM


TRAINING = {"--train-iters", "--train-samples"}


def megatron_lm_answers(checkout: Path) -> list[Answer]:
    """Return the results for every file of ``examples/moe_recipes``."""
    folder = checkout / "examples/moe_recipes"
    return [
        answered(
            lambda path=path: _settle_arguments(_read_yaml(path)["ARGS"]),
            source="Megatron-LM",
            family=path.relative_to(folder).parts[0],
            name=str(path.relative_to(folder).with_suffix("")),
        )
        for path in sorted(folder.rglob("*.yaml"))
    ]


def functional_test_answers(checkout: Path) -> list[Answer]:
    """Return the results for every file of ``tests/functional_tests`` that trains experts."""
    folder = checkout / "tests/functional_tests/test_cases"
    paths = sorted(folder.rglob("model_config.yaml"))
    found = {path: _read_yaml(path).get("MODEL_ARGS") or {} for path in paths}
    return [
        answered(
            lambda flags=flags: _settle_arguments(_without_dashes(flags)),
            source="Megatron-LM's functional tests",
            family=path.relative_to(folder).parts[0],
            name=str(path.parent.relative_to(folder)),
        )
        for path, flags in found.items()
        if flags.get("--num-experts") and not TRAINING.isdisjoint(flags)
    ]


def _without_dashes(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {flag.removeprefix("--"): value for flag, value in flags.items()}


def _read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _settle_arguments(given: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return optimizer, DDP and model configurations for arguments, with the plug-in enabled."""
    values = _arguments({**given, "use_distributed_optimizer": True})  # implied
    values |= {
        "cuda_graph_impl": full_iteration(values["cuda_graph_impl"], given.get("cuda_graph_scope")),
        "fp8_param": values["fp8_param_gather"],
        "fp4_param": values["fp4_param_gather"],
        "num_moe_experts": values["num_experts"],
    }
    kinds = (OptimizerConfig, DistributedDataParallelConfig, MLATransformerConfig)
    optimizer, ddp, model = (settled(kind, values) for kind in kinds)
    extend_distributed_optimizer(optimizer)
    return optimizer, ddp, model


# Launch scripts of other projects

OF_LAUNCHERS = {"bf16": True}
"""Arguments that slime and miles set by default."""


def launch_answers(checkout: Path) -> list[Answer]:
    """Return the results for every script and recorded command line of a checkout."""
    return [
        answered(
            lambda flags=flags: _settle_launch(flags),
            source=checkout.name,
            family=Path(name).parts[0],
            name=name,
        )
        for name, flags in find_launches(checkout)
    ]


def _settle_launch(flags: Mapping[str, Sequence[str]]) -> tuple[Any, Any, Any]:
    parser = _megatron_parser()
    given: dict[str, Any] = dict(OF_LAUNCHERS)
    for flag, words in flags.items():
        action = parser._option_string_actions.get(flag)
        if action is not None and (words or action.nargs == 0):
            given[flag.removeprefix("--")] = _typed(action, words) if action.nargs != 0 else True
    return _settle_arguments(given)


def _typed(action: argparse.Action, words: Sequence[str]) -> Any:
    """Return the parsed value of the words; a shell variable stays text."""
    make: Any = action.type or str
    try:
        values = [make(word) for word in words]
    except (ValueError, TypeError):
        values = list(words)
    return values if action.nargs in ("+", "*") else values[0]


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's arguments with the values of a file, under their parsed names.

    They are not parsed, because examples of other Megatron versions contain values that the
    installed parser rejects. Unknown flags are ignored.
    """
    parser = _megatron_parser()
    found = {action.dest: action.default for action in parser._actions}
    for name, value in given.items():
        action = parser._option_string_actions.get(f"--{name.replace('_', '-')}")
        if action is None or value is None or value is False:
            continue
        found[action.dest] = action.const if value is True and action.nargs == 0 else value
    dtypes = {name: DTYPES[found[name]] for name in found if name in STATES and found[name]}
    return found | dtypes


@cache
def _megatron_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = add_megatron_arguments(argparse.ArgumentParser())
    return parser


# Output


@dataclasses.dataclass(frozen=True, kw_only=True)
class Total:
    """Summary of the recipes of one source in one format."""

    source: str
    kept: str
    recipes: int
    passing: int
    unread: int
    settings: Mapping[str, int]
    """Refused setting, without its explanation -> number of recipes."""

    @property
    def refused(self) -> int:
        return self.recipes - self.passing - self.unread


def totals(answers: Iterable[Answer]) -> list[Total]:
    kinds: dict[tuple[str, str], list[Answer]] = {}
    for one in answers:
        kinds.setdefault((one.source, one.kept), []).append(one)
    return [
        Total(
            source=source,
            kept=kept or "unknown",
            recipes=len(found),
            passing=sum(not (one.refused or one.unread) for one in found),
            unread=sum(bool(one.unread) for one in found),
            settings=_counted(flag for one in found for flag in one.refused),
        )
        for (source, kept), found in sorted(kinds.items())
    ]


def _counted(flags: Iterable[str]) -> dict[str, int]:
    """Return refused flag, without its explanation -> count, most frequent first."""
    return dict(Counter(flag.partition(" (")[0] for flag in flags).most_common())


def show(answers: Sequence[Answer], console: Console) -> None:
    table = Table(title="Published recipes with --use-moe-grouped-optim")
    for column in ("source", "weights kept in"):
        table.add_column(column)
    for column in ("recipes", "pass", "refused", "unread"):
        table.add_column(column, justify="right")
    reasons = Table("source", "weights kept in", "refused", title="By what is refused")
    reasons.add_column("recipes", justify="right")
    for one in totals(answers):
        counts = [one.recipes, one.passing, one.refused, one.unread]
        table.add_row(one.source, one.kept, *map(str, counts))
        for flag, count in one.settings.items():
            reasons.add_row(one.source, one.kept, flag, str(count))
    console.print(table)
    console.print(reasons)
    for answer in answers:
        if answer.unread:
            console.print(f"unread: {answer.name}: {answer.unread}", markup=False)


def versions(bridge: Path | None, checkouts: Mapping[str, Path]) -> dict[str, str | None]:
    found: dict[str, str | None] = {"megatron-core": importlib.metadata.version("megatron-core")}
    if bridge:
        infos = bridge.glob("megatron_bridge-*.dist-info")
        names = [path.name.removesuffix(".dist-info").partition("-")[2] for path in infos]
        found["megatron-bridge"] = next(iter(names), None)
    for name, checkout in checkouts.items():
        asked = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
        said = subprocess.run(asked, capture_output=True, text=True, check=False)
        found[name] = said.stdout.strip() or None
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.upstream.published_recipes")
    parser.add_argument("--bridge", type=Path, default=find_bridge())
    parser.add_argument("--megatron-lm", type=Path, default=os.environ.get("MEGATRON_LM_PATH"))
    parser.add_argument("--launches", type=Path, nargs="+", default=[], metavar="PATH")
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--totals", type=Path, help="as --json, without the recipes")
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    found: dict[Path, list[Answer]] = {}
    if args.megatron_lm:
        of_examples = megatron_lm_answers(args.megatron_lm)
        found[args.megatron_lm] = of_examples + functional_test_answers(args.megatron_lm)
    if args.bridge:
        found[args.bridge] = bridge_answers(args.bridge, args.families)
    found |= {checkout: launch_answers(checkout) for checkout in args.launches}
    empty = [str(folder) for folder, its in found.items() if not its]
    if empty or not found:
        names = ", ".join(empty) or "--bridge, --megatron-lm or --launches"
        parser.error(f"expected recipes below {names}, got none")
    answers = [answer for its in found.values() for answer in its]
    checkouts = {"Megatron-LM": args.megatron_lm} if args.megatron_lm else {}
    checkouts |= {checkout.name: checkout for checkout in args.launches}
    show(answers, Console(width=140, soft_wrap=True))
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "tools.upstream.published_recipes", *words]),
        "commit": commit(),
        "versions": versions(args.bridge, checkouts),
        "totals": [dataclasses.asdict(one) for one in totals(answers)],
    }
    recipes = {"recipes": [dataclasses.asdict(one) for one in answers]}
    for path, content in ((args.totals, report), (args.json, report | recipes)):
        if path:
            path.write_text(json.dumps(content, indent=1) + "\n")
    return int(any(one.unread for one in answers))


if __name__ == "__main__":
    sys.exit(main())
