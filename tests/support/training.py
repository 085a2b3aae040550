"""A small MoE GPT through Megatron's own ``pretrain``, observed from inside a rank."""

import contextlib
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.weights.grouped_weight import GroupedWeight
from tests.support.bytes import assert_same_tensors

MODEL = shlex.split("""
--transformer-impl local --num-layers 2 --hidden-size 64 --ffn-hidden-size 96
--moe-ffn-hidden-size 96 --num-attention-heads 2 --num-experts 4 --moe-router-topk 2
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --swiglu --disable-bias-linear
--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
--seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4
--lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --clip-grad 0 --weight-decay 0.1
--attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
--no-persist-layer-norm --no-rope-fusion --no-create-attention-mask-in-dataloader
--mock-data --tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 32
--num-workers 0 --log-interval 1 --ckpt-format torch_dist
--init-method-std 0.2 --eval-iters 1 --save-interval 1000000
""")
NEVER = 100
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]


@dataclass
class Record:
    """What one rank saw of a run. Every tensor is a copy."""

    losses: dict[int, float] = field(default_factory=dict)  # iteration -> lm loss, exact
    validation_losses: list[float] = field(default_factory=list)
    norms: dict[int, float | None] = field(default_factory=dict)  # iteration -> of all gradients
    masters: dict[str, torch.Tensor] = field(default_factory=dict)  # this rank's shards, fp32
    moments: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # bf16, or buffers as bytes
    classes: set[str] = field(default_factory=set)
    extra: Any = None


def pretrain(
    flags: Sequence[str],
    config: MoEOptimConfig | None,
    optimizer: bool = True,
    observe: Callable[[list[Any], Any], Any] | None = None,
    after_step: Callable[[int, list[Any], Any], None] | None = None,
    after_setup: Callable[[list[Any], Any], None] | None = None,
    without: Sequence[str] = (),
) -> Record:
    """Train, on the CPU where there is no GPU, and return what happened.

    Once a process: Megatron keeps global state. With an ``--eval-interval`` of :data:`NEVER` or
    more nothing is evaluated, at the end neither.

    Args:
        flags: added to MODEL.
        config: None for stock Megatron with its own experts.
        optimizer: False installs the portable experts alone, under the stock optimizer.
        observe: called with model chunks and optimizer at the end; its result is ``extra``.
        after_step: called after every training step with its number (1-based), chunks, optimizer.
        after_setup: called once with chunks and optimizer, before the first step.
        without: words of MODEL to leave out.
    """
    from moe_optim.commands.train.pretrain import train
    from moe_optim.integration import cpu_runtime, installation

    if cpu_runtime.is_installed() or not torch.cuda.is_available():
        os.environ["MOE_OPTIM_CPU"] = "1"
        cpu_runtime.install()
    _shrink_mock_data()
    if config is not None and optimizer:
        installation.install(config, **({"optimizer": "muon"} if "muon" in flags else {}))
        _settle_optimizer()
    elif config is not None:
        install_experts(config)
    record = Record()
    built = _watch(record, after_step, after_setup)
    # --exit-interval ends the loop with sys.exit(0)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as events,
        contextlib.suppress(SystemExit),
    ):
        model = [word for word in MODEL if word not in without]
        train([*model, *flags, *_evaluations(flags), *_events(config, f"{events}/tb")])
    if built:  # else Megatron has converted a checkpoint, and ended there
        _record_state(record, *built)
    if observe is not None:
        record.extra = observe(*built)
    return record


def _events(config: MoEOptimConfig | None, folder: str) -> list[str]:
    """Return the flags of a run that samples health, which it writes there.

    Others write nothing: every argument becomes a text of TensorBoard's.
    """
    return ["--tensorboard-dir", folder] if config is not None and config.health_interval else []


def _evaluations(flags: Sequence[str]) -> list[str]:
    """Return what spares a run that does not evaluate in between the two evaluations at its end."""
    intervals = [int(value) for flag, value in pairwise(flags) if flag == "--eval-interval"]
    return ["--eval-iters", "0"] if intervals and intervals[-1] >= NEVER else []


def _settle_optimizer() -> None:
    """Let Muon be a distributed optimizer, as --use-moe-grouped-optim does."""
    from megatron.training import arguments

    from moe_optim.integration.script_arguments import settle_optimizer

    stock = arguments.parse_and_validate_args

    def parse(*args: Any, **kwargs: Any) -> Any:
        parsed = stock(*args, **kwargs)
        settle_optimizer(parsed)
        return parsed

    arguments.parse_and_validate_args = parse


