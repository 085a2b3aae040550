"""Masters of Transformer Engine's experts from a state dict: one entry, or one an expert.

Megatron saves one an expert whatever the model has. Linears stand in, see ``te_experts``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.checkpoint.model_values import model_values_for
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import LayoutError
from moe_optim.formats import MXFP8
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.inputs import wide_range_weights
from tests.support.ranks import run_ranks
from tests.support.te import te_stand_ins
from tests.support.te.te_experts import build_with_te_experts
from tests.support.training import named_parameters, pretrain

LAYER = "decoder.layers.0.mlp.experts.linear_fc1"
EXPERTS, ROWS, COLS = 3, 64, 32


class Linear(torch.nn.Module):
    """Parameters of a grouped linear, by which its layout is known."""

    def __init__(self, *, single: bool) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = EXPERTS, True
        self.single_grouped_weight = self.single_grouped_bias = single
        shapes = {"weight": (ROWS, COLS), "bias": (ROWS,)}
        for kind, shape in shapes.items():
            names = {kind: (EXPERTS, *shape)} if single else {}
            names = names or {f"{kind}{expert}": shape for expert in range(EXPERTS)}
            for name, size in names.items():
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(size)))

    def _split_grouped_checkpoint_tensor(self, tensor: torch.Tensor, key: str) -> Any:
        return tensor.unbind(0)


def make_chunk(*, single: bool, wrapped: bool = False) -> torch.nn.Module:
    module: torch.nn.Module = Linear(single=single)
    for name in reversed(f"{'module.module.' * wrapped}{LAYER}".split(".")):
        outer = torch.nn.Module()
        outer.add_module(name, module)
        module = outer
    return module


def state_of(*, single: bool, prefix: str = "") -> dict[str, torch.Tensor]:
    values = {"weight": wide_range_weights(EXPERTS, ROWS, COLS).bfloat16()}
    values["bias"] = values["weight"][:, :, 0].clone()
    state = {f"{prefix}{LAYER}.{kind}": value for kind, value in values.items()}
    if single:
        return state
    return {f"{key}{e}": part for key, value in state.items() for e, part in enumerate(value)}


def values_of(chunk: torch.nn.Module, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what masters would be made of, by the name of the parameter in its linear."""
    found = model_values_for([chunk], {"model": state})
    return {name.rpartition(".")[2]: found[param] for name, param in chunk.named_parameters()}


