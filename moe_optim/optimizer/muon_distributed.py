"""The distributed optimizer of matrices that Muon updates, and the chain it is a part of."""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import distrib_optimizer, emerging_optimizers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.buckets.matrix_buffers import holds_matrices, is_muon_matrix
from moe_optim.checkpoint import staging
from moe_optim.checkpoint.state_manifest import MASTER, MOMENTUM, WHOLE_MASTER
from moe_optim.errors import LayoutError
from moe_optim.kernels.fields import HYPER_FIELDS
from moe_optim.optimizer.adam import MOMENTS
from moe_optim.optimizer.address_book import (
    flat_params,
    gradient_of,
    norm_of,
    owned_masters,
    weight_of,
)
from moe_optim.optimizer.chained import GroupedChainedOptimizer
from moe_optim.optimizer.distributed import GroupedDistributedOptimizer
from moe_optim.optimizer.muon import (
    MatrixWeight,
    Muon,
    MuonSettings,
    describe_weight,
    hyper_of,
    tag_roles,
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

_SCALARS = ParamKey(
    predicate=ParamPredicate(name="nonlinear_or_embedding", fn=lambda p: not is_muon_matrix(p))
)


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

    optimizer_state_keys = (MOMENTUM,)
    saved_names = MappingProxyType({MASTER: WHOLE_MASTER})  # as in Megatron's layer-wise Muon

    def __init__(self, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        """Shard the masters; same arguments as Megatron's class, and two more.

        ``groups`` are process groups ``tp`` and ``expt_tp``; the optimizers of a chain share
        ``workspace``.

        Raises:
            ConfigError: a matrix does not fit into the workspace, or a setting is not supported.
            LayoutError: a shard ends inside a matrix.
        """
        groups = kwargs.pop("groups")
        self._workspace: Workspace = kwargs.pop("workspace")
        with _taking_muon():
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

    def load_states(self, state_dict: dict[str, Any]) -> None:
        """Load masters and momenta as they are; :meth:`gather_weights` must follow."""
        self.make_moments()  # Megatron's dev branch would create missing ones as Adam's
        super().load_states(state_dict)

    def _get_main_param_and_optimizer_states(self, model_param: torch.nn.Parameter) -> Any:
        states = super()._get_main_param_and_optimizer_states(model_param)
        return states if _NAMES_STATES else _UnderAdamsNames(states)

    def _set_main_param_and_optimizer_states(
        self, model_param: torch.nn.Parameter, tensors: dict[str, Any]
    ) -> None:
        if MOMENTUM not in tensors and MOMENTS[0] in tensors:
            tensors = {**tensors, MOMENTUM: tensors[MOMENTS[0]]}
        super()._set_main_param_and_optimizer_states(model_param, tensors)

    def get_parameter_state_dp_zero(self, *args: Any, **kwargs: Any) -> Any:
        """Gather all states on the first rank, with their manifest."""
        state = super().get_parameter_state_dp_zero(*args, **kwargs)
        for tensors in _file_states(state or {}):
            tensors[MOMENTUM] = tensors.pop(MOMENTS[0])
            del tensors[MOMENTS[1]]
        return state

    def _in_own_order(self, states: dict[Any, Any], is_old: bool) -> dict[Any, Any]:
        ordered = super()._in_own_order(states, is_old)
        for tensors in _file_states(ordered):
            tensors.update(dict.fromkeys(MOMENTS, tensors[MOMENTUM]))
        return ordered

    def offload_to_cpu(self) -> None:
        """Move masters and momenta to the host, and free the workspace."""
        self._tables, self._inputs = {}, []
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
                parameter=self.matrices[param].name,
                matrix=self.matrices[param],
                master=master,
                gradient=gradient_of(self, param),
                momentum=self.optimizer.state[master][MOMENTUM],
                group=self._rows.index(key),
                norm=norm_of(master),
                weight=weight_of(self, param, master),
            )
            for (param, master), key in zip(owned, keys, strict=True)
            if master.numel()
        ]
        for bucket in self.managed_buckets:
            self._plan_bucket(bucket)
        tables = [bucket.step_table for bucket in self.managed_buckets]
        table = MuonTable.build(
            states,
            self.settings,
            self._hyper,
            self._clips,
            self._workspace.allocated(self._clips.device),
            members=[table for table in tables if table is not None],
            backend=self.moe_optim_config.backend,
        )
        return {None: table}

    def _hyper_rows(self) -> list[list[float]]:
        extra = self.settings.orthogonalization.extra_scale_factor
        groups = self.optimizer.param_groups
        rows = [hyper_of(groups[group], scale, extra).row() for group, scale in self._rows]
        return [row + [0.0] * (HYPER_FIELDS - len(row)) for row in rows]


# Megatron's dev branch, whose distributed optimizer knows Adam alone

_NAMES_STATES = hasattr(DistributedOptimizer, "optimizer_state_keys")
"""Whether Megatron asks an optimizer for the names of its states."""


class _UnderAdamsNames(dict[str, Tensor]):
    """States of a matrix, whose momentum is also found under the names of Adam's moments."""

    def __missing__(self, name: str) -> Tensor:
        if name not in MOMENTS:
            raise KeyError(name)
        return self[MOMENTUM]


