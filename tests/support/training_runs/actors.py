"""Runs the training actors of slime and miles whole, from their own command line, on CPU ranks.

Ray, the engine and what saves GPU memory are stood in for: :class:`Engine` keeps what it is sent.
"""

import argparse
import importlib
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tools.stacks.stand_ins import STAND_INS
from tools.upstream.stand_in_imports import stand_in_for

SAMPLES = 4
SETUP: Mapping[str, Any] | None = None
"""Knobs of the plug-in, or None for stock; set before the actor calls :func:`install`."""


def install(_args: Any) -> None:
    """Install the plug-in where the launchers' hook calls, or rename stock's experts.

    Their converters know one weight per expert, as Transformer Engine names them.
    """
    import moe_optim

    if SETUP is not None:
        moe_optim.install(moe_optim.MoEOptimConfig(**SETUP))
        return
    from megatron.core.distributed import DistributedDataParallel

    plain = DistributedDataParallel.named_parameters

    def named_parameters(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, param in plain(self, *args, **kwargs):
            yield re.sub(r"local_experts\.(\d+)\.(\w+\.weight)", r"\2\1", name), param

    DistributedDataParallel.named_parameters = named_parameters


class PackedAttention(torch.nn.Module):
    """Causal attention within each packed sequence; query, key and value are [T, heads, width]."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.scale = 1 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any, **__: Any
    ) -> torch.Tensor:
        """Return [T, heads * width]; what follows the last sequence is padding."""
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        places = torch.arange(len(query))
        sequence = torch.bucketize(places, packed_seq_params.cu_seqlens_q.long(), right=True)
        seen = (sequence[:, None] == sequence) & (places[:, None] >= places)
        scores = torch.einsum("shd,thd->hst", query, key) * self.scale
        shares = scores.float().masked_fill(~seen, -torch.inf).softmax(-1).to(value.dtype)
        return torch.einsum("hst,thd->shd", shares, value).flatten(1)


def layers(args: Any, config: Any, _vp_stage: Any = None) -> Any:
    """Return local layers whose norms are weights of their linears, as Transformer Engine's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    class NormAndLinear(ColumnParallelLinear):
        def __init__(self, width: int, *sizes: Any, config: Any, **kwargs: Any) -> None:
            super().__init__(width, *sizes, config=config, **kwargs)
            norm = torch.ones(width, dtype=config.params_dtype)
            self.layer_norm_weight, self.eps = torch.nn.Parameter(norm), config.layernorm_epsilon

        def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
            normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)
            return super().forward(normed, *args, **kwargs)

    normalization = args.normalization
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=normalization
    )
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = IdentityOp
        attention = layer.submodules.self_attention.submodules
        attention.linear_qkv, attention.core_attention = NormAndLinear, PackedAttention
    return block


