"""Layers of experts at any parallel sizes, whose masters and moments are numbers of their place.

Every element of every state has its own value, which depends on nothing but its place in the whole
model: layer, linear, global expert, row and column. So whoever saved it and whoever loads it, one
element out of place is seen.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from moe_optim.checkpoint.state_manifest import MANIFEST
from moe_optim.config import MoEOptimConfig
from tests.support.ranks import run_ranks
from tests.support.wrapping import wrap

HIDDEN, FFN, EXPERTS, LAYERS = 64, 64, 4, 2
STATES = ("param", "exp_avg", "exp_avg_sq")
_OF_LOCAL_ONES = "dp_reshardable"
"""Megatron's sharding type of checkpoints in memory."""


def run_once(
    folder: Path, jobs: Mapping[int, Mapping[str, Callable[..., Any]]], timeout_s: float = 500
) -> Any:
    """Return a function of ranks and a name, which gives the results of a job, rank 0 first.

    All jobs of one number of ranks run in one launch, when the first is asked for. Each is given a
    folder of its own, which does not exist yet.
    """

    @cache
    def launch(ranks: int) -> list[dict[str, Any]]:
        return run_ranks(ranks, _run_all, folder, ranks, dict(jobs[ranks]), timeout_s=timeout_s)

    return lambda ranks, name: [of_rank[name] for of_rank in launch(ranks)]


def _run_all(folder: Path, ranks: int, jobs: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """Run jobs, each with process groups of its own: those of gloo have threads that wake often."""
    found = {}
    for name, job in jobs.items():
        _start(name)
        found[name] = job(folder=folder / f"{ranks} {name}")
        parallel_state.destroy_model_parallel()
        gc.collect()
        torch.distributed.destroy_process_group()
    return found


def _start(name: str = "") -> None:
    """Start the CPU runtime and a world of gloo, with keys of its own in the ranks' store."""
    from moe_optim.integration import cpu_runtime

    cpu_runtime.install()
    rank, ranks, port = (int(os.environ[one]) for one in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], port, ranks, is_master=False)
    store = torch.distributed.PrefixStore(name, store)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.compiler.set_stance("force_eager")


@dataclass(frozen=True, kw_only=True)
class Station:
    """How the ranks of one run are set up.

    Attributes:
        tp, cp, etp, ep, pp: parallel sizes; data parallelism is what remains of the ranks.
        experts: ``grouped`` or ``indexed`` portable experts, or Megatron's ``sequential`` ones.
        format: of portable experts.
        stock: whether the optimizer is Megatron's own.
        bucket_size: of Megatron's buffers; None puts all of one into a bucket.
        biases: whether experts have some.
        interleave: ``moe_mlp_glu_interleave_size``.
        fp32_dense: whether dense weights are fp32, in one parameter group with the experts.
        order: in which buffers take the parameters; every other one than Megatron's is a fork's.
        knobs: more of ``MoEOptimConfig``.
    """

    tp: int = 1
    cp: int = 1
    etp: int = 1
    ep: int = 1
    pp: int = 1
    experts: str = "grouped"
    format: str = "mxfp8"
    stock: bool = False
    bucket_size: int | None = None
    biases: bool = False
    fp32_dense: bool = False
    interleave: int | None = None
    order: str = "Megatron's"
    knobs: tuple[tuple[str, Any], ...] = ()

    def but(self, **changes: Any) -> "Station":
        """Return a station with other settings."""
        return replace(self, **changes)


def whole_tensor(layer: int, linear: str, kind: str) -> Tensor:
    """Return the numbers of all experts of a linear: [E, R, C] or [E, R], fp32, all distinct."""
    rows, cols = (2 * FFN, HIDDEN) if linear == "linear_fc1" else (HIDDEN, FFN)
    shape = (EXPERTS, rows, cols) if kind == "weight" else (EXPERTS, rows)
    return _numbers(shape, f"{layer}.{linear}.{kind}")


def whole_dense(layer: int) -> Tensor:
    """Return the numbers of the dense weight of a layer: [hidden, hidden], fp32."""
    return _numbers((HIDDEN, HIDDEN), f"{layer}.dense.weight")


_SIZES = {
    f"{layer}.{name}": size
    for layer in range(LAYERS)
    for name, size in (
        ("linear_fc1.weight", EXPERTS * 2 * FFN * HIDDEN),
        ("linear_fc2.weight", EXPERTS * HIDDEN * FFN),
        ("linear_fc1.bias", EXPERTS * 2 * FFN),
        ("linear_fc2.bias", EXPERTS * HIDDEN),
        ("dense.weight", HIDDEN * HIDDEN),
    )
}


