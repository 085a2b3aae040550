"""One rank of a training run: its losses, its settings as Megatron has them, and how it ended.

Run as ``python -m tests.support.training_runs.observed_run REPORT [SWITCH ...] -- MEGATRON ARGS``,
with the environment of torchrun. REPORT gets JSON of :class:`Report`, however the run ends. A
switch is something that no flag of Megatron says, the same for stock Megatron and the plug-in:

``plain-head``  the output layer does not fuse gradient accumulation, which would need apex
``delay-wgrad``  ``delay_wgrad_compute`` with ``--transformer-impl local``
``export``     after each step dense weights are exported, and are what Transformer Engine reads
``copies``     counts quantized copies of weights, all that were made until the end of each step
``by-hand-NAME``  Transformer Engine's experts multiply what their weights are in format NAME,
               quantized at every call by plain torch
``send-away``  after each step weights, gradients, masters and moments go to the host and come back,
               by the calls of Megatron's and of verl's loops in turns
"""

import copy
import dataclasses
import enum
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_optim.calibration.fake_quantization import PER_EXPERT_GRIDS
from moe_optim.formats import FORMATS, get_format


@dataclasses.dataclass
class Report:
    """What one rank saw."""

    losses: list[str] = dataclasses.field(default_factory=list)
    """Of every iteration, exact, in hexadecimal."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the transformer and of the DDP configuration; enumerations by name."""
    experts: list[str] = dataclasses.field(default_factory=list)
    """Class of each layer's experts."""
    expert_parameters: list[str] = dataclasses.field(default_factory=list)
    """Names of one layer's experts' parameters."""
    managed: int = 0
    """Parameters that the plug-in manages."""
    graphs: int = 0
    """The most CUDA graphs that layers and the optimizer's step held after a step."""
    allocated: int = 0
    """Bytes of the GPU after the last step."""
    on_host: int = 0
    """Elements whose masters and moments are at home on the host."""
    freed: list[int] = dataclasses.field(default_factory=list)
    """Bytes of the GPU that ``send-away`` has freed, each time."""
    exported: int = 0
    """Dense weights that Transformer Engine had quantized, of the last export."""
    copies: list[int] = dataclasses.field(default_factory=list)
    """Quantized copies of weights, all until the end of each step."""
    error: str | None = None
    """What ended the run before its end: type and first line."""


def plain_head() -> None:
    """Let Megatron's own output layer do without the fused accumulation of the other linears."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    construct = ColumnParallelLinear.__init__

    def construct_plain(self: Any, *args: Any, config: Any, **kwargs: Any) -> None:
        config = copy.copy(config)
        config.gradient_accumulation_fusion = False
        construct(self, *args, config=config, **kwargs)

    ColumnParallelLinear.__init__ = construct_plain


def warn_of_nondeterminism() -> None:
    """Let ``--deterministic-mode`` warn of operations that have no deterministic form.

    Some that torch lists as such repeat on integers, and a case should not fail for them.
    """
    torch.use_deterministic_algorithms = partial(torch.use_deterministic_algorithms, warn_only=True)


def delay_wgrad() -> None:
    """Delay weight gradients of portable experts."""
    from tests.support.states.schedules import turn_on

    turn_on("delay_wgrad_compute")


def send_away() -> None:
    """Have weights and all else on the host for a moment after each step."""
    _after_step.append(_send_away)


def _send_away(report: Report, chunks: list[Any], optimizer: Any) -> None:
    from tests.support.states import making_room

    by_verl = len(report.freed) % 2
    before = torch.cuda.memory_allocated()
    if by_verl:
        making_room.send_away_as_verl(chunks)
        making_room.send_states_away_as_verl(optimizer)
    else:
        for chunk in chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.offload_to_cpu()
        optimizer.offload_to_cpu()
    report.freed.append(before - torch.cuda.memory_allocated())
    if by_verl:
        making_room.bring_back_as_verl(chunks)
        making_room.bring_states_back_as_verl(optimizer)
    else:
        for chunk in chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.reload_from_cpu()
        optimizer.restore_from_cpu()


def export() -> None:
    """Compare what is exported of dense weights after each step."""
    _after_step.append(_export)


def _export(report: Report, chunks: list[Any], optimizer: Any) -> None:
    import moe_optim
    from moe_optim.weights.names import parameter_names
    from moe_optim.weights.te.fields import te_formats_of
    from tests.support.bytes import assert_bytes_equal

    given = dict(moe_optim.export_weights(chunks, layout="sequential"))
    quantized = {
        name: param
        for param, name in parameter_names(chunks).items()
        if te_formats_of(param) and ".experts." not in name
    }
    for name, param in quantized.items():
        assert_bytes_equal(given[name], param.dequantize(dtype=torch.bfloat16), what=name)
    report.exported = len(quantized)


def count_copies() -> None:
    """Count quantized copies of weights."""
    from moe_optim.experts.weight_copies import WeightCopies

    make, made = WeightCopies._quantize, []

    def counting(*given: Any) -> Any:
        made.append(1)
        return make(*given)

    WeightCopies._quantize = counting
    _after_step.append(lambda report, *_: report.copies.append(len(made)))


def quantize_by_hand(name: str) -> None:
    """Give GEMMs of Transformer Engine's grouped linears weights that are quantized by hand."""
    from transformer_engine.pytorch import GroupedLinear

    from tests.support.te.grouped_gemm import by_hand

    format = PER_EXPERT_GRIDS.get(name) or get_format(name)
    own = GroupedLinear._get_weight_tensors
    GroupedLinear._get_weight_tensors = lambda linear: by_hand(
        own(linear), format, fuses=linear.fuse_wgrad_accumulation
    )


