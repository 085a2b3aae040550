"""Muon for the masters of a distributed optimizer, whose shards hold whole matrices.

Muon (Jordan, 2024; Liu et al., arXiv:2502.16982) replaces the momentum of a matrix by its nearest
semi-orthogonal matrix, computed by a Newton-Schulz iteration. A rank owns whole matrices, so an
update needs no other rank, except for matrices that tensor parallelism cuts.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.checkpoint.state_manifest import MOMENTUM
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError
from moe_optim.formats.reference.muon import MuonHyper
from moe_optim.formats.reference.newton_schulz import Orthogonalization
from moe_optim.kernels.matrices import MatrixRows, split_rows

_GATED = re.compile(r"(?:^|\.)linear_fc1\.weight\d*$")
_EXPERT = re.compile(r"(?:^|\.)experts\.")
_SECOND = re.compile(r"(?:^|\.)linear_fc2\.weight\d*$")


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonSettings:
    """Settings of Muon, from Megatron's flags and the plug-in's configuration."""

    orthogonalization: Orthogonalization
    nesterov: bool
    tp_mode: Literal["blockwise", "duplicated", "distributed"]
    splits_qkv: bool
    splits_gate_up: bool
    iteration: Literal["auto", "fp16", "gram"]
    workspace_bytes: int

    @classmethod
    def of(cls, optimizer: Any, config: MoEOptimConfig) -> "MuonSettings":
        """Return the settings of Megatron's ``OptimizerConfig`` and the plug-in's configuration.

        Raises:
            ConfigError: a setting has an unsupported value.
        """
        _check_numbers(optimizer)
        return cls(
            orthogonalization=Orthogonalization(
                coefficient_type=optimizer.muon_coefficient_type,
                num_steps=optimizer.muon_num_ns_steps,
                scale_mode=optimizer.muon_scale_mode,
                extra_scale_factor=optimizer.muon_extra_scale_factor,
                precision=optimizer.muon_fp32_matmul_prec,
            ),
            nesterov=optimizer.muon_nesterov,
            tp_mode=optimizer.muon_tp_mode,
            splits_qkv=optimizer.muon_split_qkv,
            splits_gate_up=config.muon_gate_up == "apart",
            iteration=config.muon_iteration,
            workspace_bytes=config.muon_workspace_mib << 20,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the iteration."""
        return self.orthogonalization.dtype if self.iteration == "auto" else torch.float16


