"""The engine that rebinds names of Megatron: idempotent, reversible, and checked before it acts."""

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from moe_optim.errors import PatchError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One name of Megatron and what stands there instead.

    Targets and replacements are written ``module:attribute`` (``module:Class.attribute`` for a
    method); nothing is imported before the patch is applied.
    """

    id: str
    target: str
    replacement: str
    because: str
    """Why no supported hook does the job."""
    remove_when: str
    """What upstream has to offer for this patch to go."""
    not_needed_with: tuple[str, ...] = field(default=())
    """Modules whose presence makes the patch unnecessary."""


_originals: dict[str, Any] = {}  # target -> the object that stood there
_inherited: set[str] = set()  # targets that stood on a base class
_holders: dict[str, set[str]] = {}  # patch id -> who needs it


def _resolve(path: str) -> tuple[Any, str, Any]:
    """Return owner, attribute name and current object of ``module:attribute``."""
    module_name, _, attribute_path = path.partition(":")
    *owners, name = attribute_path.split(".")
    owner: Any = importlib.import_module(module_name)
    for step in owners:
        owner = getattr(owner, step)
    return owner, name, inspect.getattr_static(owner, name)


def _mismatch(original: Any, replacement: Any) -> str | None:
    """Say why ``replacement`` cannot stand where ``original`` stands, or None if it can."""
    static = [isinstance(x, staticmethod) for x in (original, replacement)]
    original, replacement = (
        x.__func__ if isinstance(x, staticmethod | classmethod) else x
        for x in (original, replacement)
    )
    if isinstance(original, type):
        if not (isinstance(replacement, type) and issubclass(replacement, original)):
            return f"{original.__qualname__} is no longer a base of the replacement"
    elif callable(original):
        want, got = (list(inspect.signature(f).parameters) for f in (original, replacement))
        if want != got:
            return f"it now takes ({', '.join(want)}), the replacement takes ({', '.join(got)})"
        if static[0] != static[1]:
            return "one of the two is a static method, the other is not"
    elif type(original) is not type(replacement):
        return f"it is now a {type(original).__name__}"
    return None


def _needed(patch: Patch) -> bool:
    return not any(_importable(name) for name in patch.not_needed_with)


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is absent
        return False


def apply_patches(patches: Iterable[Patch], holder: str = "") -> None:
    """Put every replacement in place; patches already applied or not needed are left alone.

    All targets are checked before the first one is rebound, so a failure changes nothing.

    Args:
        patches: what to apply.
        holder: who needs them; a patch stays until each of its holders has reverted it.

    Raises:
        PatchError: a target is gone or is not what its replacement was written for.
    """
    plan = []
    patches = tuple(patches)
    for patch in patches:
        if patch.target in _originals or not _needed(patch):
            continue
        try:
            path = patch.target
            owner, name, original = _resolve(path)
            path = patch.replacement
            replacement = _resolve(path)[2]
        except (ImportError, AttributeError) as error:
            raise PatchError(
                f"patch {patch.id}: {path} was not found ({error}). "
                "moe_optim is built for megatron-core 0.19; run `moe-optim doctor`."
            ) from error
        if why := _mismatch(original, replacement):
            raise PatchError(
                f"patch {patch.id}: {patch.target} is not what {patch.replacement} was written "
                f"for: {why}. moe_optim is built for megatron-core 0.19; run `moe-optim doctor`."
            )
        plan.append((patch, owner, name, original, replacement))
    for patch, owner, name, original, replacement in plan:
        if name not in vars(owner):
            _inherited.add(patch.target)
        setattr(owner, name, replacement)
        _originals[patch.target] = original
        logger.debug("patch %s: %s -> %s", patch.id, patch.target, patch.replacement)
    for patch in patches:
        if patch.target in _originals:
            _holders.setdefault(patch.id, set()).add(holder)


def revert_patches(patches: Iterable[Patch], holder: str = "") -> None:
    """Put back what stood at every target that no other holder needs."""
    for patch in patches:
        holders = _holders.get(patch.id, set())
        holders.discard(holder)
        if patch.target not in _originals or holders:
            continue
        owner, name, _ = _resolve(patch.target)
        original = _originals.pop(patch.target)
        if patch.target in _inherited:
            _inherited.remove(patch.target)
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def is_rebound(target: str) -> bool:
    """Return whether a replacement stands at ``module:attribute`` now."""
    return target in _originals


def original(target: str) -> Any:
    """Return what a replacement at ``module:attribute`` calls as Megatron's own.

    It is what stood there when the patch was applied, so that others' wrappers stay in place; where
    nothing is rebound (a patched tree, a direct call), what stands there now.
    """
    found = _originals[target] if is_rebound(target) else _resolve(target)[2]
    return found.__func__ if isinstance(found, staticmethod) else found


def patch_state(patch: Patch) -> str:
    """Return ``applied``, ``off``, ``not needed`` or ``broken: <why>``; changes nothing."""
    if is_rebound(patch.target):
        return "applied"
    if not _needed(patch):
        return "not needed"
    try:
        original = _resolve(patch.target)[2]
        why = _mismatch(original, _resolve(patch.replacement)[2])
    except (ImportError, AttributeError) as error:
        why = str(error)
    return f"broken: {why}" if why else "off"
