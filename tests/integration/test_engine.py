"""Patches: checked before anything is rebound, applied once, and undone without a trace."""

import inspect
import re
import sys
import types

import pytest

from moe_optim.errors import PatchError
from moe_optim.integration import engine
from moe_optim.integration.engine import Patch, apply_patches, patch_state, revert_patches
from moe_optim.integration.patches import PATCHES
from tests.support.ranks import on_ranks


class Buffer:
    def size(self, start, end):
        return end - start

    @staticmethod
    def names(kind):
        return kind


class SubBuffer(Buffer):
    """Inherits everything it has."""


class WiderBuffer(Buffer):
    """Passes on what it does not name, and has what Megatron's lacks."""

    def size(self, start, *args, **kwargs):
        return super().size(start, *args, **kwargs)

    def shrink(self, by):
        pass


def gather(group, wait=True):
    return "stock"


def our_gather(group, wait=False):
    return "ours"


def gather_on_a_branch(group, wait=True, stream=None):
    return "branch"


def our_gather_of_both(group, wait=False, stream=None):
    return "ours"


def our_size(self, start, end):
    return 0


def our_names(kind):
    return "ours"


def buffer_with(**methods):
    return type("OurBuffer", (Buffer,), methods)


UPSTREAM = {
    "Buffer": Buffer,
    "SubBuffer": SubBuffer,
    "gather": gather,
    "HAVE_FUSED": False,
    "LIMIT": 4,
}
OURS = {
    "Buffer": buffer_with(),
    "WiderBuffer": WiderBuffer,
    "OtherBuffer": buffer_with(size=lambda self, begin, end: 0),
    "UnboundBuffer": buffer_with(names=lambda self, kind: kind),
    "OtherPrefixBuffer": buffer_with(size=lambda self, begin, *args, **kwargs: 0),
    "Unrelated": type("Unrelated", (), {}),
    "gather": our_gather,
    "gather_of_both": our_gather_of_both,
    "gather_any": lambda group, *args, **kwargs: None,
    "gather_more": lambda group, wait, stream: None,
    "gather_renamed": lambda bucket, wait: None,
    "size": our_size,
    "static_names": staticmethod(our_names),
    "HAVE_FUSED": True,
    "LIMIT": "eight",
}


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    """Put a stub of Megatron and of this package where imports find them."""
    for name, content in {"upstream": UPSTREAM, "ours": OURS}.items():
        module = types.ModuleType(f"stub_{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)


FORMS = {
    "Buffer": "class",
    "Buffer.size": "(self, start, end)",
    "Buffer.names": "static (kind)",
    "SubBuffer.size": "(self, start, end)",
    "gather": "(group, wait)",
    "HAVE_FUSED": "bool",
    "LIMIT": "int",
}
"""What stands at each target."""


def make_patch(target="gather", replacement=None, **others):
    return Patch(
        id=f"test:{target}",
        form=FORMS.get(target, "(anything)"),
        target=f"stub_upstream:{target}",
        replacement=f"stub_ours:{replacement or target}",
        because="a test",
        remove_when="never",
        **others,
    )


@pytest.fixture
def applied():
    """Return a function that applies patches; they are reverted when the test ends."""
    done = []

    def apply(*patches):
        done.extend(patches)
        apply_patches(patches)

    yield apply
    revert_patches(done)


def current(name):
    return inspect.getattr_static(sys.modules["stub_upstream"], name)


# Applying and reverting


def test_an_inherited_method_is_inherited_again_afterwards():
    """A copy left on the subclass would hide what is later done to the base."""
    patch = make_patch("SubBuffer.size", "size")
    apply_patches([patch])
    assert SubBuffer().size(1, 3) == 0
    assert Buffer().size(1, 3) == 2
    revert_patches([patch])
    assert SubBuffer().size(1, 3) == 2
    assert "size" not in vars(SubBuffer)


def test_a_deferred_replacement_is_imported_at_its_first_call(applied, monkeypatch):
    """Until then the target has its signature, and only a look at its state compares the two."""
    ours = sys.modules["stub_ours"]
    monkeypatch.delitem(sys.modules, "stub_ours")
    patch = make_patch(is_deferred=True)
    assert patch_state(patch).startswith("broken: expected stub_ours:gather to be there")
    applied(patch)
    assert inspect.signature(current("gather")) == inspect.signature(gather)
    monkeypatch.setitem(sys.modules, "stub_ours", ours)
    assert current("gather")("group", wait=True) == "ours"
    assert engine.original(patch.target)("group") == "stock"
    revert_patches([patch])
    assert current("gather") is gather


BRANCH = "(group, wait, stream)"


@pytest.mark.parametrize("upstream", [gather, gather_on_a_branch])
def test_a_target_may_have_the_form_of_a_branch(applied, monkeypatch, upstream):
    """The replacement takes the calls of both: what one of them lacks has a default."""
    monkeypatch.setattr(sys.modules["stub_upstream"], "gather", upstream)
    applied(make_patch("gather", "gather_of_both", other_forms=(BRANCH,)))
    assert current("gather") is our_gather_of_both


def test_a_form_of_no_branch_is_refused_by_all_that_are_known(applied, monkeypatch):
    monkeypatch.setattr(sys.modules["stub_upstream"], "gather", lambda bucket: None)
    said = r"expected \(group, wait\) or \(group, wait, stream\) of .*, got \(bucket\) in"
    with pytest.raises(PatchError, match=said):
        applied(make_patch("gather", "gather_of_both", other_forms=(BRANCH,)))


# Refusing

MISFITS = {  # target, replacement, why
    "the target is gone": ("scatter", "gather", r"expected \(anything\) of .*, got none in "),
    "its owner is gone": ("Bucket.size", "size", "got none in .* no attribute 'Bucket'"),
    "the replacement is gone": ("gather", "scatter", "expected stub_ours:scatter to be there"),
    "a class that is no subclass": ("Buffer", "Unrelated", "a base class of the .*got Buffer in"),
    "a class whose method has another argument name": (
        *("Buffer", "OtherBuffer"),
        r"expected size \(self, begin, end\), got size \(self, start, end\) in megatron-core",
    ),
    "a class whose static method takes self": (
        *("Buffer", "UnboundBuffer"),
        r"expected names \(self, kind\), got names static \(kind\)",
    ),
    "one argument more": (
        *("gather", "gather_more"),
        r"a replacement for \(group, wait\), got \(group, wait, stream\)",
    ),
    "a static method by one that takes self": ("Buffer.names", "size", r"for static \(kind\), got"),
    "a constant of another type": ("LIMIT", "LIMIT", "a replacement for int, got str"),
}


@pytest.mark.parametrize(("target", "replacement", "why"), MISFITS.values(), ids=MISFITS.keys())
def test_a_target_that_does_not_fit_is_refused(applied, target, replacement, why):
    """The error names patch, target and version, says why, and what to install."""
    patch = make_patch(target, replacement)
    start = rf"^patch test:{re.escape(target)}: stub_upstream:{re.escape(target)}: "
    with pytest.raises(PatchError, match=rf"{start}.*{why}.*Install a megatron-core >="):
        applied(patch)
    assert patch_state(patch).startswith("broken: ")
    assert vars(sys.modules["stub_upstream"]).items() >= UPSTREAM.items()


@pytest.mark.parametrize(
    ("version", "fits"), {"0.20.0rc1": True, "unknown": True, "0.21.0": False}.items()
)
def test_other_versions_are_refused_whatever_their_names_are(applied, monkeypatch, version, fits):
    """A version that nothing says is believed."""
    monkeypatch.setattr(engine, "_core_version", lambda: version)
    if fits:
        applied(make_patch())
        assert patch_state(make_patch()) == "applied"
        return
    with pytest.raises(PatchError, match=r"core >=0.19,<0.21, got \(group, wait\) in .*0.21.0"):
        applied(make_patch())
    assert current("gather") is gather


def test_all_or_nothing(applied):
    """One misfit anywhere in the list leaves every target as it was, also those before it."""
    good, bad, later = make_patch(), make_patch("LIMIT"), make_patch("Buffer")
    with pytest.raises(PatchError, match="test:LIMIT"):
        applied(good, bad, later)
    assert [patch_state(patch) for patch in (good, later)] == ["off", "off"]
    assert vars(sys.modules["stub_upstream"]).items() >= UPSTREAM.items()


# Knowing


@pytest.mark.parametrize(
    ("modules", "state"),
    [
        (("json",), "not needed"),
        (("no_such_package", "json.decoder"), "not needed"),
        (("no_such_package", "no_such_package.inner"), "off"),
        ((), "off"),
    ],
    ids=["there", "one of two is there", "none is there", "always needed"],
)
def test_what_another_package_brings_is_not_patched(applied, modules, state):
    """Presence is looked up without importing anything."""
    patch = make_patch(not_needed_with=modules)
    assert patch_state(patch) == state
    applied(patch)
    assert current("gather") is (gather if state == "not needed" else our_gather)


def test_a_fault_that_this_megatron_has_not_got_is_not_mended(applied):
    """Anywhere else a target that is gone is an error."""
    applied(make_patch("gone", only_if_there=True), make_patch(only_if_there=True))
    assert patch_state(make_patch("gone", only_if_there=True)) == "not needed"
    assert current("gather") is our_gather


# The table itself


def test_ids_and_targets_are_unique_and_every_patch_says_why_and_until_when():
    """One name is rebound by one patch, or reverting would depend on the order."""
    assert len({patch.id for patch in PATCHES}) == len(PATCHES)
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        assert patch.target.startswith("megatron."), patch
        assert patch.replacement.startswith("moe_optim."), patch
        assert min(len(patch.because.split()), len(patch.remove_when.split())) > 3, patch


@on_ranks(1)
def test_replacements_take_the_calls_of_every_form():
    """Also of those that this Megatron's names do not have."""
    for patch in PATCHES:
        for form in patch.other_forms:
            scope: dict = {}
            exec(f"def found{form}: ...", scope)  # noqa: S102
            owner, name, _ = engine.resolve(patch.target)
            setattr(owner, name, scope["found"])
            assert patch_state(patch) == "off", patch.id


def resolve(path):
    try:
        return engine.resolve(path)[2]
    except AttributeError:  # a fault that this Megatron has not got
        return None


@on_ranks(1)
def test_the_table_applies_and_reverts_on_this_megatron():
    """Each patch alone and all together: every target is ours meanwhile and Megatron's after."""
    report = {}
    for patch in PATCHES:
        before, states = resolve(patch.target), [patch_state(patch)]
        apply_patches([patch])
        states.append(patch_state(patch))
        there = resolve(patch.target)
        if patch.is_deferred:
            is_ours = there is not before and inspect.unwrap(there) is inspect.unwrap(before)
        else:
            is_ours = there is resolve(patch.replacement)
        revert_patches([patch])
        states.append(patch_state(patch))
        report[patch.id] = (states, is_ours, resolve(patch.target) is before)
    before = [resolve(patch.target) for patch in PATCHES]
    apply_patches(PATCHES)
    apply_patches(PATCHES)
    together = [patch_state(patch) for patch in PATCHES]
    revert_patches(PATCHES)
    after = [resolve(patch.target) for patch in PATCHES]
    identical = all(a is b for a, b in zip(after, before, strict=True))
    needed = ["off", "applied", "off"]
    skipped = ["not needed"] * 3  # an accelerated optimizer is installed here, or no such fault
    for id, (states, is_ours, is_restored) in report.items():
        assert states in (needed, skipped), id
        assert is_ours or states == skipped, id
        assert is_restored, id
    assert set(together) <= {"applied", "not needed"}
    assert identical
