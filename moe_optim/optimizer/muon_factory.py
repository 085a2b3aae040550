"""Construction of a chain of optimizers in which Muon updates the matrices and Adam the rest."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import emerging_optimizers
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.process_groups_config import ProcessGroupCollection

from moe_optim.buckets.matrix_buffers import holds_matrices, is_muon_matrix
from moe_optim.optimizer.chained import GroupedChainedOptimizer
from moe_optim.optimizer.muon import Muon, tag_roles
from moe_optim.optimizer.muon_distributed import MuonDistributedOptimizer
from moe_optim.optimizer.muon_step import Workspace

Part = tuple[str, bool]
"""Optimizer of some groups, and whether they hold experts with a data-parallel group of their own.
"""
_SCALARS = ParamKey(
    predicate=ParamPredicate(name="nonlinear_or_embedding", fn=lambda p: not is_muon_matrix(p))
)


def build_muon(
    config: Any,
    model_chunks: list[Any],
    config_overrides: dict[Any, Any] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
) -> GroupedChainedOptimizer:
    """Build the optimizers of ``--optimizer muon``. Every rank must call it.

    Matrices and the other parameters lie in buffers of their own, so each part is one distributed
    optimizer: matrices and the rest, and both again for experts with their own data-parallel group.

    Args:
        config: Megatron's ``OptimizerConfig``.
        model_chunks: DDP-wrapped chunks of this rank's pipeline stage.
        config_overrides: parameter group settings; None for Megatron's.
        use_gloo_process_groups: whether gloo groups exist for checkpoints.
        pg_collection: process groups; None uses ``parallel_state``.

    Raises:
        ConfigError: a setting of Muon has an unsupported value.
    """
    if config_overrides is None:
        config_overrides = core_optimizer.get_standard_config_overrides(config)
    core_optimizer.check_config_overrides_consistency(config, config_overrides)
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    tag_roles(model_chunks, emerging_optimizers._get_qkv_split_shapes)
    for chunk in model_chunks:
        chunk.overlap_param_gather_with_optimizer_step = False
    builder = _Builder(config, model_chunks, use_gloo_process_groups, pg_collection, groups)
    overrides = {**config_overrides, _SCALARS: {"optimizer": config.muon_scalar_optimizer}}
    param_groups = core_optimizer._get_param_groups(model_chunks, config, overrides)
    by_part: dict[Part, list[dict[str, Any]]] = defaultdict(list)
    for group in param_groups:
        by_part[group.get("optimizer", "muon"), group["is_expert_parallel"]].append(group)
    # no rank trains a parameter: one optimizer without masters, as Megatron's factory builds
    parts = sorted(by_part, key=lambda part: (part[1], part[0] != "muon")) or [("adam", False)]
    return GroupedChainedOptimizer([builder.build(part, by_part[part]) for part in parts])


class _Builder:
    def __init__(
        self, config: Any, chunks: list[Any], use_gloo: bool, given: Any, groups: Any
    ) -> None:
        self.config, self.chunks, self.given, self.groups = config, chunks, given, groups
        self.of_ranks = ProcessGroupCollection.setup_process_groups_for_optimizer(
            given, chunks, use_gloo
        )
        self.use_gloo = use_gloo
        self.workspace = Workspace()

    def build(self, part: Part, param_groups: list[dict[str, Any]]) -> Any:
        """Return the distributed optimizer of a part."""
        name, is_expert = part
        is_muon = name == "muon"
        arguments = {
            "model_chunks": self.chunks,
            "per_model_buffers": self._buffers(is_muon, is_expert),
            "distributed_optimizer_instance_id": 0,
            **self._ranks(is_expert),
        }
        if is_muon:
            optimizer = self._build_muon(param_groups, arguments)
        else:
            of_adam = copy.copy(self.config)
            of_adam.optimizer = name
            optimizer = core_optimizer._get_megatron_optimizer_based_on_param_groups(
                config=of_adam,
                param_groups=param_groups,
                model_parallel_group=None,
                intra_dist_opt_group=self.of_ranks["intra_dist_opt_group"],
                pg_collection=self.given,
                **arguments,
            )
            optimizer.config = self.config
        return optimizer

    def _build_muon(self, param_groups: list[dict[str, Any]], arguments: dict[str, Any]) -> Any:
        config = self.config
        inner = Muon(
            param_groups,
            lr=config.lr,
            momentum=config.muon_momentum,
            weight_decay=config.weight_decay,
            make_stock=partial(make_stock, config, self.chunks, self.groups),
        )
        optimizer = MuonDistributedOptimizer(
            inner,
            config,
            None,
            create_momenta,
            groups=self.groups,
            workspace=self.workspace,
            **arguments,
        )
        optimizer.grad_stats_parallel_group = self.of_ranks["intra_dist_opt_group"]
        optimizer.tp_group = self.groups.tp
        optimizer.expert_tp_group = getattr(self.groups, "expt_tp", self.groups.tp)
        return optimizer

    def _ranks(self, is_expert: bool) -> dict[str, Any]:
        of_ranks = self.of_ranks
        if not is_expert:
            return {
                "data_parallel_group": of_ranks["intra_dp_cp_group"],
                "data_parallel_group_gloo": of_ranks["intra_dp_cp_group_gloo"],
                "data_parallel_group_idx": of_ranks["mp_group"].rank(),
            }
        gloo = of_ranks["intra_expt_dp_group_gloo"] if self.use_gloo else None
        return {
            "data_parallel_group": of_ranks["intra_expt_dp_group"],
            "data_parallel_group_gloo": gloo,
            "data_parallel_group_idx": of_ranks["expt_tp_pp_with_egtp_remat_group"].rank(),
        }

    def _buffers(self, is_muon: bool, is_expert: bool) -> dict[int, list[Any]]:
        """Return the buffers of a part by chunk."""
        name = "expert_parallel_buffers" if is_expert else "buffers"
        return {
            number: [
                buffer
                for buffer in getattr(chunk, name)
                if holds_matrices(buffer.params) is is_muon
            ]
            for number, chunk in enumerate(self.chunks)
        }


def create_momenta(inner: Any, config: Any = None) -> None:  # noqa: ARG001  # Megatron's signature
    """Create the missing momenta of an inner optimizer."""
    for group in inner.param_groups:
        for master in group["params"]:
            inner.initialize_state(master)


def make_stock(
    config: Any, chunks: Sequence[Any], groups: Any, param_groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Return Megatron's Muon over two-dimensional parameters; rows are split where they say so."""
    arguments = emerging_optimizers._muon_config_to_kwargs(config, chunks, groups)
    return emerging_optimizers.TensorParallelMuon(param_groups, **arguments | {"split_qkv": True})
