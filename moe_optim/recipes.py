"""A recipe is one run as a YAML file: what it requires, Megatron's flags, and moe_optim's knobs."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from moe_optim.config import MoEOptimConfig, check_key, field_names, first_line, parse_yaml
from moe_optim.environment import find_gpus, unmet_version
from moe_optim.errors import ConfigError

Scalar = bool | int | float | str | None
Value = Scalar | list[Scalar]
"""What a flag can take: itself alone (true), nothing at all (false, null), a value, several."""

SECTIONS = ("requires", "megatron_args", "moe_optim")
KEYS = ("base", *SECTIONS)
VERSIONS = ("python", "torch", "megatron-core", "transformer-engine", "apex")
COUNTS = ("sm", "gpus", "ranks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One resolved recipe: its bases merged in, overrides applied, interpolations replaced."""

    path: Path
    """The file it was read from."""
    requires: Mapping[str, str | int]
    """Version specifiers, and minimum numbers; ``ranks`` is always there."""
    megatron_args: Mapping[str, Value]
    """Megatron's flags, spelled as on its command line."""
    moe_optim: MoEOptimConfig
    """Every knob of this package."""

    @property
    def ranks(self) -> int:
        """Processes to launch."""
        return int(self.requires["ranks"])

    def megatron_argv(self) -> list[str]:
        """Return the command line for Megatron's parser, values spelled as in the file."""
        argv: list[str] = []
        for flag, value in self.megatron_args.items():
            if value is None or value is False:
                continue
            values = value if isinstance(value, list) else [] if value is True else [value]
            texts = [str(item) for item in values]
            if len(texts) == 1 and texts[0].startswith("-"):  # argparse takes -1e-3 for a flag
                argv.append(f"{flag}={texts[0]}")
            else:
                argv += [flag, *texts]
        return argv


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe and the recipes it is based on.

    Args:
        path: the YAML file.
        overrides: assignments such as ``moe_optim.format=bf16`` or
            ``megatron_args.--train-iters=20``; the last one wins.

    Raises:
        ConfigError: naming the file (or the override), the key, and what was expected there.
    """
    path = Path(path)
    assignments = list(overrides)
    layers = _read_layers(path, ()) + [_parse_override(text) for text in assignments]
    where = f"{path} with {' '.join(assignments)}" if assignments else f"{path}"
    try:
        merged: Any = OmegaConf.to_container(OmegaConf.merge(*layers), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{where}: {error.full_key}: expected an interpolation that resolves, got "
            f"{first_line(error)!r}. Correct the ${{...}} in it."
        ) from error
    for flag, value in merged["megatron_args"].items():  # again: an interpolation can be anything
        _check_flag(f"{where}: megatron_args", flag, value)
    return Recipe(
        path=path,
        requires=MappingProxyType(_checked_requires(where, merged["requires"])),
        megatron_args=MappingProxyType(merged["megatron_args"]),
        moe_optim=MoEOptimConfig.from_mapping(merged["moe_optim"], f"{where}: moe_optim"),
    )


def unmet_requirements(recipe: Recipe) -> list[str]:
    """Return one line for every requirement this machine does not meet: wanted, found, remedy.

    ``ranks`` is not among them: it says how many processes to launch, on any machine.
    """
    requires = recipe.requires
    unmet = [
        problem
        for name in VERSIONS
        if name in requires and (problem := unmet_version(name, str(requires[name])))
    ]
    if "gpus" in requires or "sm" in requires:
        unmet += _unmet_hardware(requires)
    return unmet


def check_requirements(recipe: Recipe) -> None:
    """Raise one ConfigError that names every requirement this machine does not meet."""
    if unmet := unmet_requirements(recipe):
        lines = "".join(f"\n  {line}" for line in unmet)
        raise ConfigError(f"{recipe.path}: requires: expected more than this machine has.{lines}")


def _read_layers(path: Path, above: tuple[Path, ...]) -> list[dict[str, dict[str, Any]]]:
    """Return the sections of a recipe's bases and of itself, the first base first.

    Args:
        path: the recipe to read.
        above: the recipes, resolved, that led here through ``base``.
    """
    resolved = path.resolve()
    if resolved in above:
        chain = " -> ".join(str(step) for step in (*above, resolved))
        raise ConfigError(
            f"{above[-1]}: base: expected a recipe that does not lead back to itself, got {chain}. "
            f"Remove one `base`."
        )
    recipe = parse_yaml(f"{path}", _read_text(path, above))
    where = f"{path}"
    if not isinstance(recipe, dict):
        raise ConfigError(
            f"{where}: expected a mapping with keys among {', '.join(KEYS)}, got "
            f"{_kind(recipe)}. Start from recipes/quickstart.yaml."
        )
    for key in recipe:
        check_key(where, key, KEYS)
    base = recipe.get("base")
    if not isinstance(base, str | None):
        raise ConfigError(
            f"{where}: base: expected the path of a recipe, got {_kind(base)}. "
            f"Write for example quickstart.yaml, or remove `base`."
        )
    below = _read_layers(path.parent / base, (*above, resolved)) if base else []
    return [*below, {section: _checked_section(where, section, recipe) for section in SECTIONS}]


def _read_text(path: Path, above: tuple[Path, ...]) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        remedy = f"Correct `base` in {above[-1]}" if above else "Correct the path"
        raise ConfigError(f"{path}: expected a readable recipe, got: {why}. {remedy}.") from error


def _parse_override(text: str) -> dict[str, dict[str, Any]]:
    where = f"override {text!r}"
    target, equals, value = text.partition("=")
    section, dot, key = target.partition(".")
    if not (equals and dot and key) or section not in SECTIONS:
        raise ConfigError(
            f"{where}: expected SECTION.KEY=VALUE with a section among {', '.join(SECTIONS)}. "
            f"Write {_suggest(target)}={value or 'VALUE'}."
        )
    layer = {section: {key: parse_yaml(where, value)}}
    return {section: _checked_section(where, section, layer)}


def _suggest(target: str) -> str:
    """Guess what a key without its section was meant to be: a knob, a requirement, or a flag."""
    name = target.rpartition(".")[2]
    if name in field_names():
        return f"moe_optim.{name}"
    if name in VERSIONS + COUNTS:
        return f"requires.{name}"
    return f"megatron_args.--{name.lstrip('-') or 'train-iters'}"


def _checked_section(where: str, section: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return one section of one file, its keys known and its values of a type that fits."""
    values = recipe.get(section)
    if values is None:  # absent, or all of it commented out
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
    if not re.fullmatch(r"--[^\s=]+", str(flag)):
        raise ConfigError(
            f"{where}: expected one of Megatron's flags with its leading dashes, got {flag!r}. "
            f"Write --{str(flag).lstrip('-').replace('_', '-')}."
        )
    if isinstance(value, list):
        if all(type(item) in (int, float, str) for item in value):
            return
    elif isinstance(value, Scalar):
        return
    raise ConfigError(
        f"{where}: {flag}: expected true, false, a value or a list of values, got {value!r}. "
        f"Quote what is text."
    )


