"""Recipes: YAML files that define one run by requirements, Megatron's flags and our config."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from moe_optim.config import MoEOptimConfig, check_key, field_names
from moe_optim.config.recipe_yaml import MAX_BYTES, merge, parse_yaml
from moe_optim.environment import find_gpus, unmet_version
from moe_optim.errors import ConfigError, closest, quote, shorten

Scalar = bool | int | float | str | None
Value = Scalar | list[Scalar]
"""Value of a flag: bare flag (true), absent (false, null), one value, or several."""

SECTIONS = ("requires", "megatron_args", "moe_optim")
KEYS = ("base", *SECTIONS)
VERSIONS = ("python", "torch", "megatron-core", "transformer-engine", "apex")
COUNTS = ("sm", "gpus", "ranks")
FOLDER = Path(__file__).with_name("recipe_files")
"""Folder of the shipped recipes; in a checkout, a link to ``recipes/``."""
_MAX_COUNT = 1_000_000
_GPUS_OF_A_NODE = 8
_NO_WORD = re.compile("[\0\ud800-\udfff]")  # characters that no command line can carry


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A resolved recipe: bases merged, overrides applied, interpolations replaced."""

    path: Path
    """Path of its file."""
    files: tuple[Path, ...]
    """Its file and those of its bases, the first base first."""
    requires: Mapping[str, str | int]
    """Version specifiers and minimum counts; always contains ``ranks``."""
    megatron_args: Mapping[str, Value]
    """Megatron's flags, spelled as on its command line."""
    moe_optim: MoEOptimConfig
    """Configuration of this package."""

    @property
    def ranks(self) -> int:
        """Number of processes to launch."""
        return int(self.requires["ranks"])

    def megatron_argv(self) -> list[str]:
        """Return the command line for Megatron's parser, values spelled as in the file."""
        argv: list[str] = []
        for flag, value in self.megatron_args.items():
            if value is None or value is False:
                continue
            values = value if isinstance(value, list) else [] if value is True else [value]
            texts = [str(item) for item in values]
            if len(texts) == 1 and texts[0].startswith("-"):  # argparse would parse -1e-3 as a flag
                argv.append(f"{flag}={texts[0]}")
            else:
                argv += [flag, *texts]
        return argv


def shipped_recipes() -> Mapping[str, Path]:
    """Return name and file of every shipped recipe, sorted."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def find_recipe(recipe: str | Path) -> Path:
    """Return the file for ``recipe``, an existing path or else the name of a shipped recipe.

    Anything else is returned as a path.
    """
    shipped = shipped_recipes().get(str(recipe))
    return shipped if shipped and not Path(recipe).is_file() else Path(recipe)


def suggest_shipped(wrong: str | Path) -> str:
    """Return a question after the recipe that ``wrong`` is close to, else all names."""
    shipped = shipped_recipes()
    meant = closest(Path(wrong).stem, shipped)
    if meant:
        return f"Did you mean {meant}?"
    if Path(wrong).suffix or Path(wrong).name != str(wrong):
        return "Correct the path, or name a recipe that `moe-optim recipes` lists."
    return f"Shipped recipes: {', '.join(shipped)}."


def load_recipe(path: str | Path | None, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe and its bases; None for a recipe of overrides alone.

    Values of ``${oc.env:NAME}`` become ordinary flag values, which Megatron writes into logs,
    TensorBoard events and checkpoints; do not use it for secrets.

    Args:
        path: YAML file or, if no such file exists, name of a shipped recipe; None for no file.
        overrides: assignments such as ``moe_optim.format=bf16`` or
            ``megatron_args.--train-iters=20``; the last one wins.

    Raises:
        ConfigError: recipe or override is invalid; names file, key and expected value.
    """
    files = {} if path is None else _read_layers(find_recipe(path))
    path = Path("command line") if path is None else find_recipe(path)
    assignments = list(overrides)
    empty: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    layers = [empty, *files.values(), *map(_parse_override, assignments)]
    where = str(path)
    if assignments:
        where += f" with {' '.join(map(shorten, assignments))}"
    merged = merge(where, *layers)
    for flag, value in merged["megatron_args"].items():  # again: interpolations may have any value
        _check_flag(f"{where}: megatron_args", flag, value)
    return Recipe(
        path=path,
        files=tuple(files),
        requires=MappingProxyType(_checked_requires(where, merged["requires"])),
        megatron_args=MappingProxyType(merged["megatron_args"]),
        moe_optim=MoEOptimConfig.from_mapping(merged["moe_optim"], f"{where}: moe_optim"),
    )


