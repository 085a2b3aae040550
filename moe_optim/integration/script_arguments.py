"""Replacements of Megatron's argument parser and validation."""

import ast
import functools
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_optim.checkpoint.files.folders import is_hugging_face, is_local
from moe_optim.errors import ConfigError
from moe_optim.integration.arguments import (
    add_moe_optim_arguments,
    extend_distributed_optimizer,
)
from moe_optim.integration.engine import original
from moe_optim.integration.installation import installed_config, set_optimizer
from moe_optim.rules import Setup, check_setup, remarks
from moe_optim.weights.te.recipe import import_error

_ARGUMENTS = "megatron.training.arguments"
_YAML = "megatron.training.yaml_arguments"
_NAMED_TWICE = ("account_for_embedding_in_pipeline_split",)


_observer: Any = None
"""``preflight.DryRun``, whose ``parse`` and ``settle`` replace Megatron's."""


def set_observer(observer: Any) -> None:
    """Route argument parsing and validation in this process through a dry run; None for none."""
    global _observer
    _observer = observer


def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add Megatron's flags and the plug-in's to ``parser`` and return it."""
    parser = add_moe_optim_arguments(original(f"{_ARGUMENTS}:add_megatron_arguments")(parser))
    if _observer is not None:
        parse = functools.partial(_observer.parse, parser)
        every: Any = lambda *_: parse(takes_unknown=False)  # noqa: E731
        known: Any = lambda *_: (parse(takes_unknown=True), [])  # noqa: E731
        parser.parse_args, parser.parse_known_args = every, known  # type: ignore[method-assign]
    return parser


def validate_args(args: Namespace, defaults: Mapping[str, Any] = MappingProxyType({})) -> Namespace:
    """Validate arguments like Megatron; also refuse those that would fail during model building."""
    return _settle(args, defaults, original(f"{_ARGUMENTS}:validate_args"))


def validate_yaml(args: Any, defaults: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Validate a ``--yaml-cfg`` file like :func:`validate_args`.

    Megatron reads ``account_for_embedding_in_pipeline_split`` at top level, builds the model from
    the one in ``language_model``, and accepts no duplicates: here the latter serves both.
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
    if installed_config() is not None:
        settle_optimizer(settled)
        require_megatron_checkpoint(settled)
    require_transformer_engine(settled)
    require_evaluation_of_script(settled)
    return settled


def settle_optimizer(args: Any) -> None:
    """Make Muon a distributed optimizer in validated arguments, and record who owns the matrices.

    Call it after :func:`install_by_flag` and before the model is built.

    Args:
        args: Megatron's validated arguments, modified in place. Those from a YAML file may lack
            fields of flags.

    Raises:
        ConfigError: the arguments do not suit a distributed optimizer; Megatron's validation has
            skipped these checks for Muon. Or Muon does not support one of them.
        StateError: ``install()`` named another optimizer.
    """
    make_muon_distributed(args)
    if args.optimizer == "muon" and args.use_distributed_optimizer and not _is_of_file(args):
        check_setup(Setup(config=installed_config(), optimizer=args), "moe_optim")
    set_optimizer("muon" if args.optimizer == "muon" else "adam")
    if os.environ.get("RANK", "0") == "0":
        for remark in remarks(Setup(config=installed_config(), args=args), "note"):
            print(f"moe_optim: {remark}", file=sys.stderr, flush=True)


def _is_of_file(args: Any) -> bool:
    return getattr(args, "yaml_cfg", None) is not None or hasattr(args, "language_model")


def make_muon_distributed(args: Any) -> None:
    """Make Muon a distributed optimizer in validated arguments, as for :func:`settle_optimizer`."""
    extend_distributed_optimizer(args)
    if args.optimizer != "muon":
        return
    if getattr(args, "freeze_all_layers", False):
        args.use_distributed_optimizer = False  # as in Megatron's validation: nothing is stepped
    has_gloo = getattr(args, "use_gloo_process_groups", True)
    if not has_gloo and args.ckpt_format == "torch":
        raise ConfigError(
            "--disable-gloo-process-groups: expected --ckpt-format torch_dist, as others collect "
            f"states over gloo, got {args.ckpt_format}. Give torch_dist, or remove the flag."
        )


def require_megatron_checkpoint(args: Any) -> None:
    """Raise ConfigError if ``--load`` names a Hugging Face checkpoint.

    Megatron finds no tracker file there, and trains from random weights. ``args`` are validated;
    those from a YAML file may lack the field.
    """
    load = getattr(args, "load", None)
    if load is not None and is_local(load) and is_hugging_face(Path(load)):
        raise ConfigError(
            f"--load {load}: expected a Megatron checkpoint, got a Hugging Face one, in place of "
            f"which Megatron would train random weights. Run `moe-optim convert --to megatron "
            f"{load} DIR`, and give --load DIR."
        )


def require_evaluation(args: Any) -> None:
    """Raise ConfigError for flags of evaluation with which Megatron's ``pretrain`` cannot count.

    It divides by the interval once the model is built. ``args`` are validated.
    """
    needs_none = ("full_validation", "skip_train", "perform_rl_step")
    interval = getattr(args, "eval_interval", None)
    if not interval and not any(getattr(args, name, False) for name in needs_none):
        raise ConfigError(
            f"--eval-interval: expected a number of iterations above 0, got {interval}: Megatron "
            "divides by it after building the model. Give --eval-interval N, even with "
            "--eval-iters 0."
        )


def require_evaluation_of_script(args: Any) -> None:
    """Call :func:`require_evaluation` if the main script calls Megatron's ``pretrain``.

    A script that names ``eval_interval`` may set it later.
    """
    main = sys.modules["__main__"]
    script = Path(getattr(main, "__file__", None) or "")
    module = getattr(getattr(main, "pretrain", None), "__module__", None)
    if module != "megatron.training.training" or not script.is_file():
        return
    source = script.read_bytes()
    calls = (name for block in blocks_of(ast.parse(source)) for name, _ in calls_of(block))
    if b"eval_interval" not in source and "pretrain" in calls and not _is_of_file(args):
        require_evaluation(args)


def blocks_of(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a module and all of its functions."""
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def calls_of(block: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield name and line of every call in a block, without nested functions."""
    for child in ast.iter_child_nodes(block):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield from calls_of(child)
        if isinstance(child, ast.Call):
            target: Any = child.func
            yield str(getattr(target, "attr", getattr(target, "id", ""))), child.lineno


def has_no_transformer_engine() -> bool:
    """Return whether Transformer Engine cannot be imported."""
    return import_error() is not None


def missing_transformer_engine(args: Any) -> str | None:
    """Return the fault, without a remedy, if ``args`` select layers that no package provides.

    Megatron would call None in place of Transformer Engine's. Layers given by ``--spec`` are
    exempt. ``args`` from a YAML file may lack the fields read here.
    """
    impl = getattr(args, "transformer_impl", "transformer_engine")
    is_needed = impl == "transformer_engine" and getattr(args, "spec", None) is None
    if not is_needed or (why := import_error()) is None:
        return None
    return (
        "--transformer-impl: expected Transformer Engine for transformer_engine, Megatron's "
        f"default, got {why}."
    )


def require_transformer_engine(args: Any) -> None:
    """Raise ConfigError for what :func:`missing_transformer_engine` finds in validated ``args``."""
    if fault := missing_transformer_engine(args):
        raise ConfigError(
            f"{fault} Train in a container that has it, install it, or give --transformer-impl "
            "local and the flags that `moe-optim run --dry-run` lists."
        )
