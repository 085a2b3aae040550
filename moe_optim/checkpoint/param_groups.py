"""Maps parameter groups when optimizers are split or merged between save and load.

Experts have their own optimizer if their data-parallel group differs, so the number of optimizers
depends on the expert-parallel size. Tensors are found by name, but each group still needs the saved
group with its step, learning rate and so on.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

from moe_optim.checkpoint.state_manifest import MANIFEST, MOMENTUM, require_same_optimizer
from moe_optim.errors import LayoutError

Group = dict[str, Any]
_IDENTIFIERS = tuple(
    {**dict.fromkeys(param_group_identifier_keys), **ParamGroupOverride.__annotations__}
)
"""Group entries that tell groups apart; Megatron's dev branch compares no rates, no optimizer."""
_BY_DISTRIBUTION = "is_expert_parallel"
_RATES = ("max_lr", "min_lr")
_EPS = "eps"  # all that tells two groups of --use-mup with --decoupled-lr apart
_IGNORED = ((), (_BY_DISTRIBUTION,), _RATES, (_BY_DISTRIBUTION, *_RATES))
"""Identifiers in which a saved group may differ, if no other group matches."""
_OF_HYBRID = frozenset(
    {
        "cpu_optimizer_cls",
        "fused",
        "gpu_optimizer_cls",
        "offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
        "param_update_in_fp32",
        "pin_cpu_grads",
        "pin_cpu_params",
    }
)
"""Group entries of Megatron's ``HybridDeviceOptimizer`` (``--optimizer-cpu-offload``)."""
_KINDS = {"momentum": MOMENTUM, "betas": "exp_avg"}
"""Kind of state that an optimizer with such a group entry has."""


def states_by_part(
    state_dict: dict[Any, Any], parts: Sequence[Any], *, is_muon: bool
) -> dict[Any, Any]:
    """Return a loaded state arranged for ``parts``, the current optimizers; not modified.

    Tensors in ``state_dict`` are arranged already, everything else is as saved, of one optimizer or
    of several by index.

    Raises:
        LayoutError: the optimizer of this run did not save the groups, or one of ``parts`` has a
            group without a saved counterpart.
    """
    numbered = [state_dict[key] for key in sorted([k for k in state_dict if isinstance(k, int)])]
    saved = [one for one in (state_dict, *numbered) if "optimizer" in one]
    of_saved = [one["optimizer"]["param_groups"] for one in saved]
    of_parts = [part.optimizer.param_groups for part in parts]
    groups, own = list(chain(*of_saved)), list(chain(*of_parts))
    kinds = {kind for group in groups for name, kind in _KINDS.items() if name in group}
    has_matrices = any(["momentum" in group for group in own])
    require_same_optimizer(kinds, "optimizer", is_muon=is_muon, has_matrices=has_matrices)
    in_form = "optimizer" in state_dict if len(parts) == 1 else "optimizer" not in state_dict
    steps = [group["step"] for group in groups if "step" in group]
    have_steps = len(steps) in (0, len(groups))  # stock's Muon counts none
    # whether groups of one optimizer are of experts with ranks of their own, and others
    kinds_of_parts, kinds_of_saved = (
        [{bool(group.get(_BY_DISTRIBUTION)) for group in one} for one in of_each]
        for of_each in (of_parts, of_saved)
    )
    are_alike = kinds_of_parts == kinds_of_saved
    if not saved or (are_alike and in_form and have_steps):
        return state_dict
    groups = [{"step": steps[0], **group} if steps else group for group in groups]
    common = {key: value for key, value in saved[0].items() if not isinstance(key, int)}
    made = {}
    for number, wanted in enumerate(of_parts):
        held = state_dict if len(parts) == 1 else state_dict.get(number, {})
        found = [_find(group, groups) for group in wanted]
        made[number] = common | {"optimizer": {**common["optimizer"], "param_groups": found}}
        made[number] |= {key: value for key, value in held.items() if key == "param_state"}
    return made[0] if len(parts) == 1 else made


def as_layer_wise(state_dict: dict[Any, Any]) -> dict[Any, Any]:
    """Return a state to save with the parts of Megatron's chain for Muon; not modified.

    Megatron has one Muon for all matrices, whose groups count no steps, and one optimizer for the
    rest. Here experts with their own data-parallel group have optimizers of their own, whose groups
    and states join those of the others. States without Muon are returned as they are.
    """
    parts = [state_dict[key] for key in sorted(key for key in state_dict if isinstance(key, int))]
    if not any(map(_holds_muon, parts)):
        return state_dict
    kinds = [[part for part in parts if _holds_muon(part) is is_muon] for is_muon in (True, False)]
    return {number: _joined(alike) for number, alike in enumerate(filter(None, kinds))}