def unmet_requirements(recipe: Recipe, *, hardware: bool = True) -> list[str]:
    """Return one line, with a remedy, per requirement that this machine does not meet.

    Args:
        recipe: recipe to check, except for its ``ranks``.
        hardware: whether to check GPUs; False for a launcher's ranks, possibly on other machines.
    """
    requires = recipe.requires
    versions = {name: str(requires[name]) for name in VERSIONS if name in requires}
    unmet = [problem for each in versions.items() if (problem := unmet_version(*each))]
    if hardware and ("gpus" in requires or "sm" in requires):
        unmet += _unmet_hardware(recipe)
    return unmet


def check_requirements(recipe: Recipe, *, hardware: bool = True) -> None:
    """Raise ConfigError for requirements of ``recipe`` that this machine does not meet.

    Lists all of them; see :func:`unmet_requirements` for ``hardware``.
    """
    if unmet := unmet_requirements(recipe, hardware=hardware):
        lines = "".join(f"\n  {line}" for line in unmet)
        raise ConfigError(f"{recipe.path}: requires: expected more than this machine has.{lines}")


def _read_layers(path: Path) -> dict[Path, dict[str, dict[str, Any]]]:
    chain: list[Path] = []
    layers = []
    remedy = "Correct the path."
    if not os.path.lexists(path):
        remedy = suggest_shipped(path)
    step: Path | None = path
    while step is not None:
        text = _read_text(step, remedy)
        if any(step.samefile(above) for above in chain):
            shown = " -> ".join(map(str, [*chain, step]))
            raise ConfigError(
                f"{chain[-1]}: base: expected a recipe that does not lead back to itself, got "
                f"{shown}. Remove one `base`."
            )
        layer, base = _read_layer(str(step), text)
        chain.append(step)
        layers.append(layer)
        remedy = f"Correct `base` in {step}."
        if base in shipped_recipes():
            remedy = (
                f"Write `base: {base}.yaml` in {step}, and run `moe-optim recipes copy {base}` in "
                "its folder."
            )
        step = step.parent / base if base else None
    return dict(zip(chain[::-1], layers[::-1], strict=True))


def _read_layer(where: str, text: str) -> tuple[dict[str, dict[str, Any]], str | None]:
    recipe = parse_yaml(where, text)
    if not isinstance(recipe, dict):
        raise ConfigError(
            f"{where}: expected a mapping with keys among {', '.join(KEYS)}, got {_kind(recipe)}. "
            "Start from recipes/quickstart.yaml."
        )
    for key in recipe:
        check_key(where, key, KEYS)
    base = recipe.get("base")
    if not isinstance(base, str | None):
        raise ConfigError(
            f"{where}: base: expected the path of a recipe, got {_kind(base)}. "
            f"Write for example quickstart.yaml, or remove `base`."
        )
    return {section: _checked_section(where, section, recipe) for section in SECTIONS}, base


def _read_text(path: Path, remedy: str) -> str:
    try:
        if path.exists() and not path.is_file():
            why = "no regular file"
        else:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) <= MAX_BYTES:
                return data.decode("utf-8")
            why = f"more than {MAX_BYTES:,} bytes"
    except UnicodeDecodeError:
        why = "not UTF-8 text"
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such recipe. {remedy}") from error
    except (OSError, ValueError) as error:  # ValueError: NUL in a path
        why = getattr(error, "strerror", None) or str(error)
    raise ConfigError(f"{path}: expected a readable recipe, got: {why}. {remedy}")


def _parse_override(text: str) -> dict[str, dict[str, Any]]:
    where = f"override {quote(text)}"
    target, equals, value = text.partition("=")
    section, dot, key = target.partition(".")
    if not (equals and dot and key) or section not in SECTIONS:
        raise ConfigError(
            f"{where}: expected SECTION.KEY=VALUE with a section among {', '.join(SECTIONS)}. "
            f"Write {shorten(_suggest(target))}={shorten(value) or 'VALUE'}."
        )
    layer = {section: {key: parse_yaml(where, value)}}
    return {section: _checked_section(where, section, layer)}