def _numbers(shape: tuple[int, ...], name: str) -> Tensor:
    names = list(_SIZES)
    first = 1 + sum(_SIZES[before] for before in names[: names.index(name)])
    assert sum(_SIZES.values()) < 2**22  # three states fit fp32's integers
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count, dtype=torch.float32).view(shape)


class Journey:
    """A model and its optimizer in one rank of a station."""

    def __init__(self, station: Station) -> None:
        from megatron.core import optimizer as core_optimizer
        from megatron.core.optimizer import OptimizerConfig

        import moe_optim
        from tests.support.training import install_experts

        if not torch.distributed.is_initialized():
            _start()
        _initialize_parallel(station.tp, station.pp, station.cp, station.ep, station.etp)
        self.station = station
        layout = "indexed" if station.experts == "indexed" else "grouped"
        self.knobs = MoEOptimConfig(
            format=station.format, expert_layout=layout, **dict(station.knobs)
        )
        moe_optim.uninstall()
        (install_experts if station.stock else moe_optim.install)(self.knobs)
        config = self._transformer_config()
        self.groups = _seeded_groups()
        self.first_layer = parallel_state.get_pipeline_model_parallel_rank() * (
            LAYERS // station.pp
        )
        self.model = _make_model(self, config)
        overlap = station.bucket_size is not None
        self.ddp = wrap(
            config, self.model, bucket_size=station.bucket_size, overlap_grad_reduce=overlap
        )
        factories = core_optimizer if station.stock else moe_optim
        make = factories.get_megatron_optimizer
        self.optimizer = make(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                clip_grad=0.0,
                bf16=True,
                use_distributed_optimizer=True,
            ),
            [self.ddp],
        )
        self.parts = list(self.optimizer.chained_optimizers)

    def _transformer_config(self) -> Any:
        from tests.support.modules.experts import make_config

        station = self.station
        return make_config(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            ffn_hidden_size=FFN,
            moe_ffn_hidden_size=FFN,
            num_moe_experts=EXPERTS,
            add_bias_linear=station.biases,
            moe_mlp_glu_interleave_size=station.interleave,
            tensor_model_parallel_size=station.tp,
            sequence_parallel=station.tp > 1,
            pipeline_model_parallel_size=station.pp,
            pipeline_dtype=torch.bfloat16,
            expert_model_parallel_size=station.ep,
            expert_tensor_parallel_size=station.etp,
        )

    @torch.no_grad()
    def fill(self) -> "Journey":
        """Set every master and moment to the number of its place, then derive the weights."""
        self._make_states()
        for part in self.parts:
            for param, start, states in owned_states(part):
                whole = self.local_part(param)
                for number, name in enumerate(STATES):
                    values = whole.view(-1)[start : start + states[name].numel()]
                    states[name].copy_(values + number * 2**22)
        self._write_weights()
        return self

    def _make_states(self) -> None:
        for part in self.parts:
            for _, master in _masters(part):
                master.grad = torch.zeros_like(master)
            part.optimizer.step()
            part.optimizer.zero_grad()

    def _write_weights(self) -> None:
        for part in self.parts:
            part._copy_main_params_to_model_params()
        self.ddp.start_param_sync(force_sync=True)

    @torch.no_grad()
    def scramble(self) -> "Journey":
        """Set every master and moment to nonsense, so that nothing can be left from here."""
        self._make_states()
        for part in self.parts:
            for _, _, states in owned_states(part):
                for name in STATES:
                    states[name].fill_(-1.0)
        self._write_weights()
        return self

    def local_part(self, param: torch.nn.Parameter) -> Tensor:
        """Return the numbers that belong into a parameter of this rank, in its shape."""
        layer, linear, kind, expert = self.model.places[param]
        if linear == "dense":
            whole = whole_dense(layer)
            rank, size = self.groups.tp.rank(), self.station.tp
            return whole.chunk(size, dim=0)[rank].contiguous()
        whole = whole_tensor(layer, linear, kind)
        rank, size = self.groups.expt_tp.rank(), self.station.etp
        if linear == "linear_fc1":
            whole = torch.cat([part.chunk(size, 1)[rank] for part in whole.chunk(2, dim=1)], dim=1)
        elif kind == "weight":
            whole = whole.chunk(size, dim=2)[rank]
        whole = whole.chunk(self.station.ep)[self.groups.ep.rank()].contiguous()
        return whole if expert is None else whole[expert]

    def check(self) -> int:
        """Compare every element of every state; return how many elements were compared."""
        count = 0
        for part in self.parts:
            for param, start, states in owned_states(part):
                whole = self.local_part(param).view(-1)
                for number, name in enumerate(STATES):
                    got = states[name].view(-1)
                    want = whole[start : start + got.numel()] + number * 2**22
                    wrong = int((got != want).sum())
                    place = self.model.places[param]
                    assert wrong == 0, f"{name} of {place}: {wrong} of {got.numel()} are wrong"
                    count += got.numel()
        return count

    def state(
        self, sharding: str, *, is_loading: bool = False, alone: bool = False, **more: Any
    ) -> dict[str, Any]:
        """Return the sharded state of model and optimizer. No rank communicates.

        ``alone`` asks for states without telling the optimizer how the model is stored.
        """
        metadata = {
            "distrib_optim_sharding_type": sharding,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": self.groups.dp_cp,
            **more,
        }
        model = self.model.sharded_state_dict(metadata=metadata)
        states = self.optimizer.sharded_state_dict(
            {} if alone else model, is_loading=is_loading, metadata=metadata
        )
        return {"model": model, "optimizer": states}

    def save(self, folder: Path, sharding: str, *, marked: bool = True, **more: Any) -> Any:
        """Save weights and optimizer state as ``torch_dist``. Every rank must call it.

        Without ``marked`` this package's optimizer leaves manifests out, too. ``more`` are further
        arguments of Megatron's.
        """
        from megatron.core import dist_checkpointing

        content = {
            "distrib_optim_sharding_type": sharding,
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
        }
        state = self.state(sharding, singleton_local_shards=False)
        if not marked:
            for part in (state["optimizer"], *state["optimizer"].values()):
                part.pop(MANIFEST, None) if isinstance(part, dict) else None
        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        return dist_checkpointing.save(state, str(folder), content_metadata=content, **more)

    def load(self, folder: Path, *, alone: bool = False, **more: Any) -> "Journey":
        """Load weights and optimizer state, with more arguments of Megatron's. Every rank calls.

        ``alone`` asks for the states without telling the optimizer how the model is stored.
        """
        from megatron.core import dist_checkpointing

        found = dist_checkpointing.load_content_metadata(str(folder))
        sharding = found.pop("distrib_optim_sharding_type")
        state = self.state(sharding, is_loading=True, alone=alone, **found)
        loaded = dist_checkpointing.load(state, str(folder), **more)
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        return self

    def keep(self, algo: str) -> "Journey":
        """Keep weights and states in memory, as a local checkpoint does. Every rank must call it.

        Args:
            algo: ``atomic``, or ``fully_parallel``, where replicas keep parts of each other's.
        """
        _pretend_resiliency()
        from megatron.core.dist_checkpointing.tensor_aware_state_dict import (
            MCoreTensorAwareStateDict,
        )

        self.kept, _ = MCoreTensorAwareStateDict.from_state_dict(
            self.state(_OF_LOCAL_ONES), algo=algo, parallelization_group=self.groups.dp_cp
        )
        self.kept.copy_tensors_to_cpu()
        return self

    def restore(self, algo: str) -> "Journey":
        """Load what :meth:`keep` has kept. Every rank must call it."""
        state = self.kept.to_state_dict(
            self.state(_OF_LOCAL_ONES, is_loading=True),
            algo=algo,
            parallelization_group=self.groups.dp_cp,
        )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return self

    def load_weights(self, folder: Path) -> "Journey":
        """Load the weights alone. Every rank must call it."""
        from megatron.core import dist_checkpointing

        model = self.model.sharded_state_dict(metadata={"dp_cp_group": self.groups.dp_cp})
        loaded = dist_checkpointing.load({"model": model}, str(folder))
        self.model.load_state_dict(loaded["model"])
        return self

    def check_masters_of_weights(self) -> int:
        """Every master is the number of its place rounded to bf16; return how many there are."""
        count = 0
        for part in self.parts:
            for param, start, states in owned_states(part):
                got = states["param"].view(-1)
                want = self.local_part(param).view(-1)[start : start + got.numel()]
                assert torch.equal(got, want.bfloat16().float()), self.model.places[param]
                count += got.numel()
        return count


