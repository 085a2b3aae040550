"""Runs a Megatron-LM script in this process, with the plug-in if its arguments have the flag.

``moe-optim run`` calls :func:`find_script`, :func:`prepare_imports`, and :func:`run_script` or, in
a dry run, :func:`check_script`. In scripts run by plain Python, ``moe_optim.import_hook`` calls
:func:`before_megatron` and :func:`switch_on`.
"""

import importlib.metadata
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from moe_optim import import_hook
from moe_optim.config import MoEOptimConfig
from moe_optim.environment import (
    NEEDED,
    Package,
    find_folder,
    find_package,
    missing_for_datasets,
    unmet_version,
)
from moe_optim.errors import ConfigError, MoEOptimError
from moe_optim.integration.arguments import FLAG, config_from_argv
from moe_optim.screen import quiet


def find_script(script: Path, megatron_lm: Path | None) -> Path:
    """Return the path of ``script`` in the working directory, else in ``megatron_lm``.

    ConfigError if neither contains it.
    """
    places = [script] if megatron_lm is None else [script, megatron_lm / script]
    for place in places:
        if place.is_file():
            return place
    tried = " or ".join(str(place) for place in places)
    hint = "Check the name" if megatron_lm else "Check the name, or give --megatron-lm PATH"
    raise ConfigError(f"moe-optim run: expected a script at {tried}, got no such file. {hint}.")


def prepare_imports(script: Path, megatron_lm: Path | None) -> Package | None:
    """Set up imports as ``python SCRIPT`` would, with the source tree ``megatron_lm`` first.

    Child processes get the tree through ``PYTHONPATH``. Returns the megatron-core that will be
    imported, None without one. ConfigError if the tree lacks it, or another one takes precedence.
    """
    own = str(script.resolve().parent)
    if sys.flags.safe_path:  # sys.path[0] is not the script's folder
        sys.path.insert(0, own)
    else:
        sys.path[0] = own
    if megatron_lm is None:
        return find_package("megatron-core")
    tree = require_tree(megatron_lm)
    if str(tree) != own:
        sys.path.insert(1, str(tree))
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), *([inherited] if inherited else [])])
    for module in ("megatron.core", "megatron.training"):
        folder = find_folder(module)
        if folder is None or folder.resolve() != tree / module.replace(".", "/"):
            raise ConfigError(
                f"--megatron-lm {megatron_lm}: expected {module} from there, got "
                f"{folder or 'none'}. Move the script out of a folder that has a Megatron of its "
                "own, or give a whole checkout."
            )
    return find_package("megatron-core")


def require_tree(path: Path) -> Path:
    """Return the absolute ``path`` of a source tree; ConfigError without ``megatron/core``."""
    if not path.is_dir():
        raise ConfigError(
            f"{path}: expected a checkout of Megatron-LM, got no folder. Give its path."
        )
    if not (path / "megatron" / "core" / "__init__.py").is_file():
        raise ConfigError(
            f"{path}: expected a checkout of Megatron-LM, got a folder without megatron/core. "
            "Give the folder that holds pretrain_gpt.py."
        )
    return path.resolve()


def run_script(script: Path, argv: Sequence[str], *, cpu: bool) -> None:
    """Run ``script`` like ``python SCRIPT ARGS``, after :func:`prepare_imports`.

    With ``--use-moe-grouped-optim``, its parser accepts the plug-in's flags, and the plug-in is
    installed before the script starts; without it, nothing is replaced on GPUs. ``cpu`` installs
    the CPU runtime, and trains over gloo. Every rank must call it with the same arguments.
    ConfigError for invalid flags of the plug-in, or another megatron-core.
    """
    sys.argv = [str(script), *argv]
    config = config_from_argv(argv)
    _prepare(config, cpu=cpu)
    if config is not None:  # Megatron's default, which absl of emerging-optimizers would raise
        logging.getLogger().setLevel(logging.INFO)
    _run_as_main(script)


def before_megatron() -> None:
    """For CPU training, disable compilation and hide GPU-only packages."""
    if FLAG in sys.argv and trains_on_cpu():
        from moe_optim.integration.cpu_runtime import hide_gpu_packages

        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        hide_gpu_packages()


def switch_on() -> None:
    """Install the plug-in for a script that has just imported ``megatron.training``.

    No-op without the flag. A refusal exits with one line, like ``moe-optim run``.
    """
    try:
        config = config_from_argv(sys.argv[1:])
        if config is None:
            return
        meet_alone()
        cpu = trains_on_cpu()
        announce(FLAG, find_package("megatron-core"), cpu=cpu)
        _prepare(config, cpu=cpu)
    except MoEOptimError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def meet_alone() -> None:
    """Without a launcher, make this process the only rank, with a rendezvous at a free port."""
    if "RANK" not in os.environ:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")


def trains_on_cpu() -> bool:
    """Return whether scripts train on the CPU: without a GPU, or with ``MOE_OPTIM_CPU=1``."""
    import torch

    return os.environ.get("MOE_OPTIM_CPU") == "1" or torch.cuda.device_count() == 0


def announce(who: str, package: Package | None, *, cpu: bool) -> None:
    """Print the imported megatron-core and the training device after ``who``, on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        where = "on the CPU, over gloo" if cpu else "on GPUs"
        print(f"{who}: {_describe(package)}; {where}", file=sys.stderr, flush=True)


def _describe(package: Package | None) -> str:
    if package is None:
        return "no megatron-core"
    text = f"megatron-core {package.version} from {package.path}"
    if not package.checkout:
        return text
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return f"{text}, a source tree"
    return f"{text}, a source tree that overrides the installed {installed}"


def _prepare(config: MoEOptimConfig | None, *, cpu: bool) -> None:
    import_hook.disarm()
    if config is not None and (fault := unmet_version("megatron-core", NEEDED["megatron-core"])):
        raise ConfigError(f"{FLAG}: {fault}.")
    if cpu:
        from moe_optim.integration import cpu_runtime

        cpu_runtime.install()
        if "--distributed-backend" not in sys.argv:
            sys.argv += ["--distributed-backend", "gloo"]
    if cpu or config is not None:
        from moe_optim.integration import installation
        from moe_optim.integration.engine import apply_patches
        from moe_optim.integration.patches import DATASETS, SCRIPT

        apply_patches(DATASETS, "run")
        if config is not None:
            apply_patches(SCRIPT, "run")
            installation.install_by_flag(config)


def check_script(script: Path, argv: Sequence[str], *, cpu: bool) -> list[str]:
    """Return all faults for which :func:`run_script` would refuse, with remedies.

    Runs the script until Megatron has its arguments; installs and builds nothing.
    """
    if fault := unmet_version("megatron-core", NEEDED["megatron-core"]):
        return [f"{FLAG}: {fault}."]
    with quiet():
        from moe_optim.integration import cpu_runtime
        from moe_optim.integration.preflight import find_late_install, list_faults

        if cpu:
            cpu_runtime.install()
    sys.argv = [str(script), *argv]
    faults = list_faults(lambda: _run_as_main(script), argv)
    missing = missing_for_datasets()
    others = (find_late_install(script), missing and f"{missing}.")
    return [*faults, *(fault for fault in others if fault)]


def _run_as_main(script: Path) -> None:
    path = str(script.absolute())
    main = ModuleType("__main__")  # runpy would change argv[0], and remove the module afterwards
    main.__file__ = path
    sys.modules["__main__"] = main
    exec(compile(script.read_bytes(), path, "exec", dont_inherit=True), vars(main))