@pytest.mark.parametrize("given", [True, False], ids=["from one entry", "from one an expert"])
@pytest.mark.parametrize("own", [True, False], ids=["into one parameter", "into one an expert"])
def test_every_layout_loads_into_every_other(own: bool, given: bool):
    """To the bit, weights and biases, wrapped or not, beside a teacher of the same names; the
    state dict stays what it was. Megatron's answer is the same where nothing else is there."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    state, want = state_of(single=given), state_of(single=own)
    others = state_of(single=given, prefix="teacher.")
    before = dict(others | state)
    got = values_of(make_chunk(single=own, wrapped=True), before)
    assert got.keys() == {key.rpartition(".")[2] for key in want}
    for key, value in want.items():
        assert_bytes_equal(got[key.rpartition(".")[2]], value, what=key)
    assert all(before[key] is value for key, value in (others | state).items())
    theirs = dict(state)
    DistributedOptimizer._normalize_state_dict_for_grouped_params(theirs, make_chunk(single=own))
    assert_same_tensors(theirs, want, what="Megatron's")


def test_quantized_weights_of_a_state_give_their_values():
    """A group of all experts gives its members', members make one; as files of --ckpt-format torch
    hold them."""
    group = te_stand_ins.GroupedTensor(
        te_stand_ins.MXFP8Tensor, MXFP8, wide_range_weights(EXPERTS, ROWS, COLS)
    )
    members = {f"{LAYER}.weight{e}": one for e, one in enumerate(group.quantized_tensors)}
    values = {key: values_of_stand_in(one) for key, one in members.items()}
    biases = {single: state_of(single=single) for single in (True, False)}
    for single, state in biases.items():
        biases[single] = {key: value for key, value in state.items() if ".bias" in key}
    apart = values_of(make_chunk(single=False), {f"{LAYER}.weight": group} | biases[True])
    for key, value in values.items():
        assert_bytes_equal(apart[key.rpartition(".")[2]], value, what=key)
    one = values_of(make_chunk(single=True), members | biases[False])["weight"]
    assert_bytes_equal(one, torch.stack(list(values.values())), what="joined")


def values_of_stand_in(weight: Any) -> torch.Tensor:
    """Return what the rows of a stand-in stand for, from its bytes."""
    scale = torch.exp2(weight._rowwise_scale_inv[:ROWS, : COLS // 32].float() - 127)
    data = weight._rowwise_data.view(torch.float8_e4m3fn).float()
    return (data * scale.repeat_interleave(32, 1)).bfloat16()


def _change(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    changes = {f"{LAYER}.{name}": value for name, value in changes.items()}
    return {key: value for key, value in (state | changes).items() if value is not None}


APART, ONE = state_of(single=False), state_of(single=True)
PART = APART[f"{LAYER}.weight0"]
REFUSED = {
    "an expert is missing": _change(APART, weight1=None),
    "experts of all ranks": _change(APART, weight3=PART),
    "both layouts": APART | ONE,
    "a key with and without wrappers": APART | {f"module.{LAYER}.weight2": PART},
    "another shape": _change(APART, weight2=PART[1:]),
    "other experts in one": _change(ONE, weight=ONE[f"{LAYER}.weight"][:2]),
}


@pytest.mark.parametrize("single", [True, False], ids=["one parameter", "one an expert"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_one_complete_set_is_refused_by_name(name: str, single: bool):
    kept = dict(REFUSED[name])
    with pytest.raises(LayoutError) as refusal:
        values_of(make_chunk(single=single), REFUSED[name])
    said = str(refusal.value)
    assert f"{LAYER}.weight: expected 3 experts of [64, 32], in one entry or in one each" in said
    assert all(key in said for key in kept if ".weight" in key)
    assert list(REFUSED[name]) == list(kept)
    assert all(REFUSED[name][key] is value for key, value in kept.items())


def test_experts_that_are_not_there_at_all_are_missing_parameters():
    foreign = state_of(single=False, prefix="text_")
    for single in (True, False):
        with pytest.raises(LayoutError, match=f"{LAYER}.weight.? is there 0 times"):
            values_of(make_chunk(single=single), foreign)


# Through Megatron's loop

SAVE = ["--train-iters", "1", "--eval-interval", "1000"]
LOAD = ["--no-load-optim", "--load-main-params-from-ckpt", "--no-load-rng"]
LOAD += ["--train-iters", "2", "--eval-interval", "1000"]
FORMATS = {True: "torch", False: "torch_dist"}  # the other always has an entry an expert


def _save(folder: Path, single: bool) -> dict[str, torch.Tensor]:
    config = MoEOptimConfig(format="bf16")
    build_with_te_experts(config, single=single)
    flags = [*SAVE, "--save", str(folder), "--ckpt-format", FORMATS[single]]
    return pretrain(flags, config).weights


def _load(folder: Path, single: bool, is_stock: bool) -> dict[str, torch.Tensor]:
    """Return masters as they are before the first step."""
    config = None if is_stock else MoEOptimConfig(format="bf16")
    build_with_te_experts(config, single=not single)
    masters: dict[str, torch.Tensor] = {}

    def look(model: list[Any], optimizer: Any) -> None:
        names = {param: name for name, param in named_parameters(model)}
        for part in optimizer.chained_optimizers:
            groups = (part.model_float16_groups, part.shard_fp32_from_float16_groups)
            for params, shards in zip(*groups, strict=True):
                for param, master in zip(params, shards, strict=True):
                    masters[names[param]] = master.clone().view(param.shape)

    flags = [*LOAD, "--load", str(folder), "--ckpt-format", FORMATS[single]]
    pretrain(flags, config, after_setup=look)
    return masters


@pytest.mark.parametrize(
    "single", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["into one", "apart"]
)
def test_masters_load_from_a_checkpoint_of_the_other_layout(tmp_path: Path, single: bool):
    """``--load-main-params-from-ckpt``: every master is the value that was saved, as in stock."""
    (saved,) = run_ranks(1, _save, tmp_path, single)
    (got,) = run_ranks(1, _load, tmp_path, single, False)
    want = {name: value.float() for name, value in saved.items() if "experts" not in name}
    experts = [name for name in saved if "experts" in name]
    if single:
        for name in experts:
            want |= {f"{name}{e}": part.float() for e, part in enumerate(saved[name])}
    else:
        for name in {name.rstrip("0123456789") for name in experts}:
            parts = [saved[f"{name}{expert}"] for expert in range(4)]
            want[name] = torch.stack(parts).float()
    assert_same_tensors(got, want, what="master")
    (stock,) = run_ranks(1, _load, tmp_path, single, True)
    assert_same_tensors(got, stock, what="stock's master")