def _pretend_resiliency() -> None:
    """Have Megatron keep checkpoints in memory without nvidia-resiliency-ext, which stores them."""
    from megatron.core.dist_checkpointing import tensor_aware_state_dict

    tensor_aware_state_dict.HAVE_NVRX = True


def _initialize_parallel(tp: int, pp: int, cp: int, ep: int, etp: int) -> None:
    """Make Megatron's process groups; those of the same sizes are used again."""
    if parallel_state.is_initialized() and _sizes == [tp, pp, cp, ep, etp]:
        return
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    _sizes[:] = [tp, pp, cp, ep, etp]


_sizes: list[int] = []
"""Parallel sizes of the existing process groups."""


def _seeded_groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    return ProcessGroupCollection.use_mpu_process_groups()


def _register_as_transformer_engine(experts: torch.nn.Module) -> None:
    """Put the parameters of each linear in the order of experts, which Megatron's buffers turn."""
    for linear in (experts.linear_fc1, experts.linear_fc2):
        ordered = [*linear.weights(), *linear.biases()]
        names = {id(parameter): name for name, parameter in linear.named_parameters()}
        linear._parameters = {names[id(parameter)]: parameter for parameter in ordered}


def _make_model(journey: Journey, config: Any) -> Any:
    """Return layers of experts and a dense linear, saved under the keys of a GPT."""
    from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.experts import SequentialMLP

    from moe_optim.experts.module import GroupedExperts

    station, groups = journey.station, journey.groups
    local = EXPERTS // station.ep

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = torch.nn.Module()
            if station.experts == "sequential":
                from megatron.core.tensor_parallel.layers import RowParallelLinear

                linears = MLPSubmodules(
                    linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
                )
                self.mlp.experts = SequentialMLP(local, config, linears, pg_collection=groups)
            else:
                self.mlp.experts = GroupedExperts(
                    local,
                    config,
                    moe_optim_config=journey.knobs,
                    pg_collection=groups,
                    name="experts",
                )
                if station.stock:
                    _register_as_transformer_engine(self.mlp.experts)
            self.dense = ColumnParallelLinear(
                HIDDEN, HIDDEN, config=config, init_method=config.init_method, bias=False
            )

    class Model(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config=config)
            self.decoder = torch.nn.Module()
            count = LAYERS // station.pp
            self.decoder.layers = torch.nn.ModuleList(Layer() for _ in range(count))
            if station.fp32_dense:
                for layer in self.decoder.layers:
                    layer.dense.weight.data = layer.dense.weight.data.float()
            self.places = dict(_places(self, journey.first_layer))

        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            return ORDERS[station.order](super().named_parameters(*args, **kwargs))

        def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
            state: dict[str, Any] = {}
            for index, layer in enumerate(self.decoder.layers):
                offsets = ((0, journey.first_layer + index, LAYERS),)
                prefix = f"decoder.layers.{index}."
                part = {
                    **layer.mlp.experts.sharded_state_dict(
                        f"{prefix}mlp.experts.", offsets, metadata
                    ),
                    **layer.dense.sharded_state_dict(f"{prefix}dense.", offsets, metadata),
                }
                replace_prefix_for_sharding(part, prefix, "decoder.layers.")
                state |= part
            return state

    return Model()