def _file_states(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yield the states of every buffer in a file of ``--ckpt-format torch`` under Adam's names."""
    for number, buffer in () if _NAMES_STATES else state.items():
        if isinstance(number, int):
            yield from buffer.values()


@contextmanager
def _taking_muon() -> Iterator[None]:
    """Let Megatron's constructor take :class:`Muon`, where it takes its Adam alone."""
    adam = distrib_optimizer.Adam
    distrib_optimizer.Adam = adam if _NAMES_STATES else Muon
    try:
        yield
    finally:
        distrib_optimizer.Adam = adam


# The chain of optimizers


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
    Arguments are those of ``get_megatron_optimizer``; raises ConfigError for an unsupported setting
    of Muon.
    """
    if config_overrides is None:
        config_overrides = core_optimizer.get_standard_config_overrides(config)
    core_optimizer.check_config_overrides_consistency(config, config_overrides)
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    tag_roles(model_chunks, emerging_optimizers._get_qkv_split_shapes)
    for chunk in model_chunks:
        chunk.overlap_param_gather_with_optimizer_step = (
            config.overlap_param_gather_with_optimizer_step and chunk is model_chunks[0]
        )
    overrides = {**config_overrides, _SCALARS: {"optimizer": config.muon_scalar_optimizer}}
    # which overrides of --use-mup ask, and which knows no matrices of experts [E, R, C]
    with staging.replaced(
        core_optimizer, "is_managed_by_layer_wise_optimizer", lambda _, param: is_muon_matrix(param)
    ):
        param_groups = core_optimizer._get_param_groups(model_chunks, config, overrides)
    by_part: dict[tuple[str, bool], list[dict[str, Any]]] = defaultdict(list)
    for group in param_groups:
        by_part[group.get("optimizer", "muon"), group["is_expert_parallel"]].append(group)
    # no rank trains a parameter: one optimizer without masters, as Megatron's factory builds
    names = sorted(by_part, key=lambda part: (part[1], part[0] != "muon")) or [("adam", False)]
    of_ranks = ProcessGroupCollection.setup_process_groups_for_optimizer(
        pg_collection, model_chunks, use_gloo_process_groups
    )
    workspace = Workspace()
    parts = []
    for name, is_expert in names:
        arguments = {
            "model_chunks": model_chunks,
            "per_model_buffers": _find_buffers(model_chunks, name == "muon", is_expert),
            "distributed_optimizer_instance_id": 0,
            **_ranks_of(of_ranks, is_expert, use_gloo_process_groups),
        }
        if name == "muon":
            part = _build_matrices(config, by_part[name, is_expert], groups, workspace, arguments)
            part.grad_stats_parallel_group = of_ranks["intra_dist_opt_group"]
        else:
            of_adam = copy.copy(config)
            of_adam.optimizer = name
            part = core_optimizer._get_megatron_optimizer_based_on_param_groups(
                config=of_adam,
                param_groups=by_part[name, is_expert],
                model_parallel_group=None,
                intra_dist_opt_group=of_ranks["intra_dist_opt_group"],
                pg_collection=pg_collection,
                **arguments,
            )
            part.config = config
        parts.append(part)
    return GroupedChainedOptimizer(parts)


def _build_matrices(
    config: Any,
    param_groups: list[dict[str, Any]],
    groups: Any,
    workspace: Workspace,
    arguments: dict[str, Any],
) -> MuonDistributedOptimizer:
    inner = Muon(
        param_groups,
        lr=config.lr,
        momentum=config.muon_momentum,
        weight_decay=config.weight_decay,
        make_stock=partial(make_stock, config, arguments["model_chunks"], groups),
    )
    optimizer = MuonDistributedOptimizer(
        inner, config, None, create_momenta, groups=groups, workspace=workspace, **arguments
    )
    optimizer.tp_group = groups.tp
    optimizer.expert_tp_group = getattr(groups, "expt_tp", groups.tp)
    return optimizer


def _ranks_of(of_ranks: dict[str, Any], is_expert: bool, use_gloo: bool) -> dict[str, Any]:
    if not is_expert:
        return {
            "data_parallel_group": of_ranks["intra_dp_cp_group"],
            "data_parallel_group_gloo": of_ranks["intra_dp_cp_group_gloo"],
            "data_parallel_group_idx": of_ranks["mp_group"].rank(),
        }
    without = of_ranks["expt_tp_pp_group"]  # dev has no shards of weights beside
    with_shards = of_ranks.get("expt_tp_pp_with_egtp_remat_group", without)
    return {
        "data_parallel_group": of_ranks["intra_expt_dp_group"],
        "data_parallel_group_gloo": of_ranks["intra_expt_dp_group_gloo"] if use_gloo else None,
        "data_parallel_group_idx": with_shards.rank(),
    }


def _find_buffers(chunks: list[Any], is_muon: bool, is_expert: bool) -> dict[int, list[Any]]:
    """Return the buffers of a part by number of its chunk."""
    name = "expert_parallel_buffers" if is_expert else "buffers"
    return {
        number: [one for one in getattr(chunk, name) if holds_matrices(one.params) is is_muon]
        for number, chunk in enumerate(chunks)
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
