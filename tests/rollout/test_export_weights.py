"""A live model hands its weights to an engine: all of them, under their names, to the bit.

Each topology steps once with gradients by hand, so that weights are behind their masters when the
export begins. The oracle quantizes whole masters, names and cuts by itself.
"""

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.formats import FP8_BLOCK, FP8_BLOCK_FP32, reference
from moe_optim.rollout.experts import ExportedLinear
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.modules import serving
from tests.support.ranks import on_ranks, run_ranks
from tests.support.states.life_cycle import initialize
from tests.support.states.making_room import managed_buffers
from tests.support.states.masters import full_master
from tests.support.wrapping import build_optimizer, wrap

pytest.importorskip("megatron.core")

HIDDEN, FFN, HEADS, GROUPS, WIDTH, EXPERTS, VOCABULARY = 128, 128, 4, 2, 32, 4, 48


@dataclass(frozen=True)
class Setup:
    """A model, how it is cut over ranks, and how it is exported."""

    sizes: dict[str, int] = field(default_factory=dict)
    """Of Megatron's groups, by argument of ``initialize_model_parallel``."""
    knobs: dict[str, Any] = field(default_factory=lambda: {"format": "mxfp8"})
    ddp: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    layers: int = 2
    virtual_chunks: int = 1
    export: dict[str, Any] = field(default_factory=dict)
    optimizer: Literal["adam", "muon"] = "adam"


def build(setup):
    """Return model chunks and their optimizer; every rank must call it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    import moe_optim

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**setup.sizes)
    moe_optim.uninstall()
    moe_optim.install(MoEOptimConfig(**setup.knobs), optimizer=setup.optimizer)
    model_parallel_cuda_manual_seed(1)
    sizes = {
        name: setup.sizes.get(name, 1)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    }
    options = dict(
        num_layers=setup.layers, hidden_size=HIDDEN,
        num_attention_heads=HEADS, num_query_groups=GROUPS,
        kv_channels=WIDTH, num_moe_experts=EXPERTS, moe_ffn_hidden_size=FFN,
        ffn_hidden_size=FFN, moe_router_topk=2, moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, qk_layernorm=True,
        normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0, bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        expert_model_parallel_size=setup.sizes.get("expert_model_parallel_size", 1),
        expert_tensor_parallel_size=setup.sizes.get("expert_tensor_parallel_size", 1),
        **sizes,
    )  # fmt: skip
    if setup.virtual_chunks > 1:
        options["virtual_pipeline_model_parallel_size"] = setup.virtual_chunks
    config = TransformerConfig(**options | setup.model)
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=True, qk_layernorm=True,
                                    normalization="RMSNorm")  # fmt: skip
    stage, stages = (
        parallel_state.get_pipeline_model_parallel_rank(),
        sizes["pipeline_model_parallel_size"],
    )
    chunks = []
    for number in range(setup.virtual_chunks):
        ends = {
            "pre_process": stage == 0 and number == 0,
            "post_process": stage == stages - 1 and number == setup.virtual_chunks - 1,
        }
        if setup.virtual_chunks > 1:
            ends["vp_stage"] = number
        gpt = GPTModel(
            config, spec, VOCABULARY, 32, position_embedding_type="rope",
            share_embeddings_and_output_weights=False, **ends,
        )  # fmt: skip
        chunks.append(wrap(config, Float16Module(config, gpt), **setup.ddp))
    return chunks, build_optimizer(
        *chunks, optimizer=setup.optimizer, lr=0.1, min_lr=0.1, clip_grad=0.0,
        overlap_param_gather=setup.ddp.get("overlap_param_gather", False),
    )  # fmt: skip


def step(chunks, optimizer):
    """Step with gradients by hand, different in every element, alike on tensor-parallel ranks."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    for number, chunk in enumerate(chunks):
        chunk.zero_grad_buffer()
        generator = torch.Generator().manual_seed(100 * rank + number)
        for param in chunk.parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.main_grad.copy_(noise.view(param.main_grad.shape))
        if chunk.ddp_config.overlap_grad_reduce:
            chunk.start_grad_sync()
        chunk.finish_grad_sync()
    optimizer.step()


