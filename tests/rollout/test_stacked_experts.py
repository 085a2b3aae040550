"""Stacked experts have the names and rows of fused experts in Hugging Face's models."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from moe_optim import ops
from moe_optim.errors import LayoutError
from moe_optim.experts.keys.layouts import get_layout
from moe_optim.formats import FORMATS, get_format
from moe_optim.rollout.conventions import CONVENTIONS, ENGINE_FORMATS
from moe_optim.rollout.expert_tensors import rowwise_of
from moe_optim.rollout.exported_as import ExportedAs
from moe_optim.rollout.units import HeldExperts
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.checkpoints.stored_checkpoints import interleaved

EXPERTS, ROWS, COLS = 2, 512, 256
CASES = [
    pytest.param(name, one.name, id=f"{name}-{one.name}")
    for name in FORMATS
    for one in CONVENTIONS
    if one.format == ENGINE_FORMATS[name]
]


def held(format, *, interleave=None, rows=ROWS, linear="linear_fc1"):
    return HeldExperts(
        linear=f"decoder.layers.3.mlp.experts.{linear}", hf_layer=3, kind="weight", first=0,
        count=EXPERTS, shape=(rows, COLS), format=format, interleave=interleave,
    )  # fmt: skip


def exported(layout, convention, record, weights):
    """Return tensors by name."""
    exported_as = ExportedAs(get_layout(layout), convention)
    buffers = [weights]
    if record.format != "bf16":
        buffers = rowwise_of(ops.quantize(weights, get_format(record.format)))
    tensors = exported_as.listed(exported_as.tensors(record, buffers))
    return dict(zip(exported_as.names(record, range(EXPERTS)), tensors, strict=True))


def draw():
    return torch.randn(EXPERTS, ROWS, COLS, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("format", "convention"), [*CASES, ("bf16", None)])
def test_gate_rows_come_before_up_rows_however_they_train(format, convention):
    """Stacked or apart; in runs of 128 rows, which no block of any format crosses."""
    weights = draw() if format != "bf16" else draw().bfloat16()
    for layout in ("hf", "hf_per_expert"):
        straight = exported(layout, convention, held(format), weights)
        mixed = exported(
            layout, convention, held(format, interleave=128), interleaved(weights, 128)
        )
        assert_same_tensors(mixed, straight)


@pytest.mark.parametrize(("format", "convention"), [*CASES, ("bf16", None)])
def test_they_are_those_of_each_expert_stacked(format, convention):
    weights = draw() if format != "bf16" else draw().bfloat16()
    each = exported("sequential", convention, held(format), weights)
    for layout, stem in (
        ("grouped", "decoder.layers.3.mlp.experts.linear_fc1.weight"),
        ("hf", "model.layers.3.mlp.experts.gate_up_proj"),
    ):
        together = exported(layout, convention, held(format), weights)
        assert len(together) * EXPERTS == len(each)
        for name, tensor in together.items():
            suffix = name.removeprefix(stem)
            for expert, got in enumerate(tensor):
                path = f"decoder.layers.3.mlp.experts.local_experts.{expert}.linear_fc1"
                assert_bytes_equal(got, each[f"{path}.weight{suffix}"], what=name)


def test_fp8_blocks_have_transformers_names():
    transformers = find_spec("transformers")
    if transformers is None:
        pytest.skip("needs transformers")
    source = (Path(transformers.origin).parent / "integrations/finegrained_fp8.py").read_text()
    for linear in ("linear_fc1", "linear_fc2"):
        for name in exported("hf", None, held("fp8_block", linear=linear), draw()):
            assert f"self.{name.rpartition('.')[2]}" in source


def test_gate_and_up_must_not_share_a_block_of_scales():
    exported_as = ExportedAs(get_layout("hf"), None)
    with pytest.raises(LayoutError, match="runs of 128 rows or a multiple.*of 96 rows each"):
        exported_as.check(held("fp8_block", rows=2 * 96))
    with pytest.raises(LayoutError, match="interleaved by 64"):
        exported_as.check(held("fp8_block", interleave=64))
    ExportedAs(get_layout("grouped"), None).check(held("fp8_block", rows=2 * 96))
