"""The C++ helper of Megatron's datasets, which the wheel of megatron-core ships built."""

import importlib

from moe_optim.megatron.patching.engine import original


def compile_helpers() -> None:
    """Make sure that the helper can be imported, and compile it as Megatron does where it cannot.

    Megatron calls ``make`` in any case, for which the wheel has no Makefile, and exits.
    """
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        original("megatron.core.datasets.utils:compile_helpers")()
