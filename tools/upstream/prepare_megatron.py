"""A pytest plug-in of every rank: provides what upstream's tests assume and this machine lacks.

Imported by its bare name, like ``outcome_lines``.
"""

import gc
import os
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

_GRADIENTS = "fused_weight_gradient_mlp_cuda"
_DOWNLOAD = "tests.test_utils.python_scripts.download_unit_tests_dataset"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    # no test reads data; the module needs packages that nothing else does
    sys.modules[_DOWNLOAD] = SimpleNamespace(download_and_extract_asset=lambda **_: None)
    if find_spec(_GRADIENTS) is None:  # apex's, which the arguments of some tests require
        sys.modules[_GRADIENTS] = SimpleNamespace(
            wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate
        )
    if os.environ.get("MOE_OPTIM_CPU"):
        _run_on_cpu()


def _accumulate(tokens, output_grad, main_grad):
    main_grad.add_(output_grad.t().float() @ tokens.float())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Destroy the process groups of a case: gloo keeps threads and sockets, and Megatron drops no
    group.
    """
    import torch.distributed as dist

    if os.environ.get("MOE_OPTIM_CPU") and dist.is_initialized():
        dist.barrier()
        groups = dist.distributed_c10d._world.pg_map
        for group in [group for group in groups if group is not dist.group.WORLD]:
            dist.destroy_process_group(group)
        gc.collect()


def _run_on_cpu():
    import torch

    from moe_optim.integration import cpu_runtime

    cpu_runtime.install()
    from megatron.core import optimizer

    adam = optimizer.Adam  # torch's requires a rate, which cases without a step omit
    optimizer.Adam = lambda *args, lr=None, **kwargs: adam(*args, lr=lr or 0.0, **kwargs)
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, **kwargs: start("gloo", **kwargs)
