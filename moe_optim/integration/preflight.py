"""Dry run: reports all faults of a command line at once, before anything is built.

The script runs until Megatron parses and validates its arguments, where :class:`DryRun` takes
over.
"""

import argparse
import ast
import copy
import io
import os
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, MoEOptimError
from moe_optim.integration import script_arguments
from moe_optim.integration.argument_checks import (
    FaultyFlags,
    collecting,
    failed_checks,
    is_of_ranks,
    last_words,
)
from moe_optim.integration.arguments import FLAG, config_from_argv, ranks_multiple
from moe_optim.integration.engine import apply_patches, original, patch_state, revert_patches
from moe_optim.integration.first_iteration import LayerSpec, later_refusals, schedule_refusals
from moe_optim.integration.installation import installed_config
from moe_optim.integration.patches import CONFIGURATIONS, PATCHES, SCRIPT
from moe_optim.rules import Setup, refusals
from moe_optim.screen import quiet

Check = Callable[[Any], None]
"""Function that checks validated arguments; raises ConfigError to refuse them."""

_HOLDER = "dry run"
_NEEDS_TE = re.compile(r"\binstall (TE|transformer[-_ ]engine)\b", re.IGNORECASE)
_OF_LENGTH = re.compile("expected (iteration|sample)-based ")
_TWO_LENGTHS = "--train-iters and --train-samples exclude each other. Remove one."
_RANKS = "the number of ranks (--ranks of `moe-optim train`)"
_BUILDERS = {"pretrain", "DistributedDataParallel", "get_model", "setup_model_and_optimizer"}
"""Calls after which an installation is too late."""
_TE_IS_OLD = re.compile("only transformer-engine>=", re.IGNORECASE)
_LOCAL: dict[str, tuple[str, bool]] = {  # fusions that local layers lack without apex
    "--no-persist-layer-norm": ("no_persist_layer_norm", True),
    "--no-rope-fusion": ("apply_rope_fusion", False),
    "--no-masked-softmax-fusion": ("masked_softmax_fusion", False),
    "--no-gradient-accumulation-fusion": ("gradient_accumulation_fusion", False),
}
"""Flag -> field of the arguments and its value with the flag."""
_NOT_INSTALLED = "Transformer Engine is not installed here"
_NO_LATENT_ATTENTION = "--transformer-impl local has no attention for it"
_HAS_REMEDY = re.compile(r"\b(install|(give|add|use|remove) -)", re.IGNORECASE)
_SWITCHES = {  # field of Megatron's messages -> flag that turns it off
    "persist_layer_norm": "--no-persist-layer-norm",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "apply_rope_fusion": "--no-rope-fusion",
}


class _CheckedError(BaseException):
    """Ends a script after the check; a BaseException, which scripts do not catch."""


def list_faults(
    run: Callable[[], object],
    argv: Sequence[str],
    *checks: Check,
    layer_spec: LayerSpec | None = None,
) -> list[str]:
    """Return all faults of a command line, with remedies.

    Nothing is installed, allocated or communicated, and Megatron's output is discarded.

    Args:
        run: callable in which Megatron parses and validates ``sys.argv[1:]``; it does not return.
        argv: copy of ``sys.argv[1:]``.
        checks: additional checks of validated arguments.
        layer_spec: layer spec of a GPT if ``--spec`` gives none; None for Megatron's.
    """
    with quiet(), Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        return list(dict.fromkeys(_list_faults(run, argv, checks, layer_spec)))


def _list_faults(
    run: Callable[[], object],
    argv: Sequence[str],
    checks: Sequence[Check],
    layer_spec: LayerSpec | None,
) -> list[str]:
    states = {patch.id: patch_state(patch) for patch in PATCHES}
    if broken := [f"{name}: {state}" for name, state in states.items() if "broken" in state]:
        return [f"patch {fault}. Run `moe-optim doctor`." for fault in broken]
    of_script = script_arguments.require_evaluation_of_script
    checks = (of_script, *checks)
    dry_run = DryRun(argv, checks, layer_spec)
    apply_patches(SCRIPT, _HOLDER)
    script_arguments.set_observer(dry_run)
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            run()
    except _CheckedError:
        return dry_run.faults
    except SystemExit as error:
        return [*dry_run.faults, _ended_itself(error, errors.getvalue())]
    except Exception as error:
        said = f"{type(error).__name__}: {error}, before Megatron validated its arguments."
        return [*dry_run.faults, _missing_in_yaml(error) or said]
    finally:
        script_arguments.set_observer(None)
        revert_patches(SCRIPT, _HOLDER)
    return [
        *dry_run.faults,
        "expected a script that has Megatron parse its arguments, got one that ends without it. "
        "Name the script that calls pretrain().",
    ]