_after_step: list[Callable[[Report, list[Any], Any], None]] = []
SWITCHES: dict[str, Callable[[], None]] = {
    "plain-head": plain_head,
    "delay-wgrad": delay_wgrad,
    "export": export,
    "send-away": send_away,
    "copies": count_copies,
    **{
        f"by-hand-{name}": partial(quantize_by_hand, name) for name in (*FORMATS, *PER_EXPERT_GRIDS)
    },
}


def observe(report: Report) -> None:
    """Make Megatron's training loop write into ``report``."""
    from megatron.training import training

    from moe_optim.integration import patches
    from moe_optim.integration.engine import apply_patches

    apply_patches(patches.TRAIN)  # first, so that the wrappers below stay outermost
    setup, train_step = training.setup_model_and_optimizer, training.train_step
    built: list[Any] = []

    def setup_and_look(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        built.extend(result[0])
        look(report, built)
        return result

    def step_and_note(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        loss = result[0].get("lm loss")
        if loss is not None:
            report.losses.append(float(loss).hex())
        optimizer = args[3]
        report.graphs = max(report.graphs, count_graphs(built, optimizer))
        report.allocated = torch.cuda.memory_allocated()
        report.on_host = sum(
            part.host_states.numel
            for part in getattr(optimizer, "chained_optimizers", [])
            if getattr(part, "host_states", None) is not None
        )
        for act in _after_step:
            act(report, built, optimizer)
        return result

    training.setup_model_and_optimizer = setup_and_look
    training.train_step = step_and_note


def look(report: Report, chunks: list[Any]) -> None:
    """Note what the model was built as."""
    from moe_optim.weights.managed import is_managed

    for config in (chunks[0].config, chunks[0].ddp_config):
        for field in dataclasses.fields(config):
            report.settings[field.name] = _as_json(getattr(config, field.name))
    for chunk in chunks:
        report.managed += sum(is_managed(param) for param in chunk.parameters())
        for name, module in chunk.named_modules():
            if name.endswith(".mlp.experts"):
                report.experts.append(type(module).__name__)
                report.expert_parameters = [name for name, _ in module.named_parameters()]


def _as_json(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if callable(value):
        return getattr(value, "__name__", str(value))
    return value if isinstance(value, str | int | float | None) else str(value)


def count_graphs(chunks: list[Any], optimizer: Any) -> int:
    """Return how many CUDA graphs layers hold, of either implementation, and our step."""
    count = int(getattr(vars(optimizer).get("step"), "_graph", None) is not None)
    for chunk in chunks:
        for module in chunk.modules():
            count += len(getattr(module, "cuda_graphs", ()))
            for manager in vars(module).values():
                runners = getattr(manager, "cudagraph_runners", ())
                count += sum(runner.fwd_graph is not None for runner in runners)
    return count


def main() -> int:
    """Train, and write the report."""
    path, *words = sys.argv[1:]
    separator = words.index("--")
    switches, argv = words[:separator], words[separator + 1 :]
    report = Report()
    try:
        if os.environ.get("MOE_OPTIM_CPU") == "1":
            from moe_optim.integration import cpu_runtime

            cpu_runtime.install()  # before Megatron is imported
        from moe_optim.commands.train import pretrain

        observe(report)
        warn_of_nondeterminism()
        for switch in switches:
            SWITCHES[switch]()
        pretrain.train(argv)
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        report.error = f"{type(error).__name__}: {lines[0]}"
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(dataclasses.asdict(report)))
    partial.rename(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(report.error is not None)  # the other rank may be inside a collective


if __name__ == "__main__":
    main()
