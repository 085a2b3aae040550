"""``python -m benchmarks checkpoint``: saving and loading optimizer states by name.

Ranks, on the CPU over gloo or on GPUs over NCCL, hold the experts of a model, their masters and
Adam's moments, sharded by the distributed optimizer. They save weights and states as
``fully_reshardable``, and load them again. ``stock`` is Megatron's sequential experts with its own
optimizer, ``ours`` the portable experts in bf16 with this package's; both files have the same
tensors. ``stock-flat`` is ``stock`` with Megatron's default states, ``dp_reshardable``, which load
at no other sizes than data-parallel ones.
The second of two saves and loads counts; a load of this package compares checksums of what it
reads.
"""

import argparse
import ctypes
import gc
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.table import Table

from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.errors import ConfigError
from moe_optim.screen import print_table, results_console

FFN, EXPERTS = 768, 8
SIDES = ("stock", "stock-flat", "ours")
COLUMNS = {
    "ranks": "ranks",
    "side": "side",
    "save_s": "save s",
    "load_s": "load s",
    "save_peak_bytes": "save MiB",
    "load_peak_bytes": "load MiB",
    "save_gpu_peak_bytes": "save GPU MiB",
    "load_gpu_peak_bytes": "load GPU MiB",
    "written_bytes": "written MiB",
    "read_bytes": "read MiB",
}

type Row = dict[str, Any]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``benchmarks checkpoint``."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="time, host memory and bytes of saving and loading states by name",
        description="Save and load experts, masters and moments on ranks of this machine, with "
        "Megatron's optimizer and with this package's. Linux only.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--parameters", type=float, default=40e6, metavar="N", help="size; default: 40e6")
    add("--hidden", type=int, default=512, metavar="N", help="hidden size; default: 512")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of every rank; default: cpu")
    ranks: dict[str, Any] = {"type": int, "nargs": "+", "default": [1, 2, 4], "metavar": "N"}
    add("--ranks", **ranks, help="data-parallel sizes; default: 1 2 4")
    sides: dict[str, Any] = {"choices": SIDES, "nargs": "+", "default": list(SIDES)}
    add("--side", **sides, help="what to measure; default: all")
    add("--dir", type=Path, default=Path(), metavar="DIR", help="folder for it; default: here")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def run(args: argparse.Namespace) -> int:
    """Measure every side on every number of ranks, and print and write the largest of all ranks.

    Raises:
        ConfigError: a number is not positive.
    """
    from torch.multiprocessing.spawn import spawn

    from benchmarks.provenance import begin_report

    if min(args.parameters, args.hidden, *args.ranks) < 1:
        raise ConfigError(
            "--parameters, --hidden, --ranks: expected numbers above 0. Give larger ones."
        )
    require_writable(args.json)
    of_layer = EXPERTS * 3 * args.hidden * FFN
    layers = max(1, round(args.parameters / of_layer))
    rows = []
    for size in args.ranks:
        for side in args.side:
            with TemporaryDirectory(prefix="bench-checkpoint-", dir=args.dir) as folder:
                shape = (layers, args.hidden)
                spawn(_rank, (size, side, shape, args.device, folder), nprocs=size)
                figures = json.loads((Path(folder) / "figures.json").read_text())
            rows.append({"ranks": size, "side": side, **figures})
    on_gpu = args.device == "cuda"
    report = {
        **begin_report(_command(args), on_gpu=on_gpu, ranks=max(args.ranks)),
        "parameters": layers * of_layer,
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print_table(results_console(), _table(report))
    return 0


def _command(args: argparse.Namespace) -> str:
    words = ["python", "-m", "benchmarks", "checkpoint", "--parameters", f"{args.parameters:g}"]
    words += ["--hidden", str(args.hidden), "--device", args.device]
    words += ["--ranks", *map(str, args.ranks), "--side", *args.side]
    words += ["--dir", str(args.dir)] if args.dir != Path() else []
    words += ["--json", str(args.json)] if args.json else []
    return shlex.join(words)


def _table(report: dict[str, Any]) -> Table:
    title = f"{report['parameters']:,} parameters, {report['device']}; the largest of all ranks"
    table = Table(title=title, title_justify="left")
    names = [name for name in COLUMNS if name in report["rows"][0]]
    for name in names:
        table.add_column(COLUMNS[name], justify="left" if name == "side" else "right")
    for row in report["rows"]:
        table.add_row(
            *(f"{row[name] / 2**20:,.0f}" if "bytes" in name else f"{row[name]}" for name in names)
        )
    return table


def _rank(
    rank: int, size: int, side: str, shape: tuple[int, int], device: str, folder: str
) -> None:
    """Measure on one rank; rank 0 writes the largest figures of all."""
    import torch
    import torch.distributed as dist

    from moe_optim.integration import cpu_runtime

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    if device == "cpu":
        cpu_runtime.install()
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", size)  # type: ignore[attr-defined]
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    journey = _build(side, *shape)
    saved = Path(folder) / "saved"
    for _ in range(2):
        if rank == 0:
            shutil.rmtree(saved, ignore_errors=True)
            saved.mkdir()
        save, load = (_measure(partial(act, saved)) for act in (journey.save, journey.load))
    written = sum(path.stat().st_size for path in saved.glob(f"__{rank}_*"))
    own = {
        "save_s": round(save.seconds, 2),
        "load_s": round(load.seconds, 2),
        "save_peak_bytes": save.peak_bytes,
        "load_peak_bytes": load.peak_bytes,
        **({"save_gpu_peak_bytes": save.gpu_peak_bytes} if device == "cuda" else {}),
        **({"load_gpu_peak_bytes": load.gpu_peak_bytes} if device == "cuda" else {}),
        "written_bytes": written,
        "read_bytes": load.read_bytes,
    }
    everywhere: list[Any] = [None] * size
    dist.all_gather_object(everywhere, own)
    if rank == 0:
        largest = {name: max(one[name] for one in everywhere) for name in own}
        (Path(folder) / "figures.json").write_text(json.dumps(largest))
    dist.barrier()
    for child in active_children():  # Megatron's queue of results, which nobody ends
        child.terminate()
    os._exit(0)  # gloo's threads need no goodbye


@dataclass(frozen=True)
class _Measured:
    seconds: float
    peak_bytes: int
    """Host memory above the level before."""
    gpu_peak_bytes: int
    """GPU memory above the level before; 0 without a GPU."""
    read_bytes: int


def _measure(act: Callable[[], object]) -> _Measured:
    import torch
    import torch.distributed as dist

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # restarts the peak
    torch.cuda.reset_peak_memory_stats()
    on_gpu = torch.cuda.memory_allocated()
    held, read, began = _status("VmRSS"), _read_so_far(), time.perf_counter()
    act()
    torch.cuda.synchronize()
    dist.barrier()
    seconds = time.perf_counter() - began
    on_gpu = torch.cuda.max_memory_allocated() - on_gpu
    return _Measured(seconds, _status("VmHWM") - held, on_gpu, _read_so_far() - read)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _read_so_far() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@dataclass(frozen=True)
class _Run:
    """A model and its optimizer on this rank."""

    model: Any
    optimizer: Any
    dp_cp: Any
    sharding: str
    """Megatron's sharding type of optimizer states."""

    def save(self, folder: Path) -> None:
        """Save weights and states."""
        from megatron.core import dist_checkpointing

        content = {
            "distrib_optim_sharding_type": self.sharding,
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
        }
        metadata = {**content, "dp_cp_group": self.dp_cp}
        model = self.model.sharded_state_dict(metadata=metadata)
        states = self.optimizer.sharded_state_dict(model, metadata=metadata)
        state = {"model": model, "optimizer": states}
        dist_checkpointing.save(state, str(folder), content_metadata=content)

    def load(self, folder: Path) -> None:
        """Load them again."""
        from megatron.core import dist_checkpointing

        metadata = dist_checkpointing.load_content_metadata(str(folder))
        metadata["dp_cp_group"] = self.dp_cp
        model = self.model.sharded_state_dict(metadata=metadata)
        states = self.optimizer.sharded_state_dict(model, is_loading=True, metadata=metadata)
        loaded = dist_checkpointing.load({"model": model, "optimizer": states}, str(folder))
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])