# The oracle: every weight by its name, from what all ranks hold

DENSE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def named_parameters(chunks):
    """Yield every parameter with its number of layer over all stages, if it lies in one."""
    from megatron.core.utils import unwrap_model

    for chunk in chunks:
        gpt = unwrap_model(chunk)
        for name, param in gpt.named_parameters():
            layer = None
            if name.startswith("decoder.layers."):
                local, name = name.removeprefix("decoder.layers.").split(".", 1)
                layer = gpt.decoder.layers[int(local)].layer_number - 1
            yield layer, name, param


def whole(param):
    """Put a dense parameter together from its tensor-parallel parts."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    if not getattr(param, "tensor_model_parallel", False) or group.size() == 1:
        return param.detach().clone()
    parts = [torch.empty_like(param) for _ in range(group.size())]
    dist.all_gather(parts, param.detach().contiguous(), group=group)
    return torch.cat(parts, dim=param.partition_dim)


def expected(chunks, optimizer):
    """Return every tensor of the model by Hugging Face's name; every rank must call it."""
    from megatron.core import parallel_state

    mine: dict[str, torch.Tensor] = {}
    ranks = parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * EXPERTS // ranks
    for layer, name, param in named_parameters(chunks):
        stem = "" if layer is None else f"model.layers.{layer}."
        if "experts" in name:
            storage = getattr(param, "quantized_storage", None)
            values = full_master(optimizer, param) if storage else param.detach()
            number = first + int(name.rpartition("weight")[2] or 0)
            rows = ("gate", "up") if "linear_fc1" in name else ("down",)
            tensors = [{"weight": one} for one in values]
            if storage:
                tensors = serving.experts_of(reference.quantize(values, storage.format))
            for expert, of_expert in enumerate(tensors, number):
                for suffix, tensor in of_expert.items():
                    parts = tensor.chunk(len(rows)) if tensor.dim() else [tensor] * len(rows)
                    for row, part in zip(rows, parts, strict=True):
                        key = f"{stem}mlp.experts.{expert}.{row}_proj.{suffix}"
                        mine[key] = part.clone()
        elif name == "self_attention.linear_qkv.weight":
            groups = whole(param).chunk(GROUPS)
            queries = HEADS // GROUPS * WIDTH
            cuts = [one.split([queries, WIDTH, WIDTH]) for one in groups]
            for letter, parts in zip("qkv", zip(*cuts, strict=True), strict=True):
                mine[f"{stem}self_attn.{letter}_proj.weight"] = torch.cat(parts)
        else:
            mine[stem + DENSE[name]] = whole(param)
    packed = {
        key: (one.dtype, tuple(one.shape), one.reshape(-1).view(torch.uint8).numpy().tobytes())
        for key, one in mine.items()
    }  # Megatron lets no float8 tensor through a pickle
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, packed)
    return {
        key: torch.frombuffer(bytearray(values), dtype=torch.uint8).view(dtype).view(shape)
        for of_rank in everything
        for key, (dtype, shape, values) in of_rank.items()
    }


