"""Applies and reverts patches of Megatron: idempotent, and checked before anything changes."""

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, wraps
from types import ModuleType
from typing import Any

from moe_optim.environment import NEEDED, find_package, satisfies
from moe_optim.errors import PatchError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patch:
    """A name in Megatron and its replacement.

    Targets and replacements are written ``module:attribute`` (``module:Class.attribute`` for a
    method); nothing is imported before the patch is applied.
    """

    id: str
    target: str
    replacement: str
    form: str
    """Form of the target in supported versions; any other is refused. ``(names, of,
    parameters)``, prefixed by ``static`` for a static method; ``class``; or the type name of a
    constant."""
    because: str
    remove_when: str  # upstream change that makes the patch obsolete
    _: KW_ONLY
    other_forms: tuple[str, ...] = ()  # forms of the target on branches of Megatron
    not_needed_with: tuple[str, ...] = ()  # modules whose presence makes the patch unnecessary
    only_if_there: bool = False  # whether to skip the patch if Megatron lacks the target
    is_deferred: bool = False
    """Whether the replacement, a function, is imported on its first call. Until then nothing
    compares its parameters; :func:`patch_state` does."""
    is_imported_by_name: bool = False
    """Whether to rebind the target in every loaded module that has it, under whatever name. Modules
    that import it later keep the replacement, also after it is reverted."""


@dataclass(kw_only=True)
class _Applied:
    original: Any
    importers: list[tuple[Any, str]]  # modules and names rebound with the target
    is_inherited: bool  # whether a base class defines the target
    holders: set[str] = field(default_factory=set)


_applied: dict[str, _Applied] = {}  # by target


def resolve(path: str) -> tuple[Any, str, Any]:
    """Return owner, attribute name and current object of ``module:attribute``."""
    module_name, _, attribute_path = path.partition(":")
    *owners, name = attribute_path.split(".")
    owner: Any = importlib.import_module(module_name)
    for step in owners:
        owner = getattr(owner, step)
    return owner, name, inspect.getattr_static(owner, name)


def apply_patches(patches: Iterable[Patch], holder: str = "") -> None:
    """Apply patches; skip those already applied or not needed.

    All targets are checked before the first is rebound, so a PatchError, for a missing target or
    one whose form its replacement does not support, changes nothing. A patch stays until all
    holders have reverted it.
    """
    patches = tuple(patches)
    plan, version = [], _core_version()
    for patch in patches:
        if patch.target in _applied or not _is_needed(patch):
            continue
        if why := _misfit(patch, version, loads=not patch.is_deferred):
            raise PatchError(
                f"patch {patch.id}: {patch.target}: {why}. Install a megatron-core "
                f"{NEEDED['megatron-core']}; `moe-optim doctor` checks all patches."
            )
        found = resolve(patch.target)
        importers = _find_importers(found[2]) if patch.is_imported_by_name else []
        plan.append((patch, *found, _replacement(patch, found[2]), importers))
    for patch, owner, name, original, replacement, importers in plan:
        _applied[patch.target] = _Applied(
            original=original, importers=importers, is_inherited=name not in vars(owner)
        )
        setattr(owner, name, replacement)
        for importer, its_name in importers:
            setattr(importer, its_name, replacement)
        logger.debug("patch %s: %s -> %s", patch.id, patch.target, patch.replacement)
    for patch in patches:
        if patch.target in _applied:
            _applied[patch.target].holders.add(holder)


def _replacement(patch: Patch, original: Any) -> Any:
    if not patch.is_deferred:
        return resolve(patch.replacement)[2]
    find = cache(resolve)

    @wraps(original)
    def import_and_call(*args: Any, **kwargs: Any) -> Any:
        return find(patch.replacement)[2](*args, **kwargs)

    return import_and_call


def revert_patches(patches: Iterable[Patch], holder: str = "") -> None:
    """Restore the original of every target that no other holder needs."""
    for patch in patches:
        if patch.target not in _applied:
            continue
        applied = _applied[patch.target]
        applied.holders.discard(holder)
        if applied.holders:
            continue
        del _applied[patch.target]
        owner, name, replacement = resolve(patch.target)
        for importer, its_name in applied.importers:
            if getattr(importer, its_name, None) is replacement:
                setattr(importer, its_name, applied.original)
        if applied.is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, applied.original)


def _find_importers(target: Any) -> list[tuple[Any, str]]:
    """Return all loaded modules but ours that have ``target``, each with the name it has there."""
    found = []
    for module in list(sys.modules.values()):
        if not issubclass(type(module), ModuleType):  # cffi's libraries claim another class
            continue
        names = ModuleType.__getattribute__(module, "__dict__")  # lazy modules override it
        if not str(names.get("__name__")).startswith("moe_optim."):
            found += [(module, name) for name, value in list(names.items()) if value is target]
    return found