def _build(side: str, layers: int, hidden: int) -> _Run:
    """Return experts of ``layers`` with masters and moments."""
    import torch
    from megatron.core import optimizer as stock
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    import moe_optim

    if side == "ours":
        moe_optim.install(moe_optim.MoEOptimConfig(format="bf16"))
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    torch.compiler.set_stance("force_eager")
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=8,
        moe_ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        moe_grouped_gemm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = _model(config, groups, side)
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, bucket_size=None
        ),
        model,
    )
    make = moe_optim.get_megatron_optimizer if side == "ours" else stock.get_megatron_optimizer
    flags = {"bf16": True, "use_distributed_optimizer": True, "clip_grad": 0.0}
    optimizer = make(stock.OptimizerConfig(optimizer="adam", lr=1e-3, **flags), [ddp])
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                master.grad = torch.ones_like(master)
        part.optimizer.step()
        part.optimizer.zero_grad(set_to_none=True)
    sharding = "dp_reshardable" if side == "stock-flat" else "fully_reshardable"
    return _Run(model, optimizer, groups.dp_cp, sharding)


def _model(config: Any, groups: Any, side: str) -> Any:
    import torch
    from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.experts import SequentialMLP

    from moe_optim.config import MoEOptimConfig
    from moe_optim.experts.module import GroupedExperts

    def experts() -> torch.nn.Module:
        if side == "ours":
            knobs = MoEOptimConfig(format="bf16")
            more = {"moe_optim_config": knobs, "pg_collection": groups, "name": "experts"}
            return GroupedExperts(EXPERTS, config, **more)
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return SequentialMLP(EXPERTS, config, linears, pg_collection=groups)

    class Model(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config=config)
            self.layers = torch.nn.ModuleList(experts() for _ in range(config.num_layers))

        def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
            state: dict[str, Any] = {}
            layers: list[Any] = list(self.layers)
            for index, layer in enumerate(layers):
                prefix, offsets = f"layers.{index}.", ((0, index, config.num_layers),)
                part = layer.sharded_state_dict(prefix, offsets, metadata)
                replace_prefix_for_sharding(part, prefix, "layers.")
                state |= part
            return state

    return Model()