def _ended_itself(end: SystemExit, errors: str) -> str:
    last = last_words(end, errors)
    return (
        f"expected a script that has Megatron parse its arguments, got one that ends before it"
        f"{f': {last}' if last else ''}. If it has a parser of its own, give that what it asks for."
    )


def find_late_install(script: Path) -> str | None:
    """Return a fault if a script calls ``install()`` after the model is built, else None.

    Compares only calls within one block, in source order.
    """
    tree = ast.parse(script.read_bytes())
    for block in script_arguments.blocks_of(tree):
        built: tuple[str, int] | None = None
        for name, line in script_arguments.calls_of(block):
            if name in _BUILDERS and built is None:
                built = name, line
            elif name == "install" and built is not None:
                return (
                    f"{script}, line {line}: expected install() before the model is built, got it "
                    f"after {built[0]}() in line {built[1]}. Move it up."
                )
    return None


class DryRun:
    """Replaces Megatron's parsing and validation of arguments, and collects faults."""

    def __init__(
        self, argv: Sequence[str], checks: Sequence[Check], layer_spec: LayerSpec | None
    ) -> None:
        self.faults: list[str] = []
        self._argv, self._checks, self._layer_spec = list(argv), checks, layer_spec
        self._config: MoEOptimConfig | None = None
        self._dropped: set[str] = set()

    def parse(self, parser: argparse.ArgumentParser, *, takes_unknown: bool) -> argparse.Namespace:
        """Return arguments with faulty ones removed and misspelled ones corrected."""
        faulty = FaultyFlags(parser, self._argv, takes_unknown=takes_unknown)
        self.faults += faulty.faults
        args, argv, self._dropped = faulty.args, faulty.argv, faulty.dropped
        if args is None:
            raise _CheckedError
        try:
            self._config = config_from_argv(argv)
        except ConfigError as error:
            self.faults += str(error).splitlines()
            self._config = MoEOptimConfig() if FLAG in argv else None  # to check the rest
        return args

    def settle(
        self,
        args: Any,
        defaults: Mapping[str, Any],
        validate: Callable[[], Any],
    ) -> NoReturn:
        """Let Megatron validate the arguments, check them, and end the script.

        ``args`` are flat or the sections of a YAML file; ``defaults`` are set by the script;
        ``validate`` runs Megatron's checks and returns flat arguments.
        """
        for name, value in _missing(args).items():
            if name not in defaults:
                flag = f"--{name.replace('_', '-')}"
                if flag not in self._dropped:
                    self.faults.append(_missing_value(flag, getattr(args, name)))
                setattr(args, name, value)  # to check the rest
        local, at = _with_local_layers(args), len(self.faults)
        lacks_te = () if local else (script_arguments.require_transformer_engine,)
        self._check(args, defaults, validate, (*lacks_te, *self._checks))
        if local is not None:
            missing = script_arguments.missing_transformer_engine(args)
            self.faults.insert(at, f"{missing} {self._explain_local(args, local, defaults)}")
        raise _CheckedError

    def _explain_local(self, args: Any, local: Any, defaults: Mapping[str, Any]) -> str:
        """Return the remedy of missing Transformer Engine, with all that local layers need."""
        flags = [flag for flag, (name, off) in _LOCAL.items() if getattr(args, name) != off]
        trial = DryRun(self._argv, (), self._layer_spec)
        trial._config = self._config
        stock = original("megatron.training.arguments:validate_args")
        with suppress(_CheckedError):
            trial.settle(local, defaults, lambda: stock(local, defaults))
        return _remedy_of_layers(flags, [one for one in trial.faults if one not in self.faults])

    def _check(
        self,
        args: Any,
        defaults: Mapping[str, Any],
        validate: Callable[[], Any],
        checks: Sequence[Check],
    ) -> None:
        is_given = not self.faults
        args, is_settled = self._validate(args, defaults, validate)
        config = self._config or installed_config()
        own = [
            script_arguments.make_muon_distributed,
            script_arguments.require_megatron_checkpoint,
        ] * (config is not None)
        for check in (*own, *checks):
            try:
                check(args)
            except ConfigError as error:
                self.faults.append(str(error))
        patches = () if config is None else CONFIGURATIONS
        apply_patches(patches, _HOLDER)
        try:
            optimizer, ddp, model = self._configure(args, is_settled=is_settled)
            if config is not None:
                self._check_rules(config, optimizer or args, ddp or args, model)
        finally:
            revert_patches(patches, _HOLDER)
        if model is not None and is_settled:
            errors = list(later_refusals(args, model, self._layer_spec, config))
            errors += schedule_refusals(args) if is_given else []  # else rates may be made up
            foreseen = (error for error in errors if not isinstance(error, ConfigError))
            self.faults += [_of_megatron(error) for error in foreseen]

    def _validate(
        self, args: Any, defaults: Mapping[str, Any], validate: Callable[[], Any]
    ) -> tuple[Any, bool]:
        """Return validated arguments, and whether Megatron accepts them; collects its faults.

        With a number of ranks that it refuses, those of the minimum.
        """
        before = None
        try:
            if "WORLD_SIZE" not in os.environ:  # no launcher: assume the minimum number of ranks
                args.world_size = _fewest_ranks(args)
            with suppress(Exception):  # of arguments that hold an open file
                before = copy.deepcopy(args)
            return validate(), True
        except SystemExit as end:
            error: Exception = ValueError(last_words(end, "") or "exit()")
        except Exception as first:  # assertions, and errors from unexpected values
            error = first
        if args.yaml_cfg is not None:  # the sections are not flattened
            self.faults.append(_of_megatron(error))
            self._add("Of the rest of the file nothing is known yet.")
            raise _CheckedError
        if before is None:
            self.faults.append(_of_megatron(error))
            return args, False
        stock = original("megatron.training.arguments:validate_args")
        errors = failed_checks(stock, tried := copy.deepcopy(before), defaults) or [error]
        further = errors
        if is_of_ranks(errors[-1]):
            before.world_size = _fewest_ranks(before)
            further = failed_checks(stock, tried := before, defaults)
        has_two = None not in (args.train_iters, args.train_samples)
        faults = (
            _TWO_LENGTHS if has_two and _OF_LENGTH.match(str(error)) else _of_megatron(error)
            for error in (*errors, *further)
            if not (_lacks_te(error) and script_arguments.missing_transformer_engine(args))
        )
        self.faults += dict.fromkeys(faults)
        return tried, all(map(_lacks_te, further))

    def _configure(self, args: Any, *, is_settled: bool) -> tuple[Any, Any, Any]:
        """Return the configurations of optimizer, DDP and model; None if Megatron refuses them."""
        from megatron.core.transformer import TransformerConfig
        from megatron.training.argument_utils import core_transformer_config_from_args
        from megatron.training.training import (
            get_megatron_ddp_config,
            get_megatron_optimizer_config,
        )
        from megatron.training.yaml_arguments import core_transformer_config_from_yaml

        def make(config: Callable[[Any], Any]) -> Any:
            made = None
            try:
                return config(args)
            except Exception as error:  # an assertion
                if not is_settled:  # a consequence of the faults before
                    return None
                checks = collecting(TransformerConfig, "__post_init__")
                with checks as errors, suppress(Exception):
                    made = config(args)
                errors = errors or [error]
            others = [error for error in errors if not _lacks_te(error)]
            is_told = script_arguments.missing_transformer_engine(args) is not None
            self.faults += dict.fromkeys(map(_of_megatron, others if is_told else errors))
            return None if others else made

        optimizer = make(lambda args: get_megatron_optimizer_config(args)[0])
        is_yaml = args.yaml_cfg is not None  # read as gpt_config_from_args() does
        read = core_transformer_config_from_yaml if is_yaml else core_transformer_config_from_args
        missing = _missing_fields(args) if is_yaml else []
        if missing:
            self.faults.append(
                "--yaml-cfg: expected every field of TransformerConfig in language_model or "
                f"model_parallel, got none of {', '.join(missing)}. Add them."
            )
        return optimizer, make(get_megatron_ddp_config), None if missing else make(read)

    def _check_rules(self, config: MoEOptimConfig, optimizer: Any, ddp: Any, model: Any) -> None:
        """Collect the plug-in's refusals.

        ``optimizer`` and ``ddp`` may be Megatron's arguments, which have fields of the same names.
        """
        if model is None:  # weights are unknown
            config = MoEOptimConfig(format="bf16")
        setup = Setup.of_flags(config, optimizer, ddp, [] if model is None else [model])
        self.faults += [f"refused by moe_optim: {line}" for line in refusals(setup)]
        if model is None:
            self._add("The plug-in checks the model's flags once these are correct.")

    def _add(self, note: str) -> None:
        self.faults[-1] += f" {note}"


