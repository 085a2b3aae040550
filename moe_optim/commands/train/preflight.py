"""Checks the flags of ``moe-optim train`` in a process of its own, before any rank starts.

Started as ``python -m moe_optim.commands.train.preflight MEGATRON_ARGS`` with a rank's environment.
Writes a JSON list of what is wrong, one sentence each, to stdout.
"""

import json
import os
import sys
from functools import partial

from moe_optim.commands.train.pretrain import refuse_unsupported
from moe_optim.integration import cpu_runtime
from moe_optim.integration.arguments import add_moe_optim_arguments
from moe_optim.integration.preflight import list_faults


def main() -> int:
    """Check the arguments of this process; return 0."""
    if os.environ.get("MOE_OPTIM_CPU") == "1":
        cpu_runtime.install()

    from megatron.training.arguments import parse_and_validate_args

    from moe_optim.commands.train.layer_spec import layer_spec

    parse = partial(parse_and_validate_args, extra_args_provider=add_moe_optim_arguments)
    faults = list_faults(parse, sys.argv[1:], refuse_unsupported, layer_spec=layer_spec)
    print(json.dumps(faults))
    return 0


if __name__ == "__main__":
    sys.exit(main())
