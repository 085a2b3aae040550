"""The Transformer Engine that tests use, and its formats."""

import os
import sys
from importlib.metadata import distributions

from moe_optim.environment import satisfies


def find_version(package: str = "transformer-engine") -> str | None:
    """Return the version that ranks import, also from ``TRANSFORMER_ENGINE_PATH``."""
    folders = os.environ.get("TRANSFORMER_ENGINE_PATH", "").split(os.pathsep)
    found = distributions(name=package, path=[*filter(None, folders), *sys.path])
    return next((one.version for one in found), None)


def versions_of_ranks() -> dict[str, str | None]:
    """Return package -> version that ranks import, for packages that the tests need."""
    return {name: find_version(name) for name in ("torch", "megatron-core", "transformer-engine")}


_SQUARE = ("mxfp8_2d",) if satisfies(find_version() or "", ">=2.19") else ()
FORMATS = ("mxfp8", *_SQUARE, "nvfp4", "fp8_block", "fp8_block_fp32")
"""Formats of its tensors; 2.19 is the first with square blocks of MXFP8."""
