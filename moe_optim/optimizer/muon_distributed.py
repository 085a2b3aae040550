"""The distributed optimizer of matrices that Muon updates."""

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.checkpoint.state_kinds import MASTER, MOMENTUM, WHOLE_MASTER
from moe_optim.errors import LayoutError
from moe_optim.kernels.fields import HYPER_FIELDS
from moe_optim.optimizer.address_book import (
    flat_params,
    gradient_of,
    norm_of,
    owned_masters,
    weight_of,
)
from moe_optim.optimizer.distributed import GroupedDistributedOptimizer
from moe_optim.optimizer.muon import (
    MatrixWeight,
    MuonSettings,
    describe_weight,
    hyper_of,
)
from moe_optim.optimizer.muon_step import (
    MuonState,
    MuonTable,
    Workspace,
    check_workspace,
    common_scale_of,
    needed_bytes,
)
from moe_optim.weights.names import parameter_names


class MuonDistributedOptimizer(GroupedDistributedOptimizer):
    """Megatron's distributed optimizer over whole matrices, with Muon as its inner optimizer.

    Shards of all buckets end at matrices, so each matrix has one owner, and each owner has whole
    blocks of quantized weights. Norms, decisions, gathers and checkpoints are those of the base
    class; the state ``momentum_buffer`` takes the place of Adam's moments. A step updates momentum
    before it moves any master, so one that fails in between has counted its gradients in momentum.

    Attributes:
        settings: settings of Muon.
        matrices: description of every parameter that this rank owns a part of.
    """

    saved_names = MappingProxyType({MASTER: WHOLE_MASTER})  # as in Megatron's layer-wise Muon

    def __init__(self, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        """Shard the masters.

        Args:
            optimizer: :class:`~moe_optim.optimizer.muon.Muon` over the parameters, or None.
            config: Megatron's ``OptimizerConfig``.
            *args: remaining arguments of Megatron's class.
            **kwargs: remaining arguments of Megatron's class, ``groups``: process groups ``tp``
                and ``expt_tp``, and ``workspace``, which the optimizers of a chain share.

        Raises:
            ConfigError: a matrix does not fit into the workspace, or a setting is not supported.
            LayoutError: a shard ends inside a matrix.
        """
        groups = kwargs.pop("groups")
        self._workspace: Workspace = kwargs.pop("workspace")
        super().__init__(optimizer, config, *args, **kwargs)
        self.settings = MuonSettings.of(config, self.moe_optim_config)
        self.matrices: dict[torch.nn.Parameter, MatrixWeight] = {}
        self._rows: list[tuple[int, float]] = []
        if self.is_stub_optimizer:
            return
        names = parameter_names(self.model_chunks)
        models = {param: c.config for c in self.model_chunks for param in c.parameters()}
        described = {
            param: describe_weight(param, names[param], models[param], self.settings, groups)
            for buffer in self.buffers
            for param in buffer.params
        }
        check_workspace(described.values(), self.settings)  # on every rank, not on owners alone
        self.matrices = {param: described[param] for param in flat_params(self)}
        for param, master in owned_masters(self):
            self._check_owned(param, master)
        weights = {master: self.matrices[param] for param, master in owned_masters(self)}
        self.optimizer.weights = weights
        counted = [(weight, master.numel() // weight.numel) for master, weight in weights.items()]
        self._workspace.reserve(needed_bytes(counted, self.settings))

    @property
    def optimizer_state_keys(self) -> tuple[str, ...]:
        """Names of the states of a master besides itself."""
        return (MOMENTUM,)

    def _check_owned(self, param: torch.nn.Parameter, master: Tensor) -> None:
        weight, start = self.matrices[param], self._get_model_param_range_map(param)["param"].start
        end = start + master.numel()
        if start % weight.numel or end % weight.numel:
            raise LayoutError(
                f"{weight.name}: expected shards of whole matrices {list(weight.shape)}, got "
                f"elements {start} to {end} on data-parallel rank "
                f"{self.data_parallel_group.rank()}. Call "
                'moe_optim.install(optimizer="muon") before the model is wrapped with DDP.'
            )

    def make_moments(self) -> None:
        """Create missing momenta."""
        for _, master in owned_masters(self):
            self.optimizer.initialize_state(master)

    def offload_to_cpu(self) -> None:
        """Move masters and momenta to the host, and free the workspace."""
        self._tables, self._tables_generation = {}, 0
        self._workspace.free()
        super().offload_to_cpu()

    def _plan_tables(self) -> dict[ManagedBucket | None, Any]:
        """Return one table of all matrices, under None."""
        self.make_moments()
        group_of = self._find_groups_of_masters()
        owned = list(owned_masters(self))
        scales = [common_scale_of(self.matrices[param], self.settings) for param, _ in owned]
        keys = [(group_of[m], scale) for (_, m), scale in zip(owned, scales, strict=True)]
        self._rows = list(dict.fromkeys(keys))
        if len(self._rows) != len(self._hyper):
            self._hyper = self._hyper.new_zeros(len(self._rows), HYPER_FIELDS)
        states = [
            MuonState(
                weight=self.matrices[param],
                master=master,
                gradient=gradient_of(self, param),
                momentum=self.optimizer.state[master][MOMENTUM],
                group=self._rows.index(key),
                norm=norm_of(master),
                copy=weight_of(self, param, master),
            )
            for (param, master), key in zip(owned, keys, strict=True)
            if master.numel()
        ]
        self._planned = {bucket: self._plan_bucket(bucket) for bucket in self._buckets}
        members = [table for _, table in self._planned.values() if table is not None]
        table = MuonTable.build(
            states,
            self.settings,
            self._hyper,
            self._clips,
            self._workspace.allocated(self._clips.device),
            members=members,
            backend=self.moe_optim_config.backend,
        )
        return {None: table}

    def _hyper_rows(self) -> list[list[float]]:
        extra = self.settings.orthogonalization.extra_scale_factor
        groups = self.optimizer.param_groups
        rows = [hyper_of(groups[group], scale, extra).row() for group, scale in self._rows]
        return [row + [0.0] * (HYPER_FIELDS - len(row)) for row in rows]
