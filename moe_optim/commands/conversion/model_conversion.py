"""Converting a whole model: a tensor, or the experts of a layer, at a time."""

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from moe_optim.checkpoint.files.folders import TRACKER
from moe_optim.checkpoint.files.publishing import published
from moe_optim.checkpoint.files.reader import Recorded, TensorInfo
from moe_optim.checkpoint.files.torch_dist import (
    COMMON_STATE,
    INTERLEAVE_ARG,
    OWN_ARGUMENTS,
    OWN_STATE,
)
from moe_optim.checkpoint.integrity import record_checksums
from moe_optim.commands.conversion.conversion import Report
from moe_optim.commands.conversion.conversion_plan import BLOB_BYTES, output_folder
from moe_optim.commands.conversion.extra_states import empty_state, extra_state_keys
from moe_optim.commands.conversion.layer_view import stored_key
from moe_optim.commands.conversion.model_plan import ModelPlan, Part
from moe_optim.commands.conversion.model_sources import CONFIG, read_tokenizer, special_tokens
from moe_optim.commands.conversion.one_thread import one_thread
from moe_optim.commands.conversion.safetensors_files import SafetensorsWriter
from moe_optim.commands.conversion.torch_dist_writer import TorchDistWriter
from moe_optim.rollout.families import LAYOUT_OF_EXPERTS


def convert_model(plan: ModelPlan, target: Path, report: Report = lambda _: None) -> None:
    """Carry out a plan; ``target`` appears when everything is written.

    For transformers it has safetensors, ``config.json`` and what else was asked for. For Megatron
    it is what ``--load`` takes: a folder ``release``, of weights alone, and the tracker file.

    Raises:
        ConfigError: there is something at ``target`` already, or no tokenizer where one was named.
        StateError: a file of the source or of the tokenizer is damaged, or the disk is full.
    """
    needed = plan.total_bytes + BLOB_BYTES * (plan.num_tensors + 16)
    tokenizer = plan.request.tokenizer
    passed_on = {} if tokenizer is None else read_tokenizer(tokenizer)
    tokens = special_tokens(tokenizer)
    with one_thread(), published(target, needed_bytes=needed) as folder:
        if plan.request.to == "hf":
            _write_hf(plan, folder, tokens, report)
            for name, content in passed_on.items():
                (folder / name).write_bytes(content)
        else:
            _write_megatron(plan, folder, report)


def _write_hf(plan: ModelPlan, folder: Path, tokens: Mapping[str, object], report: Report) -> None:
    recorded = Recorded(
        layout=LAYOUT_OF_EXPERTS,
        glu_interleave=0,
        num_experts=plan.model.num_experts,
        iteration=plan.view.recorded.iteration,
    )
    writer = SafetensorsWriter(folder, recorded)
    for group in plan.files():
        converted: dict[str, Tensor] = {}
        for part in group:
            converted |= plan.convert(part)
        writer.write(converted)
        report(sum(map(plan.part_bytes, group)))
    writer.finish()
    dtype = plan.view.tensors[plan.parts[0].sources[0]].dtype
    config = {**plan.model.config, **tokens, "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _write_megatron(plan: ModelPlan, folder: Path, report: Report) -> None:
    into, said = output_folder(folder, None)
    into.mkdir()
    with TorchDistWriter(into) as writer:
        writer.write_object(f"{COMMON_STATE}/shard_0_1", _common_state(plan))
        keys: dict[str, None] = {}
        for part in plan.parts:
            for name, tensor in plan.convert(part).items():
                keys |= dict.fromkeys(_write_tensor(plan, writer, part, name, tensor))
            report(plan.part_bytes(part))
        for key in keys:
            writer.write_object(key, empty_state())
        writer.finish()
    record_checksums(into)
    (folder / TRACKER).write_text(said)


def _write_tensor(
    plan: ModelPlan, writer: TorchDistWriter, part: Part, name: str, tensor: Tensor
) -> Iterable[str]:
    """Write a tensor where Megatron looks for it: in that of all layers where these are alike.

    Returns the keys of extra states beside it.
    """
    name = stored_key(name) if part.experts is not None else name
    head, _, tail = name.partition(".layers.")
    layer, _, rest = tail.partition(".")
    shape, layers = tuple(tensor.shape), None
    tensor = tensor.contiguous()
    if head == "decoder" and plan.model.is_stacked:
        name, layers = f"{head}.layers.{rest}", (int(layer), plan.model.anatomy.num_layers)
        whole = TensorInfo((layers[1], *shape), tensor.dtype)
        writer.write_chunk(name, whole, (layers[0], *[0] * len(shape)), tensor[None])
    else:
        writer.write_chunk(name, TensorInfo(shape, tensor.dtype), (0,) * len(shape), tensor)
    experts = part.experts.num_experts if part.experts is not None else 0
    return extra_state_keys(name, layers, experts)


def _common_state(plan: ModelPlan) -> bytes:
    """Return what Megatron reads first; the arguments lie where it does not look for its own."""
    state = {
        "checkpoint_version": 3.0,  # as Megatron writes, above all for the order of QKV rows
        "iteration": 0,
        OWN_STATE: {
            INTERLEAVE_ARG: plan.request.glu_interleave,
            OWN_ARGUMENTS: dict(plan.model.arguments),
        },
    }
    content = io.BytesIO()
    torch.save([state], content)
    return content.getvalue()
