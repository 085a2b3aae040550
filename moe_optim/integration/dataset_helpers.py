"""The C++ helper of Megatron's datasets, which the wheel of megatron-core ships built."""

from importlib.util import find_spec

from moe_optim.environment import find_folder, missing_for_datasets
from moe_optim.errors import ConfigError
from moe_optim.integration.engine import original

_DATASETS = "megatron.core.datasets"


def compile_helpers() -> None:
    """Have Megatron compile the helper where it can or has to.

    Megatron always calls ``make``, for which the wheel has no Makefile, and then exits.

    Raises:
        ConfigError: pybind11 is missing, without which Megatron would exit.
    """
    if missing := missing_for_datasets():
        raise ConfigError(f"{missing}.")
    folder = find_folder(_DATASETS)
    has_makefile = folder is not None and (folder / "Makefile").exists()
    if has_makefile or find_spec(f"{_DATASETS}.helpers_cpp") is None:
        original(f"{_DATASETS}.utils:compile_helpers")()