def stacked(tensors):
    """Return tensors by name with experts stacked [E, ...], gate rows before up rows, as the fused
    experts of Hugging Face's models are named."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(.+)", name)
        if match is None:
            found[name] = tensor
            continue
        path, expert, projection, suffix = match.groups()
        key = f"{path}.{'down' if projection == 'down' else 'gate_up'}_proj"
        key += suffix.removeprefix("weight")
        found.setdefault(key, {}).setdefault(int(expert), []).append(tensor)
    for key, experts in found.items():
        if isinstance(experts, dict):
            ones = [
                torch.cat(rows) if rows[0].dim() else rows[0] for _, rows in sorted(experts.items())
            ]
            found[key] = torch.stack(ones)
    return found


def exported(chunks, **options):
    """Return what is exported, each name once, and the names in their order."""
    import moe_optim

    given: dict[str, torch.Tensor] = {}
    for name, tensor in moe_optim.export_weights(chunks, **options):
        assert name not in given, f"{name} twice"
        given[name] = tensor.clone()
    return given


def _compare(setups):
    """Export each setup after a step; return how many tensors were compared."""
    compared = {}
    for name, setup in setups.items():
        chunks, optimizer = build(setup)
        step(chunks, optimizer)
        given = exported(chunks, **setup.export)
        want = expected(chunks, optimizer)
        assert_same_tensors(given, want, what=name)
        together = exported(chunks, layout="hf", **setup.export)
        assert_same_tensors(together, stacked(want), what=f"{name}, stacked")
        order: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(order, list(given))
        assert all(one == order[0] for one in order), f"{name}: another order on another rank"
        compared[name] = len(given)
    return compared


OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SETUPS = {
    "experts over ranks, gathers overlapped": Setup(
        {"expert_model_parallel_size": 2}, ddp=OVERLAP, export={"bucket_bytes": 40_000}
    ),
    "tensor parallel, FP8 blocks": Setup(
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        {"format": "fp8_block"},
    ),
    "virtual pipeline, NVFP4": Setup(
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
        },
        {"format": "nvfp4"},
        ddp=OVERLAP,
        layers=4,
        virtual_chunks=2,
        export={"bucket_bytes": 1},
    ),
    "a parameter an expert, bf16 on the wire": Setup(
        knobs={"format": "mxfp8_2d", "expert_layout": "indexed", "wire": "bf16", "layout": "stock"},
    ),
    "matrices of Muon": Setup(
        {"expert_model_parallel_size": 2}, {"format": "fp8_block"}, optimizer="muon"
    ),
    "bf16 experts": Setup({"expert_model_parallel_size": 2}, {"format": "bf16"}),
}
PER_EXPERT = {"nvfp4": 9, "bf16": 3}
"""Tensors of an expert in other formats than those of data and scales."""


def count(setup):
    """Return the number of tensors: of the ends, of each layer, and of its experts."""
    return 3 + setup.layers * (9 + EXPERTS * PER_EXPERT.get(setup.knobs["format"], 6))


def _on_two_ranks():
    initialize()
    return _compare(SETUPS), _promises()


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, _on_two_ranks)


def test_every_rank_is_given_every_weight_as_its_master_says(ranks):
    """Behind their masters before, in every topology; names, order, dtypes and bytes."""
    counts = {name: count(setup) for name, setup in SETUPS.items()}
    assert [compared for compared, _ in ranks] == [counts] * 2


# What else an export promises


def _promises():
    import moe_optim

    facts = {}
    chunks, optimizer = build(SETUPS["experts over ranks, gathers overlapped"])
    step(chunks, optimizer)
    exported(chunks)  # which gathers, and the oracle reads dense weights as they are
    want = expected(chunks, optimizer)
    first = dist.get_rank() * EXPERTS // 2

    def is_mine(name):
        before, found, after = name.partition(".experts.")
        return not found or int(after.partition(".")[0]) in range(first, first + EXPERTS // 2)

    own = exported(chunks, experts="own")
    assert_same_tensors(own, {name: one for name, one in want.items() if is_mine(name)})
    memory = {
        buffer.untyped_storage().data_ptr()
        for chunk in chunks
        for module in chunk.modules()
        if hasattr(module, "storages")
        for storage in module.storages()
        for buffer in storage.quantized.buffers().values()
    }
    facts["views"] = all(
        tensor.untyped_storage().data_ptr() in memory
        for layout in ("hf_per_expert", "hf")
        for name, tensor in moe_optim.export_weights(chunks, layout=layout, experts="own")
        if ".experts." in name
    )
    shorter = exported(chunks, vocab_size=VOCABULARY - 5)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert_bytes_equal(shorter[name], want[name][:-5], what=name)
    values = {name: tensor for name, tensor in want.items() if ".experts." in name}
    named = exported(chunks, convention="deepseek")
    for name in values:
        same = name.replace("weight_scale", "weight_scale_inv")
        assert_bytes_equal(named[same], values[name], what=same)
    in_place = exported(chunks, layout="sequential")
    facts["sequential"] = sorted(
        name for name in in_place if ".layers.1." in name and "local_experts.1." in name
    )
    fc1 = in_place["decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"]
    parts = [want[f"model.layers.1.mlp.experts.1.{x}_proj.weight"] for x in ("gate", "up")]
    assert_bytes_equal(fc1, torch.cat(parts))
    in_place = exported(chunks, layout="grouped")
    fc1 = in_place["decoder.layers.1.mlp.experts.linear_fc1.weight_scale"]
    assert_bytes_equal(fc1, stacked(want)["model.layers.1.mlp.experts.gate_up_proj_scale"])
    facts["errors"] = _errors(chunks, optimizer)
    return facts


def _errors(chunks, optimizer):
    import moe_optim

    given = moe_optim.export_weights(chunks, experts="own")
    next(given)
    step(chunks, optimizer)
    refused = {"a step in between": refusal(lambda: list(given))}
    given = moe_optim.export_weights(chunks, experts="own")
    next(given)
    step(chunks, optimizer)
    exported(chunks)  # which gathers
    refused["a step and its gather"] = refusal(lambda: list(given))
    for buffer in managed_buffers(chunks):
        buffer.offload_to_cpu(move_grads=False)
    refused["on the host"] = refusal(lambda: exported(chunks))
    for buffer in managed_buffers(chunks):
        buffer.reload_from_cpu(move_grads=False)
    assert_same_tensors(exported(chunks), expected(chunks, optimizer))
    refused["a layout"] = refusal(lambda: exported(chunks, layout="legacy"))
    refused["a convention"] = refusal(lambda: exported(chunks, convention="gguf"))
    with mock.patch.object(chunks[0].config, "layernorm_zero_centered_gamma", new=True):
        refused["weights from zero"] = refusal(lambda: exported(chunks))
        exported(chunks, layout="sequential")
    return refused


def refusal(act):
    try:
        act()
    except (ConfigError, LayoutError, StateError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was refused")


def test_an_export_sends_no_more_than_asked_copies_nothing_and_refuses_what_it_cannot(ranks):
    for _, facts in ranks:
        assert facts["views"]
        stem = "decoder.layers.1.mlp.experts.local_experts.1."
        assert facts["sequential"] == [
            f"{stem}linear_fc{n}.weight{end}" for n in (1, 2) for end in ("", "_scale")
        ]
        errors = facts["errors"]
        assert "weights of the current masters" in errors["a step in between"]
        assert "got those of a later step. Take no" in errors["a step and its gather"]
        assert "they are offloaded. Call reload_from_cpu()" in errors["on the host"]
        assert "expected one of hf_per_expert, sequential, hf, grouped" in errors["a layout"]
        assert "expected compressed_tensors or modelopt" in errors["a convention"]
        assert "got layernorm_zero_centered_gamma True. Pass lay" in errors["weights from zero"]


OFFLOADED, UNREADABLE = "offloaded on one rank", "unreadable on one rank"
OF_BF16 = "a step of bf16 weights"


def _buffers_of(chunks):
    return [buffer for one in chunks for buffer in (*one.buffers, *one.expert_parallel_buffers)]


def _bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def _change_while_exported(name, change):
    """Return what each rank is told, and whether it was given other weights than its own or NaN."""
    import moe_optim

    setup = SETUPS[name]
    chunks, optimizer = build(setup)
    step(chunks, optimizer)
    want = exported(chunks)
    given = moe_optim.export_weights(chunks, **setup.export | {"bucket_bytes": 1})
    seen: dict[str, torch.Tensor] = {}

    def take(most=10**6):
        for name, tensor in islice(given, most):
            seen[name] = tensor.clone()

    while not any(".experts." in name for name in seen):
        take(1)
    if change in ("a step", OF_BF16):
        step(chunks, optimizer)
    elif change == "a step and its gather":
        step(chunks, optimizer)
        exported(chunks)
    moved = _buffers_of(chunks) if change == OFFLOADED and dist.get_rank() == 1 else []
    for buffer in moved:
        buffer.offload_to_cpu(move_grads=False)
    with ExitStack() as stack:
        if change == UNREADABLE and dist.get_rank() == 1:
            failing = mock.Mock(side_effect=StateError("they cannot be read"))
            stack.enter_context(mock.patch.object(ExportedLinear, "buffers", failing))
        told = refusal(take)
    dist.barrier()
    for buffer in moved:
        buffer.reload_from_cpu(move_grads=False)
    assert_same_tensors(exported(chunks), expected(chunks, optimizer))
    others = [
        name
        for name, tensor in seen.items()
        if not torch.equal(_bytes(tensor), _bytes(want[name]))
        and not (_bytes(tensor) == 0xFF).all()
        and not (tensor.is_floating_point() and tensor.float().isnan().all())
    ]
    return told, others


CHANGES = {  # what changes -> setup, what is told
    "a step": ("virtual pipeline, NVFP4", "expected the weights of the current masters"),
    "a step and its gather": ("virtual pipeline, NVFP4", "got those of a later step"),
    OF_BF16: ("bf16 experts", "got those of a later step"),
    OFFLOADED: ("virtual pipeline, NVFP4", "they are offloaded"),
    UNREADABLE: ("bf16 experts", "they cannot be read"),
}


def _change_all():
    initialize()
    return {change: _change_while_exported(name, change) for change, (name, _) in CHANGES.items()}


def test_a_rank_whose_weights_change_leaves_no_other_waiting():
    """It sends NaN to the others, which get no weight of a later step or of no step."""
    for found in run_ranks(2, _change_all):
        for change, (told, others) in found.items():
            assert CHANGES[change][1] in told
            assert change not in (OFFLOADED, UNREADABLE) or not others


QUANTIZED = ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight")
OUTPUTS = ("self_attention.linear_proj", "self_attn.o_proj")


@on_ranks(1)
def test_dense_weights_that_transformer_engine_quantizes_are_there_too():
    """Dequantized, in either layout: an engine that lacks them would keep those of before. Blocks
    that gate and up share are refused by name."""
    from tests.support.te.te_stand_ins import Float8BlockwiseQTensor, as_parameter

    initialize()
    compared = []
    for format in (FP8_BLOCK, FP8_BLOCK_FP32):
        chunks, _ = build(Setup(knobs={"format": "fp8_block"}))
        gpt, want = chunks[0].module.module, {}
        for name, param in list(gpt.named_parameters()):
            if name.endswith(QUANTIZED):
                weight = as_parameter(Float8BlockwiseQTensor(format, param.detach().float()))
                gpt.get_submodule(name.rpartition(".")[0]).weight = weight
                values = reference.quantize(param.detach()[None], format)
                want[name] = reference.dequantize(values, "rowwise")[0].bfloat16()
        in_place, on_disk = exported(chunks, layout="sequential"), exported(chunks)
        for name, values in want.items():
            assert_bytes_equal(in_place[name], values, what=name)
            disk = name.replace("decoder", "model").replace(*OUTPUTS)
            if name.endswith(QUANTIZED[1]):
                assert_bytes_equal(on_disk[disk], values, what=disk)
        compared.append(len(want))
    chunks, _ = build(Setup(knobs={"format": "fp8_block"}, model={"moe_ffn_hidden_size": 96}))
    shared = refusal(lambda: exported(chunks))
    assert compared == [4, 4]
    assert "decoder.layers.0.mlp.experts.linear_fc1" in shared and "96 rows" in shared
