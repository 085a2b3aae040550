"""Inspection of a wrapped model, and checks of whether the plug-in supports it."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer as upstream
from megatron.core.utils import log_single_rank

from moe_optim.buckets.bucket_group import GroupedBucketGroup, bucket_groups
from moe_optim.buckets.matrix_buffers import holds_matrices, is_muon_matrix
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.operands import copies_of
from moe_optim.formats import FORMATS
from moe_optim.integration.installation import installed_optimizer
from moe_optim.rules import Setup, check_setup
from moe_optim.weights.managed import is_managed
from moe_optim.weights.names import parameter_names
from moe_optim.weights.te.fields import TENSORWISE, is_tensorwise, te_formats_of

logger = logging.getLogger(__name__)
_ACCEPTED = ("auto", *FORMATS)
_STORED = (*FORMATS, TENSORWISE)


def check_model(optimizer_config: Any, model_chunks: list[Any], config: MoEOptimConfig) -> Setup:
    """Return the setup of a run, after refusing unsupported ones.

    Every rank must call it, since pipeline stages may hold different weights.

    Raises:
        ConfigError: settings or weights are not supported; the message names all of them.
        StateError: quantized weights are in buffers that the plug-in did not create.
    """
    setup = _find_setup(optimizer_config, model_chunks, config)
    check_setup(setup, "moe_optim")
    if config.format == "auto":
        _resolve_auto(setup)
    for group in bucket_groups(model_chunks):
        holds = any(is_managed(param) for param in group.params)
        if holds and not (isinstance(group, GroupedBucketGroup) and group.managed):
            raise StateError(
                "moe_optim: expected quantized experts in buffers of this package, got buffers of "
                "Megatron's own class. Call moe_optim.install() before the model is wrapped with "
                "DDP."
            )
    return setup


def _find_setup(optimizer_config: Any, model_chunks: list[Any], config: MoEOptimConfig) -> Setup:
    stored: set[str] = set()
    accepted: set[str] = set()
    unknown: list[str] = []
    for param in (param for chunk in model_chunks for param in chunk.parameters()):
        if is_managed(param):
            stored.add(param.quantized_storage.format.name)
        elif is_tensorwise(param):
            stored.add(TENSORWISE)
            accepted.add("auto")
        elif upstream._param_uses_quantized_storage(param):
            formats = [format.name for format in te_formats_of(param)]
            accepted.update(formats)
            if not formats:
                unknown.append(f"{type(param).__name__} of shape {list(param.shape)}")
    modules = [module for chunk in model_chunks for module in chunk.modules()]
    has_portable = any(isinstance(module, GroupedLinear) for module in modules)
    has_te = any(map(copies_of, modules))
    mine = [name in stored for name in _STORED] + [name in accepted for name in _ACCEPTED]
    *found, has_portable, has_te, has_unknown = _on_any_rank(
        [*mine, has_portable, has_te, bool(unknown)]
    )
    stored_anywhere = [name for name, is_there in zip(_STORED, found, strict=False) if is_there]
    accepted_anywhere = [
        name for name, is_there in zip(_ACCEPTED, found[len(_STORED) :], strict=True) if is_there
    ]
    return Setup(
        config=config,
        optimizer=optimizer_config,
        ddp=model_chunks[0].ddp_config,
        models=[chunk.config for chunk in model_chunks],
        has_portable=has_portable,
        has_te=has_te,
        quantized=any(name in FORMATS for name in stored_anywhere),
        tensorwise=TENSORWISE in stored_anywhere,
        accepted=accepted_anywhere,
        stored=stored_anywhere,
        unknown=next(iter(unknown), "a weight of another rank") if has_unknown else None,
    )


def _on_any_rank(mine: list[bool]) -> list[bool]:
    if not dist.is_initialized():
        return mine
    found = torch.tensor(mine, dtype=torch.float32, device=torch.cuda.current_device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [bool(value) for value in found.tolist()]


def _resolve_auto(setup: Setup) -> None:
    """Log the format that ``format: auto`` resolves to, and refuse incompatible settings."""
    format = next(iter(setup.stored), "bf16")
    if format == TENSORWISE:
        what = f"leaves {TENSORWISE} weights in Megatron's buffers"
        setup.config.resolved("bf16")  # their amaxes are not recorded, either
    else:
        what = f"is {format} here"
        setup.config.resolved(format)
    log_single_rank(logger, logging.INFO, f"moe_optim: format: auto {what}")


def require_wrapped_for(optimizer: str, model_chunks: Sequence[Any]) -> None:
    """Raise StateError unless DDP has wrapped the chunks for ``muon``, or for another optimizer.

    Muon needs its matrices in buffers of their own, whose shards hold whole matrices.
    """
    is_muon = optimizer == "muon"
    if is_muon and installed_optimizer() != "muon":  # nor would checkpoints load
        raise StateError(
            '--optimizer muon: expected moe_optim.install(config, optimizer="muon"), got an '
            "installation for Adam, or none. Call it before the model is wrapped with DDP."
        )
    buffers = (
        buffer
        for chunk in model_chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    )
    for buffer in buffers:
        are_alone = holds_matrices(buffer.params)
        for param in buffer.params:
            if (is_muon and is_muon_matrix(param)) is are_alone:
                continue
            name = parameter_names(model_chunks)[param]
            if is_muon:
                needed, got = "matrices of Muon in buffers of their own", "another optimizer"
            else:
                needed, got = "buffers for all parameters alike", "Muon"
            raise StateError(
                f"{name}: expected {needed}, as --optimizer {optimizer} needs, got a model that "
                f"was wrapped for {got}. Call moe_optim.install(config, "
                f'optimizer="{optimizer}") before the model is wrapped with DDP.'
            )