def install_experts(config: MoEOptimConfig) -> None:
    """Install the portable experts alone: optimizer and buffers stay Megatron's.

    For comparisons on the same experts, which must then be bf16.
    """
    from moe_optim.integration import installation, patches
    from moe_optim.integration.engine import revert_patches

    installation.install(config)
    checkpoints = (*patches.CHECKPOINTS, *patches.CHECKPOINTS_OF_RANKS)
    revert_patches((*patches.OPTIMIZER, *checkpoints), installation.HOLDER)


def _shrink_mock_data() -> None:
    """Leave 130,000 samples of mock data: its 6.4 million take longer to shuffle than to use.

    None of them are a test set, on which a run would do its last evaluation once more.
    """
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
    from megatron.training import training

    MockGPTLowLevelDataset.size = 2000
    build = training.build_train_valid_test_datasets
    training.build_train_valid_test_datasets = lambda provider: (*build(provider)[:2], None)


def _watch(
    record: Record,
    after_step: Callable[..., None] | None,
    after_setup: Callable[..., None] | None,
) -> list[Any]:
    """Wrap what Megatron's loop calls, and return the list that model and optimizer go into."""
    from megatron.training import training

    from moe_optim.integration import patches
    from moe_optim.integration.engine import apply_patches

    apply_patches(patches.TRAIN)  # first, so that the wrappers below stay outermost
    built: list[Any] = []
    steps = iter(range(1, 1_000_000))

    def wrap(name: str, after: Callable[..., None]) -> None:
        stock = getattr(training, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            after(result, args, kwargs)
            return result

        setattr(training, name, wrapped)

    def keep_built(result: Any, *_: Any) -> None:
        built[:] = result[:2]
        if after_setup is not None:
            after_setup(*built)

    def keep_loss(_result: Any, args: Any, _kwargs: Any) -> None:
        losses, _, _, iteration = args[:4]
        record.norms[int(iteration)] = None if args[7] is None else float(args[7])
        if "lm loss" in losses:
            record.losses[int(iteration)] = float(losses["lm loss"])

    def keep_validation(result: Any, *_: Any) -> None:
        if "lm loss" in result[0]:  # on the last pipeline stage
            record.validation_losses.append(float(result[0]["lm loss"]))

    wrap("setup_model_and_optimizer", keep_built)
    wrap("training_log", keep_loss)
    wrap("evaluate", keep_validation)
    if after_step is not None:
        wrap("train_step", lambda *_: after_step(next(steps), *built))
    return built


def _record_state(record: Record, model: list[Any], optimizer: Any) -> None:
    parts = optimizer.chained_optimizers
    record.classes = {type(part).__name__ for part in parts}
    names = {param: name for name, param in named_parameters(model)}
    for param, name in names.items():
        record.weights |= weight_bytes(name, param)
    if record.classes & {"LayerWiseDistributedOptimizer", "Float16OptimizerWithFloat16Params"}:
        return  # it shards nothing
    for part in parts:
        if part.is_stub_optimizer:
            continue
        part_masters = zip(
            part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True
        )
        for params, masters in part_masters:
            for param, master in zip(params, masters, strict=True):
                name = names[param]
                record.masters[name] = master.clone()
                state = part.optimizer.state[master]
                record.moments[name] = {key: state[key].clone() for key in sorted(state)}


def named_parameters(model: list[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of all chunks; with several, a name starts with ``chunk<i>.``."""
    for index, chunk in enumerate(model):
        prefix = f"chunk{index}." if len(model) > 1 else ""
        for name, param in chunk.module.named_parameters():
            yield prefix + name, param


def weight_bytes(name: str, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return copies of the buffers of a quantized weight, or of the bf16 values of another."""
    if isinstance(param, GroupedWeight):
        buffers = param.quantized_storage.quantized.buffers()
        return {f"{name}.{buffer}": tensor.clone() for buffer, tensor in buffers.items()}
    return {name: param.detach().clone()}


def assert_same_run(got: Record, want: Record, *, what: str) -> None:
    """Losses, masters, moments and weights of two runs are equal to the bit."""
    assert got.losses == want.losses, f"{what}: losses"
    assert got.validation_losses == want.validation_losses, f"{what}: validation losses"
    assert_same_tensors(got.masters, want.masters, what=f"{what}: master")
    assert_same_tensors(got.weights, want.weights, what=f"{what}: weight")
    assert got.moments.keys() == want.moments.keys()
    for name, moments in got.moments.items():
        assert_same_tensors(moments, want.moments[name], what=f"{what}: {name}")