def _check_numbers(optimizer: Any) -> None:
    momentum, factor = optimizer.muon_momentum, optimizer.muon_extra_scale_factor
    if not 0 <= momentum < 1:
        raise ConfigError(
            f"--muon-momentum {momentum}: expected 0 or more, and less than 1, at which a gradient "
            "would never count. Give 0.95, Megatron's default, or another such number."
        )
    if not 0 < factor < math.inf:
        raise ConfigError(
            f"--muon-extra-scale-factor {factor}: expected a positive, finite number, got one with "
            "which no step descends. Give 1.0, Megatron's default, or another such number."
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MatrixWeight:
    """Parameter whose matrices Muon updates: one matrix [R, C], or one per expert [E, R, C]."""

    name: str
    shape: tuple[int, int]
    """Rows and columns on this rank, [R, C]."""
    split: tuple[int, ...]
    """Rows of each matrix within a period of rows, for weights that hold several matrices; empty
    for one matrix."""
    is_expert: bool
    """Whether expert tensor parallelism, rather than tensor parallelism, cuts the weight."""
    partition_dim: int | None
    """Dimension that tensor parallelism cuts and Muon treats as one; None if each rank's part is a
    matrix of its own."""
    group: dist.ProcessGroup | None
    """Tensor-parallel group of :attr:`partition_dim`."""

    @property
    def ranks(self) -> dist.ProcessGroup | None:
        """Ranks that hold parts of a matrix; None if it is whole, which Megatron marks alike."""
        if self.partition_dim is None or self.group is None or self.group.size() == 1:
            return None
        return self.group

    @property
    def numel(self) -> int:
        """Elements per weight."""
        return self.shape[0] * self.shape[1]

    @property
    def rows(self) -> tuple[MatrixRows, ...]:
        """Rows of each matrix."""
        return split_rows(self.shape[0], self.split or (self.shape[0],))

    def whole_shape(self, rows: MatrixRows) -> tuple[int, int]:
        """Return the shape of a matrix over all tensor-parallel ranks."""
        shape = [rows.rows, self.shape[1]]
        if self.partition_dim is not None and self.group is not None:
            shape[self.partition_dim] *= self.group.size()
        return shape[0], shape[1]


def describe_weight(
    param: torch.nn.Parameter, name: str, model: Any, settings: MuonSettings, groups: Any
) -> MatrixWeight:
    """Return the matrices of a parameter for which :func:`is_muon_matrix` holds.

    ``name`` is unwrapped, ``model`` the ``TransformerConfig`` of its chunk, and ``groups`` are
    process groups ``tp`` and ``expt_tp``.
    """
    is_expert = bool(_EXPERT.search(name)) and "shared" not in name
    group = groups.expt_tp if is_expert else groups.tp
    dim = None if settings.tp_mode == "blockwise" else _partition_dim(param, name, group)
    return MatrixWeight(
        name=name,
        shape=(int(param.shape[-2]), int(param.shape[-1])),
        split=_split(param, name, model, settings, is_expert=is_expert),
        is_expert=is_expert,
        partition_dim=dim,
        group=group,
    )


def _partition_dim(param: torch.nn.Parameter, name: str, group: Any) -> int | None:
    if param.dim() == 3:  # rows of fc1 and columns of fc2 are cut
        return None if group is None or group.size() == 1 else int(bool(_SECOND.search(name)))
    if getattr(param, "tensor_model_parallel", None) is False:  # every rank has a copy
        return None
    dim = getattr(param, "partition_dim", None)
    return None if dim == -1 else dim


def _split(
    param: torch.nn.Parameter, name: str, model: Any, settings: MuonSettings, *, is_expert: bool
) -> tuple[int, ...]:
    rows = int(param.shape[-2])
    if settings.splits_qkv and getattr(param, "is_qkv", False):
        return tuple(getattr(param, "qkv_split_shapes", ()))
    if settings.splits_gate_up and model.gated_linear_unit and _GATED.search(name):
        interleave = model.moe_mlp_glu_interleave_size if is_expert else None
        return (interleave or rows // 2,) * 2
    return ()


class Muon(torch.optim.Optimizer):
    """Groups and momentum of masters, which are flat shards of whole matrices.

    The distributed optimizer's fused step updates them. :meth:`step` serves ``step: stock``: it
    runs Megatron's ``TensorParallelMuon`` on two-dimensional views of masters and momentum.

    Attributes:
        weights: description of the parameter of each master; set by the distributed optimizer.
        make_stock: constructor of Megatron's optimizer, from parameter groups.
    """

    state_names = (MOMENTUM,)

    def __init__(
        self, params: Any, *, lr: float, momentum: float, weight_decay: float, make_stock: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.weights: dict[Tensor, MatrixWeight] = {}
        self.make_stock: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = make_stock

    def initialize_state(self, master: Tensor) -> None:
        """Create a zero momentum for a master, [n] fp32, unless it has one."""
        if MOMENTUM not in self.state[master]:
            self.state[master][MOMENTUM] = torch.zeros_like(master.detach())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every master that has a gradient with Megatron's optimizer.

        Raises:
            ConfigError: emerging-optimizers is not installed.
        """
        if closure is not None:
            raise ConfigError("Muon.step: expected no closure, got one. Call step() without it.")
        groups = []
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            views = [view for master in group["params"] for view in self._view(master)]
            groups.append({**group, "params": [view for view, _ in views]})
            groups[-1]["momenta"] = [momentum for _, momentum in views]
        momenta = [one for group in groups for one in group.pop("momenta")]
        params = [one for group in groups for one in group["params"]]
        if not params:
            return
        stock = self.make_stock([group for group in groups if group["params"]])
        for view, momentum in zip(params, momenta, strict=True):
            stock.state[view][MOMENTUM] = momentum
        stock.step()

    def _view(self, master: Tensor) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """Yield every matrix of a master as a parameter with a gradient, and its momentum."""
        if master.grad is None:
            return
        self.initialize_state(master)
        weight = self.weights[master]
        held = (master.detach(), master.grad, self.state[master][MOMENTUM])
        for matrix, gradient, momentum in zip(
            *(tensor.view(-1, *weight.shape) for tensor in held), strict=True
        ):
            view: Any = torch.nn.Parameter(matrix)
            view.grad = gradient
            view.partition_dim, view.expert_tp = weight.partition_dim, weight.is_expert
            view.is_qkv, view.qkv_split_shapes = bool(weight.split), list(weight.split)
            yield view, momentum


def hyper_of(group: dict[str, Any], scale: float, extra_scale_factor: float) -> MuonHyper:
    """Return the hyperparameters of a parameter group, for matrices of one scale."""
    return MuonHyper(
        lr=float(group["lr"]),
        momentum=float(group["momentum"]),
        weight_decay=float(group["weight_decay"]),
        scale=scale,
        extra_scale_factor=extra_scale_factor,
    )


def tag_roles(model_chunks: Sequence[Any], split_of: Callable[[Any], list[int]]) -> None:
    """Mark QKV weights, as Megatron does before it builds Muon.

    ``split_of`` a ``TransformerConfig`` are rows of queries, gates, keys and values per group.
    """
    for chunk in model_chunks:
        split = None
        for name, param in chunk.named_parameters():
            if not param.requires_grad or "linear_qkv.weight" not in name or param.dim() != 2:
                continue
            split = split_of(chunk.config) if split is None else split
            if param.shape[0] % sum(split) == 0:
                param.is_qkv, param.qkv_split_shapes = True, split
