"""Compilation of the C++ dataset helper, which the megatron-core wheel ships prebuilt."""

from importlib.util import find_spec

from moe_optim.environment import find_folder, missing_for_datasets
from moe_optim.errors import ConfigError
from moe_optim.integration.engine import original

_DATASETS = "megatron.core.datasets"


def compile_helpers() -> None:
    """Compile the helper if it has a Makefile or is missing.

    Megatron always calls ``make``, and exits if it fails, as with the wheel, which has no Makefile.
    ConfigError if pybind11 is missing, without which Megatron would exit.
    """
    if missing := missing_for_datasets():
        raise ConfigError(f"{missing}.")
    folder = find_folder(_DATASETS)
    has_makefile = folder is not None and (folder / "Makefile").exists()
    if has_makefile or find_spec(f"{_DATASETS}.helpers_cpp") is None:
        original(f"{_DATASETS}.utils:compile_helpers")()