def _suggest(target: str) -> str:
    """Guess the section of a key given without one, or the form of a key of a section."""
    if (section := target.rstrip(".")) in SECTIONS:
        return f"{section}.{'--FLAG' if section == 'megatron_args' else 'KEY'}"
    name = target.rpartition(".")[2]
    if name in field_names():
        return f"moe_optim.{name}"
    if name in VERSIONS + COUNTS:
        return f"requires.{name}"
    return f"megatron_args.--{name.lstrip('-') or 'train-iters'}"


def _checked_section(where: str, section: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    values = recipe.get(section)
    if values is None:  # absent, or empty
        return {}
    where = f"{where}: {section}"
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a mapping, got {_kind(values)}. Write `key: value`.")
    for key, value in values.items():
        if section == "megatron_args":
            _check_flag(where, key, value)
        else:
            check_key(where, key, VERSIONS + COUNTS if section == "requires" else field_names())
            if not isinstance(value, Scalar):
                raise ConfigError(
                    f"{where}: {key}: expected one value, got {_kind(value)}. Write one."
                )
    return values


def _check_flag(where: str, flag: object, value: object) -> None:
    if not (re.fullmatch(r"--[^\s=]+", str(flag)) and str(flag).isprintable()):
        raise ConfigError(
            f"{where}: expected one of Megatron's flags with its leading dashes, got "
            f"{quote(flag)}. Write --{shorten(str(flag)).lstrip('-').replace('_', '-')}."
        )
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, str) and _NO_WORD.search(one) for one in values):
        raise ConfigError(
            f"{where}: {shorten(str(flag))}: expected text that a command line can carry, without "
            f"NUL or unpaired surrogates, got {quote(value)}. Remove them."
        )
    in_list = isinstance(value, list) and all(type(item) in (int, float, str) for item in value)
    if not (in_list or isinstance(value, Scalar)):
        raise ConfigError(
            f"{where}: {shorten(str(flag))}: expected true, false, a value or a list of values, "
            f"got {quote(value)}. Quote what is text."
        )


def _checked_requires(where: str, requires: Mapping[str, Any]) -> dict[str, str | int]:
    checked: dict[str, str | int] = {"ranks": 1}
    for key, value in requires.items():
        if value is None:  # removes a requirement of its base
            continue
        if key in COUNTS:
            if type(value) is not int or not 1 <= value <= _MAX_COUNT:
                raise ConfigError(
                    f"{where}: requires: {key}: expected a positive whole number, got "
                    f"{quote(value)}. Write one up to {_MAX_COUNT:,}, or null to require nothing."
                )
            checked[key] = value
            continue
        try:
            checked[key] = str(SpecifierSet(value))
        # ValueError: a number too long for int()
        except (InvalidSpecifier, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{where}: requires: {key}: expected a version specifier, got {quote(value)}. "
                f"Write for example '>={shorten(str(value))}'."
            ) from error
    return checked


def _unmet_hardware(recipe: Recipe) -> list[str]:
    requires, gpus = recipe.requires, find_gpus()
    unmet = []
    if len(gpus) < (least := int(requires.get("gpus", 1))):
        unmet.append(
            f"gpus: expected {least} or more, got {len(gpus)}. Use a recipe for fewer, or "
            f"{_start_elsewhere(recipe, least)}"
        )
    oldest = min(gpus, key=lambda gpu: gpu.sm, default=None)
    if oldest and oldest.sm < (sm := int(requires.get("sm", 0))):
        unmet.append(
            f"sm: expected compute capability {sm} or newer, got {oldest.sm} ({oldest.name}). "
            f"Use a recipe for this GPU."
        )
    return unmet


def _start_elsewhere(recipe: Recipe, gpus: int) -> str:
    if gpus <= _GPUS_OF_A_NODE:
        return "a machine with more."
    nodes, name = -(-gpus // _GPUS_OF_A_NODE), recipe.path.stem
    shown = name if find_recipe(name) == recipe.path else recipe.path
    return (
        f"start it on {nodes} machines with {_GPUS_OF_A_NODE} GPUs, on each: torchrun --nnodes "
        f"{nodes} --nproc-per-node {_GPUS_OF_A_NODE} --rdzv-backend c10d --rdzv-endpoint "
        f"HOST:29500 --no-python moe-optim run --recipe {shown} pretrain_gpt.py"
    )


def _kind(value: object) -> str:
    names = {dict: "a mapping", list: "a list", type(None): "nothing"}
    return names.get(type(value), quote(value))
