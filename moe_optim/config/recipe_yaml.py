"""Parses the YAML of recipes and assignments; resolves ``${...}`` with OmegaConf.

Integers, ``true``, ``false`` and ``null`` are typed, everything else is text: ``2e-3``, ``1.10``
and ``12:30`` reach Megatron as written, where standard YAML would produce text, 1.1 and 750.
"""

import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from moe_optim.errors import ConfigError, quote, shorten

MAX_BYTES = 2**18  # limit for the size of a document; 80 times the largest shipped recipe


class _Loader(yaml.SafeLoader):
    """Accepts plain values; refuses tags, merge keys and duplicate keys."""

    yaml_implicit_resolvers: Any = {}

    def fetch_tag(self) -> None:
        raise yaml.MarkedYAMLError(
            problem="a tag, and tags are not taken", problem_mark=self.get_mark()
        )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value == "<<":
                raise yaml.MarkedYAMLError(
                    problem="a merge key (<<), and those are not taken: write out the keys that it "
                    "merges, or name a recipe that holds them as `base`",
                    problem_mark=key.start_mark,
                )
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else key
            if name in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} for the second time",
                    problem_mark=key.start_mark,
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


for _tag, _pattern in {
    "bool": "true|True|TRUE|false|False|FALSE",
    "null": "null|Null|NULL|~|",
    "int": "0|-?[1-9][0-9]{0,17}",  # canonical and within 64 bits
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), None)


def parse_yaml(where: str, text: str) -> Any:
    """Parse ``text``, a YAML document or value, named ``where`` in errors.

    ConfigError if it is invalid or too large, or has tags, merge keys or duplicate keys.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where}: expected at most {MAX_BYTES:,} characters of YAML, got more.")
    line = ""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        if error.problem_mark:
            line = f" line {error.problem_mark.line + 1}:"
        problem = error.problem or "something else"
    except yaml.reader.ReaderError as error:
        line = f" line {text.count(chr(10), 0, error.position) + 1}:"
        problem = "a character that it does not take"
    except (ValueError, OverflowError):  # of chr()
        problem = "an escape beyond \\U0010FFFF, the last character"
    except RecursionError:
        problem = "values nested too deep"
    raise ConfigError(
        f"{where}:{line} expected YAML, got: {shorten(problem)}. Correct it, or quote what is text."
    )


def merge(where: str, *layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Merge ``layers``, later ones winning, and resolve every ``${...}``.

    A layer is {section: {key: plain value or list of them}}. ConfigError for unresolvable or
    circular interpolations.
    """
    merged: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, values in layer.items():
            merged.setdefault(section, {}).update(values)
    if "${" not in str(merged):
        return merged
    from omegaconf import OmegaConf  # slow, and rarely needed
    from omegaconf.errors import OmegaConfBaseException

    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(merged), resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(
            f"{where}: {f'{key}: ' if key else ''}expected an interpolation that resolves, got "
            f"{quote(str(error).partition(chr(10))[0])}. Correct the ${{...}} in it."
        ) from None
    return dict(resolved)