def _fewest_ranks(args: Any) -> int:
    sizes = {} if args.yaml_cfg is None else vars(args.model_parallel)
    return ranks_multiple(argparse.Namespace(**vars(args) | sizes))


def _missing_fields(args: Any) -> list[str]:
    from megatron.core.transformer import TransformerConfig

    given = vars(args.language_model).keys() | vars(args.model_parallel).keys()
    return [field.name for field in fields(TransformerConfig) if field.name not in given]


def _missing_in_yaml(error: BaseException) -> str | None:
    """Return the fault if Megatron looked up a name that a YAML file lacks, else None."""
    if isinstance(error, AttributeError) and isinstance(error.obj, SimpleNamespace):
        return f"--yaml-cfg: expected {error.name} in the file, got none. Add it."
    return None


def _of_megatron(error: Exception) -> str:
    if missing := _missing_in_yaml(error):
        return missing
    text, *_ = str(error).split(" when instantiating ")  # drop the enclosing classes
    if "unexpected keyword argument 'k_channels'" in text:
        text = (
            f"--multi-latent-attention: {_NO_LATENT_ATTENTION}. Give "
            "--transformer-impl transformer_engine"
        )
    said = " ".join(text.split()).rstrip(".") or _failed_line(error)
    if isinstance(error, MoEOptimError):
        return f"refused by moe_optim: {said}."
    if said in ("assert not args.bf16", "assert not args.fp16"):
        return "--fp16 and --bf16 exclude each other. Remove one."
    for field, flag in _SWITCHES.items():
        if field in said:
            return f"Megatron: {said}. Give {flag}."
    if _lacks_te(error):
        return f"Megatron: {said}. {_NOT_INSTALLED}: do the dry run in the training container."
    return f"Megatron: {said}. {_remedy_of(said)}".rstrip()


