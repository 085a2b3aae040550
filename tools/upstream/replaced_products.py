"""A pytest plug-in of both sides: runs Transformer Engine's Blackwell code on this machine.

Imported by its bare name, like ``outcome_lines``, after ``prepare_megatron``. GEMMs and casts are
torch's, see ``tools/upstream/native_products.py``; attention, norms and dense layers are Megatron's
local ones, in bf16. On a CPU, ``TRANSFORMER_ENGINE_PATH`` is the folder of Transformer Engine.
"""

import os
import sys

import pytest

_SAID_BY_MODULES = ("_BLACKWELL_AVAILABLE", "_FP8_AVAILABLE", "_NVFP4_AVAILABLE")
_SPEC = "get_gpt_layer_with_transformer_engine_spec"

if os.environ.get("MOE_OPTIM_CPU"):  # here, because the CPU runtime hides it afterwards
    sys.path += os.environ["TRANSFORMER_ENGINE_PATH"].split(os.pathsep)
    import torch  # noqa: F401 - loads NCCL, which the next one asks for by name
    import transformer_engine.pytorch  # noqa: F401


@pytest.hookimpl  # after prepare_megatron
def pytest_load_initial_conftests():
    import native_products

    if os.environ.get("MOE_OPTIM_CPU"):
        native_products.leave_to_torch()
        native_products.pretend_a_gpu()
    native_products.replace_kernels()
    native_products.cast_whole_masters()
    _keep_dense_layers_local()


def pytest_collection_finish(session):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    for module in {item.module for item in session.items}:
        for name in _SAID_BY_MODULES:
            if hasattr(module, name):
                setattr(module, name, True)
        if hasattr(module, _SPEC):
            setattr(module, _SPEC, get_gpt_layer_local_spec)
        if hasattr(module, "parse_args"):
            module.parse_args = _without_fused_norms(module.parse_args)


def _without_fused_norms(parse_args):
    def parse(*args, **kwargs):
        parsed = parse_args(*args, **kwargs)
        parsed.no_persist_layer_norm = True  # torch's norms refuse it
        return parsed

    return parse


def _keep_dense_layers_local():
    """Restrict Transformer Engine, and its gradient accumulation, to experts."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def grouped_mlp_modules(self, moe_use_grouped_gemm):
        return TESpecProvider().grouped_mlp_modules(moe_use_grouped_gemm)

    LocalSpecProvider.grouped_mlp_modules = grouped_mlp_modules
    transformer_block.LayerNormImpl = WrappedTorchNorm
    FusedScaleMaskSoftmax.is_kernel_available = lambda *_: False  # apex's