def is_rebound(target: str) -> bool:
    """Return whether the replacement of ``module:attribute`` is applied."""
    return target in _applied


def original(target: str) -> Any:
    """Return Megatron's original object at ``module:attribute``, for replacements to call.

    It is the object that the patch replaced, including wrappers of other packages; the current
    object if no patch is applied (a patched tree, a direct call).
    """
    found = _applied[target].original if target in _applied else resolve(target)[2]
    return found.__func__ if isinstance(found, staticmethod) else found


def patch_state(patch: Patch) -> str:
    """Return ``applied``, ``off``, ``not needed`` or ``broken: <why>``, without side effects."""
    if is_rebound(patch.target):
        return "applied"
    if not _is_needed(patch):
        return "not needed"
    why = _misfit(patch, _core_version(), loads=True)
    return f"broken: {why}" if why else "off"


def _is_needed(patch: Patch) -> bool:
    if any(_is_importable(name) for name in patch.not_needed_with):
        return False
    if not patch.only_if_there:
        return True
    try:
        resolve(patch.target)
    except (ImportError, AttributeError):
        return False
    return True


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is absent
        return False


def _core_version() -> str:
    package = find_package("megatron-core")
    return package.version if package else "unknown"


def _misfit(patch: Patch, version: str, *, loads: bool) -> str | None:
    """Return why a patch cannot be applied; ``loads`` imports the replacement to compare it."""
    needed = NEEDED["megatron-core"]
    forms = (patch.form, *patch.other_forms)
    name = f"megatron-core {version}"
    expected = f"expected {' or '.join(forms)} of megatron-core {needed}"
    try:
        original = resolve(patch.target)[2]
    except (ImportError, AttributeError) as error:
        return f"{expected}, got none in {name} ({error})"
    form = form_of(original)
    if form not in forms or not satisfies(version, needed):
        return f"{expected}, got {form} in {name}"
    if not loads:
        return None
    try:
        replacement = resolve(patch.replacement)[2]
    except (ImportError, AttributeError) as error:
        return f"expected {patch.replacement} to be there, got with {name}: {error}"
    if isinstance(original, type):
        return _misfit_of_class(original, replacement, name)
    is_fit = (
        _takes_calls_of(replacement, original)
        if callable(_function(original))
        else form_of(replacement) == form
    )
    return None if is_fit else f"expected a replacement for {form}, got {form_of(replacement)}"


def _misfit_of_class(original: type, replacement: Any, name: str) -> str | None:
    if not (isinstance(replacement, type) and issubclass(replacement, original)):
        return f"expected a base class of the replacement, got {original.__qualname__} in {name}"
    for method, mine, theirs in overridden(original, replacement):
        if not _takes_calls_of(mine, theirs):
            return f"expected {method} {form_of(mine)}, got {method} {form_of(theirs)} in {name}"
    return None


def overridden(original: type, replacement: type) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, our definition and Megatron's of every method that a subclass overrides."""
    ours = replacement.__mro__[: replacement.__mro__.index(original)]
    for name in dict.fromkeys(key for cls in ours for key in vars(cls)):
        theirs = inspect.getattr_static(original, name, None)
        mine = inspect.getattr_static(replacement, name)
        if inspect.isfunction(_function(theirs)) and inspect.isfunction(_function(mine)):
            yield name, mine, theirs


def _takes_calls_of(mine: Any, theirs: Any) -> bool:
    """Return whether ``mine`` names the same parameters as ``theirs``, or forwards the others.

    Forwarded parameters (``*args, **kwargs``) may change between versions, and parameters with a
    default after those of ``theirs`` exist in some. A ``theirs`` that only forwards, such as a
    wrapper, always fits.
    """
    if isinstance(mine, staticmethod) != isinstance(theirs, staticmethod):
        return False
    mine, theirs = _function(mine), _function(theirs)
    if not callable(mine) or isinstance(mine, type):
        return False
    ours = inspect.signature(mine).parameters.values()
    expected = inspect.signature(theirs).parameters.values()
    if {one.kind for one in expected} >= {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }:
        return True
    names = [one.name for one in expected]
    if any(one.kind is one.VAR_KEYWORD for one in ours):
        positional = [one.name for one in ours if one.kind is one.POSITIONAL_OR_KEYWORD]
        return positional == names[: len(positional)]
    later = list(ours)[len(names) :]
    is_called_without = all(one.default is not one.empty for one in later)
    return [one.name for one in ours][: len(names)] == names and is_called_without


def form_of(found: Any) -> str:
    """Return the form of an object, in the syntax of :attr:`Patch.form`."""
    function = _function(found)
    if isinstance(function, type):
        return "class"
    if not callable(function):
        return type(function).__name__
    names = ", ".join(inspect.signature(function).parameters)
    return f"{'static ' if isinstance(found, staticmethod) else ''}({names})"


def _function(found: Any) -> Any:
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found
