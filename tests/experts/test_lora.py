"""LoRA beside quantized experts: base weights stay, adapters train, and a merge adds them up.

The oracle of a merge is plain torch: ``weight + alpha / dim * B @ A`` of each expert, rounded once,
then the reference quantization. Adapters are those of ``tests/support/modules/adapters``.
"""

import itertools
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.formats import FORMATS, reference
from moe_optim.weights.names import modules_by_name
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.checkpoints.stored_checkpoints import read_with_torch
from tests.support.modules import experts
from tests.support.modules.adapters import LORA, Adapter, AdapterWrapper, Matrix, wrap
from tests.support.modules.calibrating import (
    EXPERTS,
    LINEARS,
    Kind,
    amaxes_of,
    local_part,
    make,
    values_of,
)
from tests.support.ranks import on_ranks, run_ranks
from tests.support.training import Record, pretrain, weight_bytes

SCALE = 6 / 4  # alpha / dim of the adapters
KINDS = [
    Kind(owner=owner, format=format, single=single)
    for owner, format, single in (
        ("portable", "bf16", True),
        ("portable", "bf16", False),
        ("portable", "mxfp8_2d", False),
        ("portable", "nvfp4", True),
        ("portable", "int4", True),
        ("Transformer Engine", "bf16", True),
        ("Transformer Engine", "bf16", False),
        ("Transformer Engine", "mxfp8", False),
        ("Transformer Engine", "mxfp8_2d", True),
        ("Transformer Engine", "nvfp4", False),
    )
]


def merged_by_hand(linear: Any, values: torch.Tensor) -> torch.Tensor:
    """Return the bf16 sum of values [E, R, C] and what the adapter of a wrapped linear adds."""
    pair = (linear.adapter.linear_in.weight, linear.adapter.linear_out.weight)
    first, second = (
        one.detach().float().expand(len(values), *one.shape[-2:]).unbind(0) for one in pair
    )
    return torch.stack(
        [
            (value.float() + SCALE * (b @ a)).bfloat16()
            for value, a, b in zip(values, first, second, strict=True)
        ]
    )


def _merge_all(ep: int) -> int:
    import moe_optim
    from moe_optim.rollout.experts import local_experts
    from moe_optim.weights.managed import storage_of

    experts.start_ranks(**({"expert_model_parallel_size": ep} if ep > 1 else {}))
    for number, kind in enumerate(KINDS):
        adapter = LORA[number % len(LORA)]
        what = f"{kind}, {adapter.__name__}"
        bare = make(kind, ep)
        module = wrap(make(kind, ep), adapter=adapter)
        moe_optim.calibrate([module])
        wrappers = {name: module.get_submodule(name) for name in LINEARS}
        before = values_of(module)
        want = {name: merged_by_hand(wrappers[name], before[name]) for name in LINEARS}
        assert moe_optim.merge_adapters([module]) == list(LINEARS), what
        assert module.sharded_state_dict().keys() == bare.sharded_state_dict().keys(), what
        assert amaxes_of(module) == dict.fromkeys(LINEARS), what
        assert len(list(local_experts(module))) == len(LINEARS), what
        for name in LINEARS:
            base = module.get_submodule(name)
            assert base is wrappers[name].to_wrap, what
            if kind.format == "bf16":
                assert_bytes_equal(values_of(module)[name], want[name], what=what)
                continue
            quantized = reference.quantize(want[name], FORMATS[kind.format])
            held = [storage_of(one).quantized.buffers() for one in base._parameters.values()]
            for buffer, bytes_ in quantized.buffers().items():
                got = torch.cat([one[buffer] for one in held])
                assert_bytes_equal(got, bytes_, what=f"{what} {name} {buffer}")
            values = reference.dequantize(quantized).bfloat16()
            assert_bytes_equal(values_of(module)[name], values, what=what)
    return len(KINDS)