class _Remote:
    """Answers calls of methods by ``remote``, as a Ray actor; other attributes are methods."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        method = getattr(type(self), f"on_{name}", lambda *_, **__: True)
        return SimpleNamespace(remote=lambda *args, **kwargs: method(self, *args, **kwargs))


class Engine(_Remote):
    """Keeps the tensors that it is sent, by name."""

    def __init__(self) -> None:
        self.received: dict[str, torch.Tensor] = {}

    def on_update_weights_from_tensor(self, serialized_named_tensors: Any, **_: Any) -> None:
        self.received.update(pair for part in serialized_named_tensors for pair in part)


class _Manager(_Remote):
    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines, self.are_new = engines, len(engines)

    def on_get_updatable_engines_and_lock(self) -> Any:
        new, self.are_new = self.are_new, 0
        ranks = range(len(self.engines))
        return self.engines, Engine(), new, [1 for _ in ranks], list(ranks), None


class _Bucket:
    supports_multi_dtypes = True

    def __init__(self, named_tensors: Any) -> None:
        self.pairs = [(name, tensor.detach().clone()) for name, tensor in named_tensors]

    def get_flattened_tensor(self) -> Any:
        return self.pairs

    def get_metadata(self) -> None:
        return None


def _stand_in() -> None:
    ray: Any = ModuleType("ray")
    ray.get, ray.put, ray.get_gpu_ids = lambda x: x, lambda x: x, lambda: [0]
    ray.remote, ray.__path__, ray.is_initialized = lambda decorated: decorated, [], lambda: False
    ray.ObjectRef = object
    saver: Any = ModuleType("torch_memory_saver")
    nothing = lambda *_, **__: None  # noqa: E731
    saver.torch_memory_saver = SimpleNamespace(pause=nothing, resume=nothing, disable=nullcontext)
    dumper: Any = ModuleType("dumper")
    dumper.dumper = SimpleNamespace()
    dumper.DumperConfig = SimpleNamespace(_kv_pairs_to_dict=lambda _: {})
    dumper._get_rank = lambda: 0
    tokenizer: Any = ModuleType("tokenizer")  # where miles' fork of Megatron has it
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

    tokenizer._vocab_size_with_padding = vocab_size_with_padding
    sys.modules |= {
        "ray": ray,
        "torch_memory_saver": saver,
        "sglang.srt.debug_utils.dumper": dumper,
        "megatron.training.tokenizer": ModuleType("tokenizers"),
        "megatron.training.tokenizer.tokenizer": tokenizer,
    }
    torch.cuda.mem_get_info = lambda *_: (64 << 30, 80 << 30)
    import numpy

    numpy.__version__ = "1.26"  # slime's initialize.py asserts it


def _import(launcher: str, checkout: str) -> tuple[Any, Any]:
    """Return the modules of the actor and of its arguments."""
    from tests.support.checkpoints.hf_models import install_runtime

    install_runtime()
    _stand_in()
    stand_in_for(STAND_INS[launcher])
    sys.path.insert(0, checkout)
    if launcher == "slime":
        accelerator = importlib.import_module("slime.utils.accelerator")

        class Host(accelerator.CUDAAccelerator):  # type: ignore[misc]
            current_device = lambda _: "cpu"  # noqa: E731
            device = lambda *_: torch.device("cpu")  # noqa: E731

        accelerator.set_accelerator(Host())
    arguments = importlib.import_module(f"{launcher}.utils.arguments")
    arguments.sglang_parse_args = argparse.Namespace
    arguments.sglang_validate_args = lambda _: None
    backend = f"{launcher}.backends.megatron_utils"
    actor = importlib.import_module(f"{backend}.actor")
    sent: Any = importlib.import_module(f"{backend}.update_weight.update_weight_from_tensor")
    sent.FlattenedTensorBucket = _Bucket
    sent.MultiprocessingSerializer = SimpleNamespace(
        serialize=lambda data, **_: list(data["flattened_tensor"])
    )
    tokenizer = SimpleNamespace(vocab_size=64)
    actor.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer)
    actor.load_tokenizer = lambda *_, **__: tokenizer
    return actor, arguments


def _rollout(number: int, ranks: int) -> list[Any]:
    """Return for each rank samples of a rollout, in two steps of two."""
    drawn = torch.Generator().manual_seed(number)
    lengths = torch.randint(12, 24, (SAMPLES * ranks,), generator=drawn).tolist()
    tokens = [torch.randint(1, 60, (length,), generator=drawn) for length in lengths]
    rewards = torch.rand(len(tokens), generator=drawn).tolist()
    whole = {"total_lengths": lengths, "raw_reward": rewards}
    return [
        SimpleNamespace(inner=whole | {
            "partition": mine, "sample_indices": mine, "tokens": [tokens[i] for i in mine],
            "response_lengths": [5] * SAMPLES, "rewards": [rewards[i] for i in mine],
            "loss_masks": [torch.ones(5, dtype=torch.int)] * SAMPLES, "truncated": [0] * SAMPLES,
            "rollout_mask_sums": torch.full((SAMPLES,), 5.0),
            "num_microbatches": [2, 2], "global_batch_sizes": [2 * ranks] * 2,
            "micro_batch_indices": [[i] for i in range(SAMPLES)],
        })
        for mine in (list(range(rank, len(tokens), ranks)) for rank in range(ranks))
    ]  # fmt: skip


class _Stored(nullcontext[None]):
    def __init__(self, ref: Any) -> None:
        super().__init__()
        self.value = ref.inner


def _start(launcher: str, module: Any, args: Any, engines: Sequence[Engine]) -> tuple[Any, Any]:
    """Return an actor that was initialised, and what updates its engines."""
    where = (len(engines), int(os.environ["RANK"]), "127.0.0.1", os.environ["MASTER_PORT"])
    cls = module.MegatronTrainRayActor
    cls.__abstractmethods__ = frozenset()
    manager = _Manager(engines)
    if launcher == "slime":
        actor = cls(*where)
        actor.init(args, "actor")
        actor.rollout_manager = manager
        return actor, actor.update_weights
    model = sys.modules["miles.backends.megatron_utils.model"]
    args.load = args.hf_checkpoint
    model.load_checkpoint = lambda *_, **__: (0, 0)  # weights stay as they were drawn
    store = importlib.import_module("miles.utils.object_store")
    store.get_instance = lambda: SimpleNamespace(get=_Stored)
    trivial = importlib.import_module("miles.utils.ft_utils.indep_dp").IndepDPInfo.create_trivial
    actor = cls(args, *where, indep_dp_store_addr=None, role="actor", cell_index=0)
    actor.init(args, "actor", indep_dp_info=trivial())
    actor.rollout_manager = manager

    def update() -> None:
        found, lock, new, counts, offsets, _ = manager.get_updatable_engines_and_lock.remote()
        actor.update_weights(
            SimpleNamespace(
                rollout_engines=found,
                rollout_engine_lock=lock,
                has_new_engines=bool(new),
                engine_gpu_counts=counts,
                engine_gpu_offsets=offsets,
            )
        )

    return actor, update


def run_actor(
    launcher: str,
    checkout: str,
    flags: Sequence[str],
    knobs: Mapping[str, Any] | None,
    rollouts: int,
) -> dict[str, Any]:
    """Initialise an actor, and let it train, sleep, wake up and send its weights. A rank function.

    Returns:
        ``losses`` of all steps; ``sent``, the tensors that the engine of this rank has at the end;
        and ``exported``, those of ``moe_optim.export_weights`` if the plug-in takes part.
    """
    global SETUP
    SETUP = knobs
    sys.modules["actors"] = sys.modules[__name__]
    sys.path.insert(0, str(Path(__file__).parent))
    module, arguments = _import(launcher, checkout)
    absent = lambda _, name: None if name.startswith("sglang_") else _refuse(name)  # noqa: E731
    argparse.Namespace.__getattr__ = absent  # type: ignore[method-assign]
    sys.argv = ["train.py", *flags]
    args = arguments.parse_args()
    args.enable_gloo_process_groups = True
    engines = [Engine() for _ in range(int(os.environ["WORLD_SIZE"]))]
    actor, update = _start(launcher, module, args, engines)
    model: Any = sys.modules[f"{launcher}.backends.megatron_utils.model"]
    step, losses = model.train_one_step, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        losses.append(float(result[0]["loss"]))
        return result

    model.train_one_step = watched
    update()
    for number in range(rollouts):
        actor.train(number, _rollout(number, len(engines)))
        update()
    actor.wake_up()
    found = {"losses": losses, "sent": engines[int(os.environ["RANK"])].received}
    if knobs is not None:
        import moe_optim

        exported = moe_optim.export_weights(actor.model, vocab_size=63)
        found["exported"] = {name: tensor.clone() for name, tensor in exported}
    return found


def values_of(exported: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return exported weights in bf16, those in MXFP8 multiplied by their scales."""
    values = {}
    for name in filter(lambda name: name.endswith("weight"), exported):
        values[name] = exported[name]
        if (scales := exported.get(f"{name}_scale")) is not None:
            powers = (scales.float() - 127).exp2().repeat_interleave(32, dim=1)
            values[name] = (values[name].float() * powers).bfloat16()
    return values


def _refuse(name: str) -> Any:
    raise AttributeError(name)
