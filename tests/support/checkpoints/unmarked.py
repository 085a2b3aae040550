"""Runs of stock Megatron that save flat states, and runs of this package that load them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_optim.checkpoint.state_manifest import ParameterPlace
from moe_optim.config import MoEOptimConfig
from moe_optim.weights.names import parameter_names
from tests.support import training
from tests.support.states.making_room import list_masters
from tests.support.training import Record, pretrain

SAVED = 2
"""Iteration of the checkpoint, after which both runs go on."""
RUN = ["--train-iters", "4", "--lr-decay-iters", "20", "--eval-interval", "1000"]
STATES = ("param", "exp_avg", "exp_avg_sq")
TIED = "tied"
"""Stands among flags for leaving out the one that unties the embeddings of the test model."""


def whole_states(model: Sequence[Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """Return masters and moments of this rank's experts and other parameters, put together.

    Every rank must call it. Keys are the same in every expert layout.
    """
    names = parameter_names(model)
    found = {}
    for part in optimizer.chained_optimizers:
        for buffer in part.buffers:
            for param in buffer.params:
                flat = torch.zeros(len(STATES), param.numel())
                if param in part.model_param_gbuf_map:
                    owned = part._get_model_param_range_map(param)["param"]
                    states = part._get_main_param_and_optimizer_states(param)
                    for into, state in zip(flat, STATES, strict=True):
                        if state in states:  # there are no moments without a step or a load
                            into[owned.start : owned.end] = states[state]
                dist.all_reduce(flat, group=buffer.data_parallel_group)
                place = ParameterPlace(name=names[param], shape=tuple(param.shape), start=0)
                addresses, sizes = zip(*place.pieces(), strict=True)
                for address, part_of in zip(addresses, flat.split(sizes, dim=1), strict=True):
                    for state, values in zip(STATES, part_of, strict=True):
                        found[f"{state} of {address}"] = values.clone()
    return found


def save_stock(folder: str, flags: Sequence[str]) -> Record:
    """Train with stock Megatron; ``extra`` has the states of the iteration that was saved."""
    states: dict[str, torch.Tensor] = {}

    def keep(step: int, *built: Any) -> None:
        if step == SAVED:
            states.update(whole_states(*built))

    saving = ["--save", folder, "--save-interval", str(SAVED)]
    record = _run([*RUN, *flags, *saving], None, after_step=keep)
    if dist.get_rank() == 0:  # not the last one, to which Megatron would go back
        Path(folder, "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    return Record(losses=record.losses, extra=states)


def resume(folder: str, flags: Sequence[str], config: MoEOptimConfig) -> Record:
    """Go on with this package; ``extra`` has the states that were loaded."""
    states: dict[str, torch.Tensor] = {}
    record = _run(
        [*RUN, *flags, "--load", folder],
        config,
        after_setup=lambda *built: states.update(whole_states(*built)),
    )
    return Record(losses=record.losses, extra=states)


def refuse(folder: str, flags: Sequence[str], config: MoEOptimConfig) -> tuple[str, list[str]]:
    """Return the error of a load, and the names of states and weights that it has moved."""
    from megatron.training import training as loop

    from moe_optim.errors import LayoutError

    moved: list[str] = []
    load = loop.load_checkpoint

    def watched(model: Sequence[Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = _everything(model, optimizer)
        try:
            return load(model, optimizer, *args, **kwargs)
        finally:
            after = _everything(model, optimizer)
            moved.extend(name for name in before if not torch.equal(before[name], after[name]))

    loop.load_checkpoint = watched
    try:
        _run([*RUN, *flags, "--load", folder], config)
    except LayoutError as error:
        return str(error), moved
    return "", moved


_REGISTERED = {  # what Megatron's own layers call norms that they store under another name
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def _everything(model: Sequence[Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """Return copies of all weights and masters of this rank."""
    found: dict[str, torch.Tensor] = {}
    for name, param in training.named_parameters(list(model)):
        found |= training.weight_bytes(name, param)
    masters = enumerate(list_masters(optimizer))
    return {**found, **{f"master {n}": master.clone() for n, master in masters}}


def _run(flags: Sequence[str], *args: Any, **kwargs: Any) -> Record:
    if TIED in flags:
        training.MODEL.remove("--untie-embeddings-and-output-weights")
    return pretrain([flag for flag in flags if flag != TIED], *args, **kwargs)
