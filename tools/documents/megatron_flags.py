"""Flags of the installed Megatron, recorded in ``moe_optim/commands/plan/megatron_flags.json``.

``python -m tools.documents.megatron_flags`` writes the file; it keeps the names of other versions
whose flags are the same.
"""

import argparse
import importlib.metadata
import json

import pytest

from moe_optim.commands.plan.flags import RECORD, TYPES, is_recorded
from moe_optim.environment import find_package

_ACTIONS = {
    argparse._StoreAction: "value",
    argparse._StoreTrueAction: "true",
    argparse._StoreFalseAction: "false",
    argparse.BooleanOptionalAction: "boolean",
}
recorded = pytest.mark.skipif(
    not is_recorded(find_package("megatron-core")),
    reason="a Megatron whose flags are not in the record is imported for a plan",
)
PLAIN = (type(None), bool, int, float, str)


def megatron_parser():
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def describe_flag(action):
    """Return the attributes of a flag, omitting argparse's defaults."""
    kind = _ACTIONS[type(action)]
    names = action.option_strings
    if kind == "boolean":
        names = [name for name in names if not name.startswith("--no-")]
    flag = {"names": names, "action": kind, "dest": action.dest}
    if kind == "value":
        name = getattr(action.type, "__name__", "str")
        flag |= {"type": name} if name in TYPES and name != "str" else {}
        flag |= {"nargs": action.nargs} if action.nargs is not None else {}
        if action.choices and action.type in (None, str, int, float):
            flag["choices"] = list(action.choices)
    usual = {"true": False, "false": True}.get(kind)  # argparse's default
    if action.default is not usual and type(action.default) in PLAIN:
        flag["default"] = action.default
    return flag


def describe_flags():
    actions = megatron_parser()._actions
    return [describe_flag(one) for one in actions if not isinstance(one, argparse._HelpAction)]


def spell_flags():
    found, record = describe_flags(), json.loads(RECORD.read_text())
    versions = {importlib.metadata.version("megatron-core")}
    if record["flags"] == found:
        versions.update(record["versions"])
    flags = ",\n".join(map(json.dumps, found))
    return f'{{"versions": {json.dumps(sorted(versions))}, "flags": [\n{flags}\n]}}\n'


if __name__ == "__main__":
    RECORD.write_text(spell_flags(), encoding="utf-8")