def _checked_requires(where: str, requires: Mapping[str, Any]) -> dict[str, str | int]:
    checked: dict[str, str | int] = {"ranks": 1}
    for key, value in requires.items():
        if value is None:  # a variant drops what its base requires
            continue
        if key in COUNTS:
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"{where}: requires: {key}: expected a positive whole number, got {value!r}. "
                    f"Write a number, or null to require nothing."
                )
            checked[key] = value
            continue
        try:
            checked[key] = str(SpecifierSet(value))
        except (InvalidSpecifier, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{where}: requires: {key}: expected a version specifier, got {value!r}. "
                f"Write for example '>={value}'."
            ) from error
    return checked


def _unmet_hardware(requires: Mapping[str, str | int]) -> list[str]:
    gpus = find_gpus()
    unmet = []
    if len(gpus) < (wanted := int(requires.get("gpus", 1))):
        unmet.append(
            f"gpus: expected {wanted} or more, got {len(gpus)}. "
            f"Use a machine with more, or a recipe for fewer."
        )
    oldest = min(gpus, key=lambda gpu: gpu.sm, default=None)
    if oldest and oldest.sm < (sm := int(requires.get("sm", 0))):
        unmet.append(
            f"sm: expected compute capability {sm} or newer, got {oldest.sm} ({oldest.name}). "
            f"Use a recipe for this GPU."
        )
    return unmet


def _kind(value: object) -> str:
    """Say what YAML gave, in YAML's words."""
    names = {dict: "a mapping", list: "a list", type(None): "nothing"}
    return names.get(type(value), repr(value))
