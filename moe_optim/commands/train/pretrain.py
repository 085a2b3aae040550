"""One rank of ``moe-optim train``: a GPT from Megatron's specs, trained by Megatron's ``pretrain``.

Started by torchrun as ``python -m moe_optim.commands.train.pretrain MEGATRON_ARGS``, with
``MOE_OPTIM_CPU=1`` on machines without a GPU. Functions import Megatron locally, because the CPU
runtime must be installed first and checkpoint workers import this module again.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from moe_optim import import_hook
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import MoEOptimError
from moe_optim.integration import cpu_runtime, installation, patches
from moe_optim.integration.arguments import add_moe_optim_arguments, config_from_argv
from moe_optim.integration.engine import apply_patches
from moe_optim.rules import Setup, check_setup

Batch = dict[str, Tensor]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of token losses [B, S] in nats, the number of tokens, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(
    batches: Iterator[Batch] | None, model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """Run one micro-batch forward through one pipeline stage, whose input Megatron has set.

    Args:
        batches: batches; None on stages that read no data, see :func:`is_data_read_here`.
        model: model chunk.
        return_schedule_plan: whether Megatron runs the layers itself, overlapped.
    """
    from megatron.core.parallel_state import get_context_parallel_group
    from megatron.core.utils import get_batch_on_this_cp_rank

    names = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")
    batch: dict[str, Any] = dict.fromkeys(names)
    if batches is not None:
        batch |= {name: value.cuda(non_blocking=True) for name, value in next(batches).items()}
        batch = get_batch_on_this_cp_rank(batch, False, get_context_parallel_group())
    run: Any = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def is_data_read_here(vp_stage: int | None) -> bool:
    """Return whether a model chunk of this rank reads batches.

    The first pipeline stage needs tokens, the last needs labels, and every stage needs a mask made
    by the data loader. All tensor-parallel ranks read the same samples, which depend only on the
    data-parallel rank, so none is broadcast.
    """
    from megatron.training import get_args
    from megatron.training.utils import is_first_or_last_pipeline_stage

    if get_args().create_attention_mask_in_dataloader:
        return True
    return bool(is_first_or_last_pipeline_stage(vp_stage))


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build Megatron's training, validation and test datasets from ``--*-data-path``."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    is_built_here = partial(is_data_read_here, vp_stage)
    return BlendedMegatronDatasetBuilder(dataset, num_samples, is_built_here, config).build()


build_datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank takes part


def refuse_unsupported(args: Namespace) -> None:
    """Refuse flags that would behave differently than in ``pretrain_gpt.py``."""
    check_setup(Setup(config=MoEOptimConfig(), args=args), "moe-optim train")


def check(argv: Sequence[str]) -> dict[str, Any]:
    """Return ``cpu``, whether the ranks train on CPUs, and all ``faults`` of their flags."""
    from moe_optim.commands.train.launcher import rank_environment
    from moe_optim.integration.script_runner import trains_on_cpu

    ranks, gpus, cpu = int(os.environ["WORLD_SIZE"]), torch.cuda.device_count(), trains_on_cpu()
    os.environ.update(rank_environment(ranks, cpu=cpu))
    if cpu:
        cpu_runtime.install()

    from megatron.training.arguments import parse_and_validate_args

    from moe_optim.commands.train.layer_spec import layer_spec
    from moe_optim.integration.preflight import list_faults
    from moe_optim.integration.script_arguments import require_evaluation

    parse = partial(parse_and_validate_args, extra_args_provider=add_moe_optim_arguments)
    checks = refuse_unsupported, require_evaluation
    faults = list_faults(parse, argv, *checks, layer_spec=layer_spec)
    if not cpu and ranks > gpus:
        said = f"ranks: expected at most one per GPU, got {ranks} for {gpus} GPUs"
        faults.append(f"{said}. Use --ranks, or --cpu.")
    return {"cpu": cpu, "faults": faults}


def train(argv: Sequence[str]) -> None:
    """Build the model and run Megatron's training loop to its end.

    ``argv``, Megatron's and moe_optim's flags, replaces ``sys.argv``, which Megatron parses.
    """
    sys.argv = [sys.argv[0], *argv]
    moe_optim_config = config_from_argv(argv)
    import_hook.disarm()
    if os.environ.get("MOE_OPTIM_CPU") == "1":
        cpu_runtime.install()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        sys.argv += ["--distributed-backend", "gloo"]
    apply_patches(patches.TRAIN)
    if moe_optim_config is not None:
        installation.install_by_flag(moe_optim_config)

    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from moe_optim.commands.train.layer_spec import layer_spec
    from moe_optim.integration.script_arguments import (
        require_megatron_checkpoint,
        require_transformer_engine,
        settle_optimizer,
    )

    args = parse_and_validate_args(extra_args_provider=add_moe_optim_arguments)
    if moe_optim_config is not None:
        settle_optimizer(args)
        require_megatron_checkpoint(args)
    refuse_unsupported(args)
    require_transformer_engine(args)
    model_config = gpt_config_from_args(args)
    if model_config.transformer_layer_spec is None:  # else --spec names one
        model_config.transformer_layer_spec = layer_spec
    pretrain(
        pretrain_cfg_container_from_args(args, model_config),
        build_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
    )


def main() -> None:
    """Run one rank; with a leading ``--check``, print :func:`check` as JSON instead.

    Errors are recorded for torch's elastic agent.
    """
    if sys.platform == "linux":  # a rank must not outlive the launcher that holds the run folder
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.argv[1:2] == ["--check"]:
        print(json.dumps(check(sys.argv[2:])))
        return
    recorder = get_error_handler()
    recorder.initialize()
    try:
        train(sys.argv[1:])
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except (Exception, CheckpointException) as error:  # the latter derives from BaseException
        try:
            recorder.record_exception(error)
        except OSError:  # on a full disk: the agent cannot parse a part of a record
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).unlink(missing_ok=True)
        if isinstance(error, MoEOptimError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        os._exit(1)  # the other ranks may be inside a collective: do not wait for them


if __name__ == "__main__":
    main()
