"""Scripts and trees for `moe-optim run` and `moe-optim patch`, made where a test wants them."""

import hashlib
import shutil
from pathlib import Path

import pytest

from moe_optim.environment import find_folder
from moe_optim.integration.source_diffs import load_diffs

PRETRAIN = """
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from moe_optim.commands.train.pretrain import build_datasets, forward_step

if __name__ == "__main__":
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)
"""
"""What ``pretrain_gpt.py`` of Megatron-LM does: it knows of no flag of this package."""


def write_fake_tree(tree: Path, version: str = "0.19.1") -> Path:
    """Write a tree that looks like a checkout of Megatron-LM from outside, and return its path."""
    for package in ("core", "training"):
        (tree / "megatron" / package).mkdir(parents=True)
        (tree / "megatron" / package / "__init__.py").touch()
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    lines = [f"{part} = {number}" for part, number in numbers]
    (tree / "megatron" / "core" / "package_info.py").write_text("\n".join(lines) + "\n")
    return tree


def wheel_has_the_diffed_files() -> bool:
    """Return whether the diffs can be tried on the installed wheel."""
    core = find_folder("megatron.core")
    return core is not None and all(
        diff.state(core.parents[1]) == "not applied" for diff in load_diffs()
    )


needs_diffed_files = pytest.mark.skipif(
    not wheel_has_the_diffed_files(),
    reason="the installed megatron-core has other files than core_v0.19.0, which the diffs are of",
)
"""Of tests that apply the diffs; what becomes of a tree with other files has tests of its own."""


def copy_diffed_files(tree: Path) -> Path:
    """Copy the files that the source diffs change from the installed wheel, and return ``tree``.

    They are the same bytes as in core_v0.19.0, which the names in the diffs hold.
    """
    core = find_folder("megatron.core")
    assert core is not None
    root = core.parents[1]
    (tree / "megatron" / "core").mkdir(parents=True)
    shutil.copy2(core / "__init__.py", tree / "megatron" / "core")
    for diff in load_diffs():
        if diff.before is not None:
            (tree / diff.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / diff.path, tree / diff.path)
    return tree


def fingerprint(tree: Path) -> dict[str, tuple[str, int]]:
    """Return the hash and the mode of every file below ``tree``."""
    return {
        str(path.relative_to(tree)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mode,
        )
        for path in sorted(tree.rglob("*"))
        if path.is_file()
    }