@pytest.mark.parametrize("ep", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_a_merge_rounds_once_and_quantizes_by_the_reference(ep):
    """In each format, of every owner and layout, with matrices of all experts or of each; after
    it modules, keys and weights are as if there had been no adapter, and uncalibrated. On one rank
    states of adapters load alone, loaded weights are exported, and what cannot be merged is refused
    before anything changes."""
    merged = run_ranks(ep, *((_merge_all, ep) if ep > 1 else (_on_one_rank,)))
    assert merged == ep * [len(KINDS)]


def _load_adapters_alone() -> None:
    """States of adapters alone, all that Megatron-Bridge saves of a LoRA run, leave weights and
    amaxes as they are."""
    import moe_optim

    kinds = [kind for kind in KINDS if kind.owner == "portable" or kind.format == "bf16"]
    for kind in kinds:
        source, module = wrap(make(kind, seed=1)), wrap(make(kind))
        moe_optim.calibrate([module])
        before, amaxes = values_of(module), amaxes_of(module)
        given = {
            f"{name}.adapter.{key}": value * 2
            for name in LINEARS
            for key, value in source.get_submodule(name).adapter.state_dict().items()
        }
        module.load_state_dict(given, strict=False)
        own = dict(module.state_dict(keep_vars=True))
        assert_same_tensors({key: own[key].detach() for key in given}, given, what=str(kind))
        assert_same_tensors(values_of(module), before, what=str(kind))
        assert all(amaxes_of(module)[name] is amax for name, amax in amaxes.items()), str(kind)


def _export_what_was_loaded() -> None:
    """Frozen weights of Transformer Engine export what was loaded into them: no gather writes their
    scales, and a load writes only those that its GEMMs read."""
    from moe_optim.rollout.experts import local_experts
    from moe_optim.weights.managed import storage_of
    from moe_optim.weights.te.fields import read_values

    kinds = [kind for kind in KINDS if kind.owner != "portable" and kind.format != "bf16"]
    for kind in kinds:
        module = make(kind)
        for name in LINEARS:
            linear = module.get_submodule(name)
            for weight in linear._parameters.values():
                storage_of(weight)  # an optimizer asks every weight, before a checkpoint is loaded
                loaded = linear._stand_in(16 * read_values(weight))
                for field, value in vars(loaded).items():  # Transformer Engine quantizes in place
                    if isinstance(value, torch.Tensor):
                        getattr(weight, field).copy_(value.view(getattr(weight, field).shape))
        for one in local_experts(module):
            one.require_readable()
            for weight in one.linear.weights():
                got = reference.dequantize(storage_of(weight).quantized).bfloat16()
                want = read_values(weight)
                assert_bytes_equal(got.view(want.shape), want, what=f"{kind} {one.held.linear}")


def _on_one_rank() -> int:
    merged = _merge_all(1)
    _load_adapters_alone()
    _export_what_was_loaded()
    _refuse()
    return merged


CHAINS = {
    "mxfp8_2d": ({"format": "mxfp8_2d"}, LORA[1], {1}),
    "int4": ({"format": "int4"}, LORA[1], {0, 1}),
    "int8": ({"format": "bf16", "compute": "int8_per_expert"}, LORA[2], {0, 1}),
}
"""Name -> knobs, adapter, layers whose experts are adapted; others train."""
FLAGS = ["--train-iters", "3", "--eval-interval", "2", "--dist-ckpt-optim-fully-reshardable"]
FLAGS += ["--overlap-grad-reduce", "--overlap-param-gather"]


def _adapt_what_is_built(adapter: type[Adapter], layers: set[int]) -> None:
    """Have Megatron build models that are frozen but for adapters of experts, or their experts."""
    from megatron.core.models.gpt import gpt_model

    stock = gpt_model.GPTModel.__init__

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.requires_grad_(False)
        for number, layer in enumerate(self.decoder.layers):
            if number in layers:
                wrap(layer.mlp.experts, adapter=adapter)
            else:
                layer.mlp.experts.requires_grad_(True)

    gpt_model.GPTModel.__init__ = build


def _bytes_of_frozen(chunk: Any) -> dict[str, torch.Tensor]:
    named = [(n, p) for n, p in chunk.module.named_parameters() if not p.requires_grad]
    return {key: value for n, p in named for key, value in weight_bytes(n, p).items()}


def _assert_loaded(chunk: Any, layers: set[int], checkpoint: Path) -> None:
    """All experts of adapted layers are as saved: frozen weights, amaxes and adapters."""
    from moe_optim.calibration.linears import expert_linears

    saved = read_with_torch(checkpoint)
    linears = [one for one in expert_linears(chunk) if one.is_adapted]
    assert len(linears) == 2 * len(layers)
    modules = modules_by_name(chunk)
    for one in linears:
        held = {"weight": torch.stack(list(one.values()))}
        held["calibrated_amax"] = dict(one.module.named_buffers())["calibrated_amax"]
        for name, matrix in modules[f"{one.name}.adapter"].named_parameters():
            held[f"adapter.{name}"] = matrix.expand(EXPERTS, *matrix.shape[-2:])
        _, _, layer, *_, linear = one.name.split(".")
        for key, value in held.items():
            stored = f"mlp.experts.experts.{linear}.{key}"
            of_layers = saved.get(f"decoder.layers.{stored}", {int(layer): None})
            want = saved.get(f"decoder.layers.{layer}.{stored}", of_layers[int(layer)])
            assert_bytes_equal(value.detach(), want.to(value.dtype), what=f"{one.name} {key}")


def _go(chain: str, flags: list[str], checkpoint: Path | None = None) -> Record:
    """Calibrate or load, train, and merge; ``extra`` is the merged state as exported."""
    import moe_optim

    knobs, adapter, layers = CHAINS[chain]
    _adapt_what_is_built(adapter, layers)
    before: dict[str, torch.Tensor] = {}
    trained: set[str] = set()

    def calibrate(chunks: list[Any], _: Any) -> None:
        if checkpoint is None:
            moe_optim.calibrate(chunks)
        else:
            _assert_loaded(chunks[0], layers, checkpoint)
        before.update(_bytes_of_frozen(chunks[0]))
        trained.update(n for n, p in chunks[0].module.named_parameters() if p.requires_grad)

    def merge(chunks: list[Any], optimizer: Any) -> dict[str, torch.Tensor]:
        assert_same_tensors(_bytes_of_frozen(chunks[0]), before, what="frozen")
        for name, param in chunks[0].module.named_parameters():
            assert param.requires_grad or getattr(param, "main_grad", None) is None, name
            assert getattr(getattr(param, "quantized_storage", None), "initial", None) is None
        masters = {id(m) for part in optimizer.chained_optimizers for g in part.param_groups
                   for m in g["params"]}  # fmt: skip
        assert 0 < len(masters) <= len(trained)
        merged = moe_optim.merge_adapters(chunks)
        assert len(merged) == 2 * len(layers)
        assert not [m for m in chunks[0].modules() if isinstance(m, AdapterWrapper | Matrix)]
        exported = moe_optim.export_weights(chunks, layout="sequential")
        return {name: tensor.clone() for name, tensor in exported}

    record = pretrain(
        [*FLAGS, *flags], MoEOptimConfig(**knobs), after_setup=calibrate, observe=merge
    )
    assert record.masters.keys() <= trained
    return record


@pytest.mark.parametrize(
    "chain",
    ["mxfp8_2d", *(pytest.param(one, marks=pytest.mark.extended) for one in ("int4", "int8"))],
)
def test_a_run_of_adapters_goes_on_with_another_number_of_ranks(chain: str, tmp_path: Path):
    """Calibrated, trained, evaluated and saved on 2 expert-parallel ranks, loaded on one: experts,
    amaxes and adapters are the same, and so is the next loss, but for the order of a sum. Frozen
    weights keep their bytes and have no gradients, masters or initial values; merged models export
    what their formats hold."""
    ep2 = ["--expert-model-parallel-size", "2", "--save", str(tmp_path), "--save-interval", "2"]
    first, other = run_ranks(2, _go, chain, ep2)
    assert len(first.losses) == 3
    assert first.losses == other.losses
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    checkpoint = tmp_path / "iter_0000002"
    (alone,) = run_ranks(1, _go, chain, ["--load", str(tmp_path)], checkpoint)
    assert alone.losses == {3: pytest.approx(first.losses[3], rel=2**-21)}
    assert alone.extra.keys() == first.extra.keys()
    assert any(".local_experts.3.linear_fc2.weight" in key for key in alone.extra)
    assert not any("adapter" in key or "to_wrap" in key for key in alone.extra)


class Strange(Adapter):
    """An adapter of a class that nobody knows."""


class ParallelLinearDoRAAdapter(LORA[0]):  # type: ignore[misc]
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weight_magnitude = torch.nn.Parameter(torch.ones(4))


REFUSALS = {
    "strange": "LoRA adapters, .* alone, got Strange with linear_in.weight, linear_out.weight",
    "DoRA": "got ParallelLinearDoRAAdapter with .*weight_magnitude",
    "activation": "linear_fc2: expected .* with .*SiLU",
    "disabled": "linear_fc2: expected an adapter that adds to the outputs, got a disabled one",
    "trained": "linear_fc2: expected a frozen weight",
    "shape": r"linear_fc2: expected linear_in \[4, 64\] and linear_out \[64, 4\]",
    "not installed": "linear_fc1: expected a bf16 weight, or one in the installed format",
    "shared": "again.0: expected a weight with one adapter, got that of linear_fc2, too",
    "tied": "linear_fc2: expected a weight of its own, got one tied to embeddings",
}


def _refuse() -> None:
    """What is no LoRA or cannot be written is refused by name before anything changes."""
    import moe_optim

    cases = {
        "strange": (ConfigError, wrap(make(KINDS[0]), adapter=Strange)),
        "DoRA": (ConfigError, wrap(make(KINDS[0]), adapter=ParallelLinearDoRAAdapter)),
        "activation": (ConfigError, wrap(make(KINDS[0]))),
        "disabled": (StateError, wrap(make(KINDS[0]))),
        "trained": (StateError, wrap(make(KINDS[1]))),
        "shape": (LayoutError, wrap(make(KINDS[2]))),
        "not installed": (StateError, wrap(make(KINDS[8]))),
        "shared": (LayoutError, wrap(make(KINDS[6]))),
        "tied": (LayoutError, wrap(make(KINDS[0]))),
    }
    cases["activation"][1].linear_fc2.adapter.activation = torch.nn.SiLU()
    cases["disabled"][1].linear_fc2._adapter_enabled = False
    cases["trained"][1].linear_fc2.to_wrap.weight3.main_grad = torch.zeros(1)
    cases["shared"][1].again = torch.nn.ModuleList([cases["shared"][1].linear_fc2])
    cases["tied"][1].linear_fc2.to_wrap.weight.shared_embedding = True
    shape = cases["shape"][1].linear_fc2.adapter.linear_in
    shape.weight = torch.nn.Parameter(shape.weight[:, :-1])
    make(KINDS[0])  # installs bf16
    assert cases.keys() == REFUSALS.keys()
    for name, (error, module) in cases.items():
        before = values_of(module)
        with pytest.raises(error, match=REFUSALS[name]):
            moe_optim.merge_adapters([module])
        assert_same_tensors(values_of(module), before, what=name)
        assert isinstance(module.linear_fc1, AdapterWrapper)
    with pytest.raises(ConfigError, match="model_chunks: expected a list"):
        moe_optim.merge_adapters(cases["DoRA"][1])


def _merge_cut_linears() -> None:
    import moe_optim

    experts.start_ranks(tensor_model_parallel_size=2)
    rank, generator = torch.distributed.get_rank(), torch.Generator().manual_seed(1)
    weight, first, second = (
        torch.randint(-3, 4, shape, generator=generator).bfloat16()
        for shape in ((64, 32), (4, 32), (64, 4))
    )
    merged = (weight.float() + SCALE * (second.float() @ first.float())).bfloat16()
    column, row = (
        Dense(weight.chunk(2, axis)[rank], first.chunk(2, axis)[rank], second.chunk(2)[rank])
        for axis in (0, 1)
    )
    model = torch.nn.ModuleDict({"linear_qkv": column.wrapped(), "linear_proj": row.wrapped()})
    assert moe_optim.merge_adapters([model]) == ["linear_qkv", "linear_proj"]
    for axis, (name, linear) in enumerate(model.items()):
        assert type(linear) is torch.nn.Linear
        assert_bytes_equal(linear.weight.detach(), merged.chunk(2, axis)[rank], what=name)


class Dense(LORA[0]):  # type: ignore[misc]
    """A rank's adapter of a dense linear, and the linear."""

    def __init__(self, weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.dim, self.alpha, self.tp_group = 4, 6, torch.distributed.group.WORLD
        for name, values in (("linear_in", first), ("linear_out", second)):
            setattr(self, name, torch.nn.Linear(*values.shape[::-1], bias=False))
            getattr(self, name).weight = torch.nn.Parameter(values.contiguous())
        self._linear = [torch.nn.Linear(*weight.shape[::-1], bias=False)]
        self._linear[0].weight = torch.nn.Parameter(weight.contiguous())

    def wrapped(self) -> AdapterWrapper:
        return AdapterWrapper(self._linear[0], self)


def test_dense_linears_are_merged_where_they_are_cut():
    """Column- and row-parallel ones, of integers, so that no order of sums is seen."""
    run_ranks(2, _merge_cut_linears)


CUT = [kind for kind in KINDS if kind.format != "nvfp4"]
"""Kinds whose parts have the values of whole experts: each has its own amax in NVFP4."""


def _give_parts(name: str, adapter: Any, tp: int) -> None:
    """Give an adapter this rank's parts of integers, so that no order of sums is seen."""
    for matrix, (rows, cols) in (("in", (4, LINEARS[name][1])), ("out", (LINEARS[name][0], 4))):
        given = getattr(adapter, f"linear_{matrix}")
        count = EXPERTS if given.weight.dim() == 3 else 1
        generator = torch.Generator().manual_seed(rows)
        whole = torch.randint(-3, 4, (count, rows, cols), generator=generator).bfloat16()
        if (name, matrix) != ("linear_fc1", "out"):  # its rows are cut in gate and up
            dim = 2 if (name, matrix) == ("linear_fc2", "in") else 1
            part = whole.chunk(tp, dim)[torch.distributed.get_rank() % tp].contiguous()
        else:
            part = local_part(name, whole, tp=tp)
        given.weight = torch.nn.Parameter(part if given.weight.dim() == 3 else part[0])


def _merge_experts(tp: int, whole: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """Return what GEMMs read after a merge, by kind, adapter, linear and direction."""
    import moe_optim
    from moe_optim.weights.managed import storage_of

    experts.start_ranks(tensor_model_parallel_size=tp, expert_tensor_parallel_size=tp)
    found = {}
    for kind, adapter in itertools.product(CUT, LORA[:2]):
        module = wrap(make(kind, tp=tp), adapter=adapter)
        for name in LINEARS:
            _give_parts(name, module.get_submodule(name).adapter, tp)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert moe_optim.merge_adapters([module]) == list(LINEARS)
        warned = [str(one.message) for one in caught if "merge_adapters" in str(one.message)]
        assert len(warned) == (tp > 1)
        assert all("linear_fc2: with" in one and "linear_fc1" not in one for one in warned)
        for name, values in values_of(module).items():
            key = f"{kind}, {adapter.__name__}, {name}"
            found[f"{key}, rowwise"] = values
            weights = module.get_submodule(name)._parameters.values()
            if kind.format != "bf16" and not FORMATS[kind.format].is_row_only:
                stored = [storage_of(one).quantized for one in weights]
                of_dgrad = [reference.dequantize(one, "columnwise") for one in stored]
                found[f"{key}, columnwise"] = torch.cat(of_dgrad)
    for key, values in found.items() if whole else ():
        want = local_part(key.split(", ")[-2], whole[key], tp=tp)
        assert_bytes_equal(values, want, what=key)
    return found


def test_cut_experts_are_merged_as_whole_ones():
    """Each rank gets, to the bit, its part of what one rank merges; a warning names linear_fc2, in
    whose forward pass Megatron-Bridge omits a sum."""
    (whole,) = run_ranks(1, _merge_experts, 1)
    run_ranks(2, _merge_experts, 2, whole)


@on_ranks(1)
def test_megatron_bridge_is_told_what_it_asks_of_portable_experts():
    """Sizes of whole experts, and along which side they are cut; of others, what it finds itself.
    Only while the plug-in is installed."""
    from moe_optim.integration import installation
    from moe_optim.integration.bridge import MoEOptimizerConfig

    def stock(m, is_expert=False, pg_collection=None, sequence_parallel_input_regather=False):
        return f"stock, {type(m).__name__}, {is_expert}"

    experts.start_ranks()
    module = make(KINDS[0])
    installation.uninstall()
    names = ("megatron.bridge", "megatron.bridge.peft", *(f"megatron.bridge.peft.{name}"
             for name in ("utils", "lora", "canonical_lora")))  # fmt: skip
    sys.modules |= {name: ModuleType(name) for name in names}
    sys.modules["megatron.bridge.peft.utils"].AdapterAttributes = SimpleNamespace
    users = [sys.modules[name] for name in names[3:]]
    for user in users:
        user.get_adapter_attributes_from_linear = stock
    config = MoEOptimizerConfig(optimizer="adam", bf16=True, use_distributed_optimizer=True)
    config.finalize()
    found: dict[str, Any] = {}
    for user in users:
        ask = user.get_adapter_attributes_from_linear
        assert ask(torch.nn.Linear(1, 1), is_expert=True) == "stock, Linear, True"
        found |= {name: vars(ask(module.get_submodule(name), is_expert=True)) for name in LINEARS}
    assert module.linear_fc1.num_gemms == 4
    assert module.linear_fc1.config is module.config
    module.config.expert_tensor_parallel_size = 2
    with pytest.warns(UserWarning, match=r"expert-tensor-parallel-size 1, got 2.* Give 1\."):
        assert ask(module.linear_fc1, is_expert=True).out_features == 2 * LINEARS["linear_fc1"][0]
    installation.uninstall()
    assert all(user.get_adapter_attributes_from_linear is stock for user in users)
    common = {
        "disable_tensor_parallel_comm": False,
        "disable_sequence_parallel_comm": True,
        "base_linear_is_parallel": True,
    }
    for name, (rows, cols) in LINEARS.items():
        assert found[name] == common | {
            "input_is_parallel": name == "linear_fc2",
            "in_features": cols,
            "out_features": rows,
        }
