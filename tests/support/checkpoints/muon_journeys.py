"""Checkpoints of Muon: saved in several forms by one run, loaded and saved again by another."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.config import MoEOptimConfig
from tests.support.bytes import assert_bytes_equal
from tests.support.training import Record, pretrain

_RUN = "--train-iters 4 --eval-interval 100 --global-batch-size 6 --override-opt_param-scheduler"
BY_NAME = "--dist-ckpt-optim-fully-reshardable"
SAVED_AT = 2


def command_line(flags: Sequence[str]) -> list[str]:
    """Return the flags of a run of 4 iterations, with Muon unless ``flags`` name an optimizer."""
    muon = [] if "--optimizer" in flags else ["--optimizer", "muon"]
    return [*_RUN.split(), *muon, *flags]


class Journey(NamedTuple):
    """A checkpoint to load, and the folder to save it to by name."""

    source: Path
    target: Path


def train_and_save(
    flags: Sequence[str],
    config: MoEOptimConfig | None,
    folder: Path,
    without: Sequence[str] = (),
    is_laid_out: bool = True,
) -> Record:
    """Train, and save after iteration 2 into ``folder/flat``, and by name into ``folder/named``.

    Args:
        flags: added to those of :func:`command_line`.
        config: None for stock Megatron.
        folder: folder of both checkpoints.
        without: words of the command line to leave out.
        is_laid_out: whether stock lays buffers out for its layer-wise optimizer, as
            ``pretrain_gpt.py`` does.
    """

    scheduler = _keep_scheduler()

    def save_twice(step: int, model: list[Any], optimizer: Any) -> None:
        if step == SAVED_AT:
            save([model, optimizer, *scheduler], folder / "flat", by_name=False)
            save([model, optimizer, *scheduler], folder / "named", by_name=True)

    if config is None:
        prepare_stock(is_laid_out=is_laid_out)
    return pretrain(command_line(flags), config, after_step=save_twice, without=without)


def load_and_save(
    flags: Sequence[str],
    config: MoEOptimConfig | None,
    journeys: Sequence[Journey],
) -> Record:
    """Load and save one checkpoint after another, then go on from the last of them."""

    scheduler = _keep_scheduler()

    def travel(model: list[Any], optimizer: Any) -> None:
        from megatron.training import get_args
        from megatron.training.checkpointing import load_checkpoint

        for journey in journeys:
            get_args().load, get_args().ckpt_step = str(journey.source), SAVED_AT
            scheduler[0].num_steps = 0  # a load adds to it
            get_args().iteration, _ = load_checkpoint(model, optimizer, *scheduler)
            save([model, optimizer, *scheduler], journey.target, by_name=True)

    if config is None:
        prepare_stock(is_laid_out=True)
    return pretrain(command_line(flags), config, after_setup=travel)


def _keep_scheduler() -> list[Any]:
    """Return the list that the scheduler goes into when Megatron builds it."""
    from megatron.training import training

    stock, kept = training.get_optimizer_param_scheduler, []

    def build(optimizer: Any) -> Any:
        kept[:] = [stock(optimizer)]
        return kept[0]

    training.get_optimizer_param_scheduler = build
    return kept


def save(training: list[Any], folder: Path, *, by_name: bool) -> None:
    """Save model, optimizer and scheduler as after iteration 2. Every rank must call it."""
    from megatron.training import get_args
    from megatron.training.checkpointing import save_checkpoint

    args: Namespace = get_args()
    kept = vars(args).copy()
    args.consumed_train_samples = SAVED_AT * args.global_batch_size  # counted after the hook
    args.save, args.dist_ckpt_optim_fully_reshardable = str(folder), by_name
    args.distrib_optim_fully_reshardable_mem_efficient = False
    save_checkpoint(SAVED_AT, *training, 0)
    vars(args).update(kept)


def open_saved(folder: Path) -> TorchDistReader:
    """Open the checkpoint of iteration 2."""
    return TorchDistReader(folder / f"iter_{SAVED_AT:07}")


def assert_same_states(got: Path, want: Path) -> None:
    """Masters, momenta and moments of two checkpoints by name are equal to the bit."""
    left, right = open_saved(got), open_saved(want)
    keys = {key for key in right.tensors if key.startswith("optimizer.state.")}
    assert len(keys) > 20
    assert keys == {key for key in left.tensors if key.startswith("optimizer.state.")}
    for key in sorted(keys):
        assert_bytes_equal(left.read(key), right.read(key), what=key)


def prepare_stock(*, is_laid_out: bool) -> None:
    """Let Megatron's layer-wise Muon train on gloo, with the buffers of ``pretrain_gpt.py``."""
    dist.all_gather = torch.distributed.all_gather = _padded(dist.all_gather)
    if not is_laid_out:
        return
    from megatron.core.utils import get_model_config
    from megatron.training import training
    from megatron.training.models import dist_utils

    def wrap(model: Any, _random: Any, ddp_config: Any, *_: Any, pg_collection: Any, **__: Any):
        return training.wrap_model_chunks_with_ddp(
            model,
            get_model_config(model[0]),
            ddp_config,
            use_layer_wise_distributed_optimizer=True,
            pg_collection=pg_collection,
        )

    dist_utils._ddp_wrap = wrap


def _padded(stock: Any) -> Any:
    """Return an all_gather of tensors of several sizes, which gloo lacks."""

    def all_gather(into: list[torch.Tensor], mine: torch.Tensor, group: Any = None, **_: Any):
        padded = mine.new_zeros(max(one.numel() for one in into))
        padded[: mine.numel()] = mine.view(-1)
        found = [torch.zeros_like(padded) for _ in into]
        stock(found, padded, group=group)
        for one, values in zip(into, found, strict=True):
            one.copy_(values[: one.numel()].view_as(one))

    return all_gather
