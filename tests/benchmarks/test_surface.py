"""The command line of the benchmarks: changing it has to change this file."""

import argparse

from benchmarks import __main__ as bench

SURFACE = {  # benchmark -> its positionals and options
    "convert": {"--gigabytes", "--dir", "--to", "--json"},
    "experts": {"--experts", "--shape", "--bits", "--device", "--json"},
    "export": {"--format", "--model", "--ranks", "--json"},
    "gather": {"--format", "--shape-set", "--ranks", "--json"},
    "offload": {"--format", "--shape-set", "--offload-states", "--json"},
    "requantize": {"--format", "--shape-set", "--shard", "--against", "--json"},
    "step": {
        *("RECIPE", "--against", "--iterations", "--rounds", "--ranks", "--set", "--json"),
        *("--out", "--logs", "--deterministic"),
    },
}


def options(parser):
    """Return the options of a parser, and its positionals in capitals."""
    return {
        name
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction)
        for name in action.option_strings or [action.metavar or action.dest]
    }


def test_benchmarks_have_these_options_and_no_others():
    (kinds,) = bench.build_parser()._subparsers._group_actions
    found = {name: options(parser) for name, parser in kinds.choices.items()}
    assert found == SURFACE
