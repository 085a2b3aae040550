"""Replacements of Megatron's parser and of its checks of parsed arguments."""

import functools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from moe_optim.errors import ConfigError
from moe_optim.integration.arguments import add_moe_optim_arguments
from moe_optim.integration.engine import original
from moe_optim.weights.te.recipe import import_error

_ARGUMENTS = "megatron.training.arguments"
_YAML = "megatron.training.yaml_arguments"
_NAMED_TWICE = ("account_for_embedding_in_pipeline_split",)


class Observer(Protocol):
    """Takes the place of parsing and of Megatron's checks, as a dry run does."""

    def parse(self, parser: ArgumentParser, *, takes_unknown: bool) -> Namespace:
        """Return the parsed arguments."""

    def settle(self, args: Any, defaults: Mapping[str, Any], validate: Callable[[], Any]) -> Any:
        """Return them as ``validate``, Megatron's checks, leaves them."""


_observer: Observer | None = None


def set_observer(observer: Observer | None) -> None:
    """Have scripts of this process parse and settle arguments through ``observer``, if given."""
    global _observer
    _observer = observer


def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add Megatron's flags and the plug-in's to ``parser`` and return it."""
    parser = add_moe_optim_arguments(original(f"{_ARGUMENTS}:add_megatron_arguments")(parser))
    if (observer := _observer) is not None:
        parse = functools.partial(observer.parse, parser)
        every: Any = lambda *_: parse(takes_unknown=False)  # noqa: E731
        known: Any = lambda *_: (parse(takes_unknown=True), [])  # noqa: E731
        parser.parse_args, parser.parse_known_args = every, known  # type: ignore[method-assign]
    return parser


def validate_args(args: Namespace, defaults: Mapping[str, Any] = MappingProxyType({})) -> Namespace:
    """Settle arguments as Megatron does, and refuse what would fail while the model is built."""
    return _settle(args, defaults, original(f"{_ARGUMENTS}:validate_args"))


def validate_yaml(args: Any, defaults: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Settle the contents of a ``--yaml-cfg`` file as :func:`validate_args` settles arguments.

    Megatron reads ``account_for_embedding_in_pipeline_split`` beside ``language_model``, builds the
    model from the one in it, and takes no name in both places: here the one in it counts for both.
    """
    return _settle(args, defaults, _validate_yaml_names_once)


def _validate_yaml_names_once(args: Any, defaults: Mapping[str, Any]) -> Any:
    layers = vars(args.language_model)
    moved = {name: layers.pop(name) for name in _NAMED_TWICE if name in layers}
    vars(args).update(moved)
    settled = original(f"{_YAML}:validate_yaml")(args, defaults)
    layers.update(moved)
    return settled


def _settle(args: Any, defaults: Mapping[str, Any], validate: Callable[..., Any]) -> Any:
    validate = functools.partial(validate, args, defaults)
    if _observer is not None:
        return _observer.settle(args, defaults, validate)
    settled = validate()
    require_transformer_engine(settled)
    return settled


def require_transformer_engine(args: Any) -> None:
    """Check that Transformer Engine can be imported if layers are to be built of it.

    Megatron calls None otherwise. Layers that ``--spec`` names may do without.

    Args:
        args: settled arguments; a YAML file may leave out those that are read here.

    Raises:
        ConfigError: it cannot.
    """
    impl = getattr(args, "transformer_impl", "transformer_engine")
    is_needed = impl == "transformer_engine" and getattr(args, "spec", None) is None
    if is_needed and (why := import_error()):
        raise ConfigError(
            "--transformer-impl: expected Transformer Engine for transformer_engine, Megatron's "
            f"default, got {why}. Install it, or give --transformer-impl local."
        )
