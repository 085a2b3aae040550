"""A pytest plug-in that installs moe_optim, and records which of its functions each case ran.

Imported by its bare name, like ``outcome_lines``; ``MOE_OPTIM_SET`` contains assignments of knobs.

Upstream's tests import classes from their defining modules, which install() does not patch. This
plug-in therefore replaces the same names in the test modules, so that cases build models, load and
save as training does. Only the package itself patches Megatron.
"""

import gc
import os
import sys
from pathlib import Path
from types import FunctionType

import pytest

_TOOL = 4  # tool id of sys.monitoring; unused by convention
_NOT_REPLACED = {"get-megatron-optimizer"}  # refuses other optimizers, which some cases build
_ran: set[str] = set()
_replaced: dict[int, object] = {}


@pytest.hookimpl  # after prepare_megatron, before any conftest imports Megatron
def pytest_load_initial_conftests():
    import moe_optim
    from moe_optim.integration import patches
    from moe_optim.integration.engine import original, resolve, revert_patches
    from moe_optim.integration.installation import HOLDER

    assignments = os.environ.get("MOE_OPTIM_SET", "").split()
    moe_optim.install(moe_optim.MoEOptimConfig().replace_from(assignments, "MOE_OPTIM_SET"))
    checkpoints = (*patches.CHECKPOINTS, *patches.CHECKPOINTS_OF_RANKS)
    for patch in (*patches.OPTIMIZER, *checkpoints):
        if patch.id not in _NOT_REPLACED:
            _replaced[id(original(patch.target))] = resolve(patch.replacement)[2]
    # cases request grouped experts of the local spec, which ignores it; ours refuse GELU and
    # initialization on the CPU
    revert_patches(patches.EXPERTS, HOLDER)
    from moe_optim.optimizer import requirements

    # meant for training; a case compares quantized and bf16 models in one process
    requirements.check_setup = lambda *_: None


def pytest_collection_finish(session):
    modules = {item.module for item in session.items}
    modules |= {module for name, module in sys.modules.items() if name.startswith("tests.unit_")}
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in _replaced:
                setattr(module, name, _replaced[id(value)])
    _listen()


def pytest_runtest_logstart():
    _ran.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    if call.when == "teardown":
        item.user_properties.append(("ran", sorted(_ran)))


def _listen():
    """Record every call of a moe_optim function, except those that replace apex or CUDA."""
    import moe_optim
    from moe_optim.integration import cpu_runtime
    from moe_optim.optimizer import adam

    folder, left_out = Path(moe_optim.__file__).parent, {adam.__file__, cpu_runtime.__file__}
    sys.monitoring.use_tool_id(_TOOL, "moe_optim")
    event = sys.monitoring.events.PY_START
    sys.monitoring.register_callback(_TOOL, event, lambda code, _: _ran.add(code.co_qualname))
    for function in [found for found in gc.get_objects() if isinstance(found, FunctionType)]:
        path = function.__code__.co_filename
        if folder in Path(path).parents and path not in left_out:
            sys.monitoring.set_local_events(_TOOL, function.__code__, event)