def _joined(parts: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    """Return the state to save of optimizers of one kind, by name, as of one of them."""
    groups = [
        {name: value for name, value in group.items() if name != "step" or "momentum" not in group}
        for part in parts
        for group in part["optimizer"]["param_groups"]
    ]
    states = {
        f"{number}.{key}": entry
        for number, part in enumerate(parts)
        for key, entry in part["param_state"].items()
    }
    return {
        **parts[0],
        "optimizer": {**parts[0]["optimizer"], "param_groups": groups},
        "param_state": states,
        **{
            f"{MANIFEST}.{number}": part[MANIFEST]
            for number, part in enumerate(parts[1:], 1)
            if MANIFEST in part
        },
    }


def _holds_muon(part: dict[Any, Any]) -> bool:
    return any("momentum" in group for group in part["optimizer"]["param_groups"])


def with_own_groups(state_dict: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return ``state_dict``, of one optimizer, with groups that Megatron finds those of it by.

    Groups of ``HybridDeviceOptimizer`` become those of Adam, without hybrid entries (which contain
    classes and would be saved again) and with the defaults of ``optimizer``. Learning rates become
    its own: Megatron matches groups by them, among others, and raises KeyError if they changed,
    with or without ``--override-opt_param-scheduler``. Does not modify ``state_dict``. LayoutError
    if Megatron's arguments do not override the saved rates, or several saved groups differ from one
    of ``optimizer`` by their rates alone.
    """
    saved = state_dict["optimizer"]
    groups = [
        optimizer.defaults | {key: of for key, of in group.items() if key not in _OF_HYBRID}
        if "cpu_optimizer_cls" in group
        else group
        for group in saved["param_groups"]
    ]
    fixed = [key for key in _IDENTIFIERS if key not in _RATES]
    changed = []
    for wanted in optimizer.param_groups:
        alike = [group for group in groups if _settings(group, fixed) == _settings(wanted, fixed)]
        rates = [_settings(group, _RATES) for group in alike]
        if not alike or _settings(wanted, _RATES) in rates:
            continue
        if any(one != rates[0] for one in rates):
            raise LayoutError(
                f"optimizer: expected a saved parameter group with {_shown(wanted)}, got several "
                f"with other learning rates: {'; '.join(map(_shown, alike))}. Give the rates that "
                "the checkpoint was saved with."
            )
        _require_override(alike[0], wanted)
        changed.append({**alike[0], **{key: wanted[key] for key in _RATES}})
    return {**state_dict, "optimizer": {**saved, "param_groups": groups + changed}}


def set_groups(optimizer: Any, wanted: Sequence[Group], saved: Sequence[Group]) -> None:
    """Set the entries of an optimizer's groups to those of the saved groups that match ``wanted``.

    Args:
        optimizer: optimizer whose states were loaded by Megatron, which may have mixed groups up.
        wanted: groups of ``optimizer`` as they were before.
        saved: groups from :func:`with_own_groups`.
    """
    for group, before in zip(optimizer.param_groups, wanted, strict=True):
        group.update({**_find(before, saved), "params": group["params"]})


def _require_override(saved: Group, wanted: Group) -> None:
    from megatron.training import global_vars

    args = global_vars._GLOBAL_ARGS  # None outside of Megatron's scripts
    if args is None or not args.override_opt_param_scheduler:
        raise LayoutError(
            f"optimizer: expected the learning rates that were saved, {_rates(saved)}, got "
            f"{_rates(wanted)}. Give the same --lr and --min-lr, or change them with "
            "--override-opt_param-scheduler."
        )


def _rates(group: Group) -> str:
    return " and ".join(f"{key}={group.get(key)}" for key in _RATES)


def _find(wanted: Group, saved: Sequence[Group]) -> Group:
    """Return the saved group that matches ``wanted``, ignoring its rates if necessary."""
    known = (*_IDENTIFIERS, _EPS)
    for free in [(*eps, *more) for more in _IGNORED for eps in ((), (_EPS,))]:
        keys = [key for key in known if key not in free]
        found = [group for group in saved if _settings(group, keys) == _settings(wanted, keys)]
        if found:
            return {**found[0], _BY_DISTRIBUTION: wanted.get(_BY_DISTRIBUTION)}
    raise LayoutError(
        f"optimizer: expected a saved parameter group with {_shown(wanted)}, got "
        f"{'; '.join(map(_shown, saved))}. Use the options that the checkpoint was saved with."
    )


def _settings(group: Group, keys: Sequence[str]) -> list[Any]:
    return [group.get(key, group.get(f"pre_{key}")) for key in keys]


def _shown(group: Group) -> str:
    keys = [key for key in _IDENTIFIERS if group.get(key) is not None]
    return ", ".join(f"{key}={group[key]}" for key in keys)
