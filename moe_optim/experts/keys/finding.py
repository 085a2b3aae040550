"""Search for experts in a state dict by exact keys: complete sets, or all faults by key."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from moe_optim.errors import LayoutError, MoEOptimError
from moe_optim.experts.keys.layouts import (
    LAYOUTS,
    ExpertSet,
    KeyLayout,
    KeyPattern,
    is_calibrated_amax,
    is_extra_state,
    is_of_adapter,
    match_key,
)

EntryShape = tuple[int, ...] | None  # shape of a tensor; None for other entries

MAX_EXPERTS = 65_536  # maximum number of experts per layer accepted from a file

_ROUTERS = ("router.weight", "gate.weight")
"""Names of a router next to experts, in Megatron and in Hugging Face models."""
_NUMBER = re.compile(r"\d+")
_CONTAINER = re.compile(r"(?:.*\.)?experts\.", re.DOTALL)

_Found = dict[str, tuple[KeyPattern, int | None, EntryShape]]
"""Key -> its pattern and expert in a layout, and its shape."""


def find_expert_sets(
    shapes: Mapping[str, Sequence[int] | None],
    *,
    layouts: Sequence[KeyLayout] | None = None,
    num_experts: int | None = None,
    prefixes: Collection[str] | None = None,
) -> list[ExpertSet]:
    """Return the experts of every layer in a state dict, in the order of its keys.

    A container is everything after the component ``experts.``, or a root key that matches an expert
    key entirely. It must be one complete set of one layout, apart from calibrated amaxes and
    adapter weights. If some layers have a router next to their experts, every layer with a router
    must have experts.

    Args:
        shapes: shapes of all entries of a flat state dict; None for an entry that is not a tensor.
        layouts: layouts to search for; None for all named ones. Shapes distinguish ``hf`` from
            ``hf_transposed`` unless F equals H.
        num_experts: number of experts per layer, required for ``legacy``; without it, a missing
            last expert goes unnoticed in layouts with one key per expert.
        prefixes: containers to search, all of which must have experts; None for any.

    Raises:
        LayoutError: keys of no layout or of several, missing keys, gaps, wrong or inconsistent
            shapes, entries that are not tensors: all faults of all containers, by key.
    """
    sets, faults = survey_expert_sets(
        shapes, layouts=layouts, num_experts=num_experts, prefixes=prefixes
    )
    refuse_keys(faults)
    return sets


def survey_expert_sets(
    shapes: Mapping[str, Sequence[int] | None],
    *,
    layouts: Sequence[KeyLayout] | None = None,
    num_experts: int | None = None,
    prefixes: Collection[str] | None = None,
) -> tuple[list[ExpertSet], list[str]]:
    """Return complete sets and all faults, where :func:`find_expert_sets` raises."""
    layouts = tuple(LAYOUTS.values()) if layouts is None else layouts
    containers: dict[str, dict[str, EntryShape]] = {prefix: {} for prefix in prefixes or ()}
    for key, shape in shapes.items():
        prefix = _prefix_of(key, layouts, prefixes)
        remainder = key.removeprefix(prefix or "")
        if prefix is not None and not (is_calibrated_amax(remainder) or is_of_adapter(remainder)):
            found_shape = None if shape is None else tuple(shape)
            containers.setdefault(prefix, {})[remainder] = found_shape
    sets, faults = [], []
    for prefix, entries in containers.items():
        expert_set, new_faults = _read_container(prefix, entries, layouts, num_experts)
        faults += new_faults
        if expert_set is not None:
            sets.append(expert_set)
    if prefixes is None:
        faults += _routers_alone(shapes, containers)
    return sets, faults


def _routers_alone(keys: Collection[str], containers: Collection[str]) -> list[str]:
    """Return faults of routers without experts, if similar layers have experts."""
    modules = [prefix.removesuffix("experts.") for prefix in containers if prefix]
    known = {
        _NUMBER.sub("0", module + router)
        for module in modules
        for router in _ROUTERS
        if module + router in keys
    }
    experts_of = {
        key: f"{key.removesuffix(router)}experts."
        for key in keys
        for router in _ROUTERS
        if key.endswith(f".{router}") and _NUMBER.sub("0", key) in known
    }
    return [
        f"{router}: expected experts beside it, as in other layers, got none of {experts}"
        for router, experts in experts_of.items()
        if experts not in containers
    ]


def refuse_conversion(
    expected: str,
    faults: Sequence[str],
    remedy: str = "Change these entries.",
    *,
    kind: type[MoEOptimError] = LayoutError,
    unit: str = "fault(s)",
) -> None:
    """Raise ``kind`` with one line per fault of what was to be converted, if there are any."""
    if faults:
        lines = "".join(f"  {fault}\n" for fault in faults)
        raise kind(f"{expected}, got {len(faults)} {unit}:\n{lines}Nothing was converted. {remedy}")


def refuse_keys(faults: Sequence[str]) -> None:
    """Raise one LayoutError for all faults, if any."""
    refuse_conversion(
        "expert keys: expected complete sets of one layout each",
        faults,
        "Change these entries, or name the containers to look into.",
    )


def shape_faults(expert_set: ExpertSet, shapes: Mapping[str, EntryShape]) -> list[str]:
    """Return missing, surplus and misshapen entries of a set.

    ``shapes`` contains all entries of its container except extra states, by full key.
    """
    expected = expert_set.shapes()
    agreeing = [key for key, shape in expected.items() if shapes.get(key) == shape]
    faults = []
    for pattern, expert, key in expert_set.entries():
        if key not in shapes:
            beside = [expert_set.prefix + other.key(expert) for other in expert_set.patterns]
            given = next((other for other in beside if other in shapes), "the others")
            faults.append(f"{key}: missing, expected beside {given}")
        elif shapes[key] is None:
            faults.append(f"{key}: expected a tensor {list(expected[key])}, got something else")
        elif shapes[key] != expected[key]:
            reference = f", to agree with {agreeing[0]}" if agreeing else ""
            faults.append(
                f"{key}: expected {list(expected[key])} ({', '.join(pattern.stored)}){reference}, "
                f"got {list(shapes[key] or ())}"
            )
    size = expert_set.num_experts
    following = expert_set.prefix + expert_set.patterns[0].key(size)
    reason = "" if following in shapes else f", as there is no {following}"
    surplus = (key for key in shapes if key not in expected)
    return faults + [f"{key}: expected experts 0 to {size - 1} only{reason}" for key in surplus]


def _prefix_of(
    key: str, layouts: Sequence[KeyLayout], prefixes: Collection[str] | None
) -> str | None:
    if prefixes is not None:
        return max((p for p in prefixes if key.startswith(p)), key=len, default=None)
    if prefix := container_of(key):
        return prefix
    is_expert = is_extra_state(key) or _matches(key, layouts)
    return "" if is_expert else None


def container_of(key: str) -> str:
    """Return the prefix of a key through its last component ``experts.``, empty without one."""
    found = _CONTAINER.match(key)
    return found[0] if found else ""


def _matches(
    remainder: str, layouts: Sequence[KeyLayout]
) -> dict[str, tuple[KeyPattern, int | None]]:
    """Return layout name -> pattern and expert, for layouts that contain a remainder."""
    found = {}
    for layout in layouts:
        for pattern in layout.patterns:
            match = match_key(remainder, pattern.template)
            if match is not None:
                found[layout.name] = (pattern, match[0])
    return found


def _read_container(
    prefix: str,
    entries: Mapping[str, EntryShape],
    layouts: Sequence[KeyLayout],
    num_experts: int | None,
) -> tuple[ExpertSet | None, list[str]]:
    extra = tuple(prefix + remainder for remainder in entries if is_extra_state(remainder))
    matches = {r: _matches(r, layouts) for r in entries if not is_extra_state(r)}
    names = ", ".join(layout.name for layout in layouts)
    faults = [
        f"{prefix}{remainder}: expected a key of layout {names}, got one of none"
        for remainder, found in matches.items()
        if not found
    ]
    matches = {remainder: found for remainder, found in matches.items() if found}
    if not matches:
        what = extra[0] if extra else prefix or "the root"
        return None, faults or [f"{what}: expected weights of experts there, got none"]
    candidates = [layout for layout in layouts if all(layout.name in m for m in matches.values())]
    if not candidates:
        faults += [
            f"{prefix}{remainder}: expected one layout in a container, got a key of "
            f"{' or '.join(found)} among others"
            for remainder, found in matches.items()
        ]
        return None, faults
    sets, rejected = [], []
    for layout in candidates:
        found_keys: _Found = {
            prefix + remainder: (*found[layout.name], entries[remainder])
            for remainder, found in matches.items()
        }
        expert_set, layout_faults = _read_layout(prefix, layout, found_keys, num_experts, extra)
        which = f" (as {layout.name})" if len(candidates) > 1 else ""
        rejected += [fault + which for fault in layout_faults]
        if expert_set is not None:
            sets.append(expert_set)
    if len(sets) > 1:
        fitting = " and ".join(s.layout.name for s in sets)
        faults += [f"{k}: fits {fitting}. Name the layout." for k in sets[0].keys]
    elif not sets:
        faults += rejected
    return (sets[0], []) if len(sets) == 1 and not faults else (None, faults)


def _read_layout(
    prefix: str,
    layout: KeyLayout,
    found: _Found,
    num_experts: int | None,
    extra_states: tuple[str, ...],
) -> tuple[ExpertSet | None, list[str]]:
    experts = num_experts or _count_experts(layout, found)
    if experts and experts > MAX_EXPERTS:
        return None, [f"{prefix}: expected at most {MAX_EXPERTS:,} experts, got {experts:,}"]
    hidden, ffn = _vote(found, "H", experts), _vote(found, "F", experts)
    if not (experts and hidden and ffn):
        first = prefix + layout.patterns[0].key(0)
        return None, [
            f"{key}: expected experts from {first} on, of shapes ({', '.join(pattern.stored)})"
            f"{_lack(layout, pattern, shape, experts)}, "
            f"got {'no tensor' if shape is None else list(shape)}"
            for key, (pattern, _, shape) in found.items()
        ]
    expert_set = ExpertSet(
        prefix=prefix,
        layout=layout,
        num_experts=experts,
        hidden=hidden,
        ffn=ffn,
        has_bias=any(pattern.is_bias for pattern, _, _ in found.values()),
        extra_states=extra_states,
    )
    faults = shape_faults(expert_set, {key: shape for key, (_, _, shape) in found.items()})
    return (None, faults) if faults else (expert_set, [])


def _lack(layout: KeyLayout, pattern: KeyPattern, shape: EntryShape, experts: int | None) -> str:
    """Return the missing information to read a shape without an expert axis."""
    if layout.shows_num_experts:
        return ""
    if not experts:
        return ": how many experts is not in them. Give it"
    if shape is None or len(shape) != len(pattern.stored):
        return ""
    units = {part: _unit(part, experts) for part in pattern.stored}
    uncut = [part for part, size in zip(pattern.stored, shape, strict=True) if size % units[part]]
    return "".join(f", of E = {experts} experts: {units[p]} must divide {p}" for p in uncut)


def _count_experts(layout: KeyLayout, found: _Found) -> int | None:
    """Return the number of experts, from consecutive keys or by majority of shapes."""
    if not any(pattern.is_per_expert for pattern in layout.patterns):
        return _vote(found, "E", None)
    numbered = {index for _, index, _ in found.values() if index is not None}
    return next(count for count in range(len(numbered) + 1) if count not in numbered)


def _vote(found: _Found, symbol: str, experts: int | None) -> int | None:
    """Return the size of an axis by majority, so that a misshapen tensor stands out."""
    votes: Counter[int] = Counter()
    for pattern, _, shape in found.values():
        if shape is None or len(shape) != len(pattern.stored):
            continue
        for part, size in zip(pattern.stored, shape, strict=True):
            unit = _unit(part, experts)
            if part[-1] == symbol and unit and size % unit == 0:
                votes[size // unit] += 1
    return votes.most_common(1)[0][0] if votes else None


def _unit(part: str, experts: int | None) -> int:
    """Return the factor of an axis such as ``E*2F``, 2 * E; 0 if E is unknown."""
    *factors, last = part.split("*")
    return (2 if last == "2F" else 1) * (experts or 0 if factors else 1)


def expert_remainders(remainders: Iterable[str]) -> set[str]:
    """Return the keys after a prefix that belong to experts in any layout, with extra states."""
    layouts = tuple(LAYOUTS.values())
    return {r for r in remainders if is_extra_state(r) or _matches(r, layouts)}