def _lacks_te(error: Exception) -> bool:
    """Return whether Megatron refuses arguments because Transformer Engine is not installed."""
    needs_te = _NEEDS_TE.search(str(error)) or _TE_IS_OLD.match(str(error))
    return needs_te is not None and script_arguments.has_no_transformer_engine()


def _with_local_layers(args: Any) -> Any:
    """Return a copy of ``args`` with local layers if Transformer Engine is missing, else None.

    Fusions that these layers lack are off.
    """
    if args.yaml_cfg is not None or not script_arguments.missing_transformer_engine(args):
        return None
    with suppress(Exception):  # of arguments that hold an open file
        local = copy.deepcopy(args)
        vars(local).update({"transformer_impl": "local", **dict(_LOCAL.values())})
        return local
    return None


def _remedy_of_layers(flags: Sequence[str], faults: Sequence[str]) -> str:
    """Return the remedy of missing Transformer Engine.

    Args:
        flags: flags that local layers need.
        faults: further faults of the same command line with local layers and these flags.
    """
    said = "Do the dry run in the training container. To train here, install it"
    if any(_NO_LATENT_ATTENTION in fault for fault in faults):
        return f"{said}: --transformer-impl local has no multi-latent attention."
    without, others = "", list(dict.fromkeys(faults))
    if any(_NOT_INSTALLED in fault for fault in faults):
        without = ", without FP8 and FP4 flags"
        of_flags = re.compile(f"{_NOT_INSTALLED}|--fp[48]-")
        others = [fault for fault in others if not of_flags.search(fault)]
    said += f", or give {' '.join(('--transformer-impl local', *flags))}{without}."
    return " ".join([said, *(f"With these: {fault}" for fault in others)])


def _remedy_of(said: str) -> str:
    if "world size (" in said:
        return f"Change {_RANKS}, or the parallel sizes."
    if said.startswith(("global batch size (", "eval_global_batch_size (")):
        return f"Change --global-batch-size, --micro-batch-size or {_RANKS}."
    return "" if _HAS_REMEDY.search(said) else "Change these flags."


def _failed_line(error: Exception) -> str:
    """Return the source line of an assertion without a message."""
    *_, last = traceback.extract_tb(error.__traceback__) or [None]
    return last.line if last and last.line else type(error).__name__


def _missing_value(flag: str, value: int | None) -> str:
    if value is None:
        return f"{flag}: expected a value, got none. Give the flag."
    return f"{flag}: expected 1 or more, got {value}. Change the value."


def _missing(args: argparse.Namespace) -> dict[str, int]:
    """Return required attributes that were not given or are not positive, with valid values.

    Megatron itself reports only one at a time.
    """
    if args.yaml_cfg is not None or args.use_checkpoint_args or args.hybrid_layer_pattern:
        return {}  # given there
    pattern = args.moe_layer_freq
    needed = {
        "num_layers": len(pattern)
        if isinstance(pattern, list)
        else args.pipeline_model_parallel_size,
        "hidden_size": 128 * args.tensor_model_parallel_size,
        "num_attention_heads": args.tensor_model_parallel_size,
        "seq_length": args.max_position_embeddings or 128,
        "max_position_embeddings": args.seq_length or 128,
        "micro_batch_size": 1,
    }
    if args.encoder_num_layers is not None:
        del needed["num_layers"]
    if args.encoder_seq_length is not None:
        del needed["seq_length"]
    return {name: value for name, value in needed.items() if (getattr(args, name) or 0) < 1}