def _swapped(named: Iterator[tuple[str, Any]], one: str, other: str) -> Iterator[tuple[str, Any]]:
    """Yield parameters with ``one`` in their names where those with ``other`` were."""
    found = dict(named)
    for name in found:
        counterpart = name.replace(one, "?").replace(other, one).replace("?", other)
        yield counterpart, found[counterpart]


ORDERS = {
    "Megatron's": iter,
    "fc2 first": partial(_swapped, one="linear_fc1", other="linear_fc2"),
    "expert 3 first": partial(_swapped, one="experts.0.", other="experts.3."),
    "weight 3 first": partial(_swapped, one="weight0", other="weight3"),
}


def _places(model: torch.nn.Module, first_layer: int) -> Iterator[tuple[Any, Any]]:
    import re

    pattern = re.compile(
        r"decoder\.layers\.(\d+)\.(?:dense\.weight|mlp\.experts\.(?:local_experts\.(\d+)\.)?"
        r"(linear_fc[12])\.(weight|bias)(\d*))"
    )
    for name, param in model.named_parameters():
        layer, local, linear, kind, index = pattern.fullmatch(name).groups()
        expert = local or index
        yield (
            param,
            (
                first_layer + int(layer),
                linear or "dense",
                kind or "weight",
                int(expert) if expert else None,
            ),
        )


def _masters(part: Any) -> Iterator[tuple[Any, Tensor]]:
    for groups in (
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    ):
        for params, masters in zip(*groups, strict=True):
            yield from zip(params, masters, strict=True)


def owned_states(part: Any) -> Iterator[tuple[Any, int, dict[str, Tensor]]]:
    """Yield every parameter of which this rank owns something: its start, master and moments."""
    for param, master in _masters(part):
        start = part._get_model_param_range_map(param)["param"].start
        yield param, start, {"param": master, **_moments(part, master)}


def _moments(part: Any, master: Tensor) -> dict[str, Tensor]:
    state = part.optimizer.state[master]
    return {name: state[name] for name in STATES[1:]}
