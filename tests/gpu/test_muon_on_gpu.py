"""A step of matrices on a GPU: near the iteration in fp64, and the same bits in any cut."""

from dataclasses import replace

import pytest
import torch

from moe_optim.formats import FORMATS, QuantizedWeight, get_format, reference
from moe_optim.formats.reference.muon import apply_into
from moe_optim.formats.reference.newton_schulz import Orthogonalization, orthogonalize
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.table_entry import TableEntry
from tests.support.bytes import assert_bytes_equal
from tests.support.steps.launches import assert_neither_allocates_nor_waits
from tests.support.steps.muon_steps import DEFAULTS, expected_step, make_states, step, weight_of

pytestmark = pytest.mark.gpu
SHAPES = [(256, 384), (384, 256), (200, 136), (768, 2048)]
SPLITS = [(), (64, 32, 32), (64, 64)]
FORMS = {
    "bf16": DEFAULTS,
    "fp16": replace(DEFAULTS, iteration="fp16"),
    "gram": replace(DEFAULTS, iteration="gram"),
    "fp32": replace(DEFAULTS, orthogonalization=Orthogonalization(precision="highest")),
}
LARGEST = {"bf16": 0.03, "fp16": 0.006, "gram": 0.01, "fp32": 1e-4}
"""Largest distances from the iteration in fp64, as parts of the update, for Gaussian matrices."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_masters_move_along_the_orthogonalized_momentum(form: str, shape: tuple[int, int]):
    """Momentum equals emerging-optimizers' to the bit, and the update an fp64 iteration's within a
    bound per dtype."""
    weight, settings = weight_of(*shape), FORMS[form]
    (state,) = make_states([(weight, 3)], device="cuda")
    (on_host,) = make_states([(weight, 3)])
    _, momentum = expected_step(on_host, settings, 1.0)
    before = state.master.clone()
    step([state], settings)
    assert_bytes_equal(state.momentum.cpu(), momentum, what="momentum")
    how = settings.orthogonalization
    exact = orthogonalize(momentum.view(3, *shape), how, dtype=torch.float64)
    moved = 0.02 * how.scale(*shape) * exact
    decayed = before.cpu().double() * (1 - 0.02 * 0.1)
    got = decayed.view_as(exact) - state.master.cpu().double().view_as(exact)
    for number in range(3):
        error = (got[number] - moved[number]).norm() / moved[number].norm()
        assert error <= LARGEST[form]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("form", ["bf16", "gram"])
def test_batches_and_owners_do_not_change_bits(split: tuple[int, ...], form: str):
    """One table of all weights, one per weight, and a small workspace give equal bits."""
    weight = weight_of(256, 384, split)
    (whole,), (apart,), (small,) = (make_states([(weight, 7)], device="cuda") for _ in range(3))
    step([whole], FORMS[form])
    for number in range(7):
        owned = slice(number * weight.numel, (number + 1) * weight.numel)
        assert apart.weight is not None
        piece = {name: getattr(apart, name)[owned] for name in ("master", "gradient", "momentum")}
        step([replace(apart, weight=apart.weight[owned], **piece)], FORMS[form])
    table = step([small], replace(FORMS[form], workspace_bytes=3 << 20))
    assert len(table.chunks) > 1
    for other in (apart, small):
        for name in ("master", "momentum", "weight"):
            assert_bytes_equal(getattr(other, name), getattr(whole, name), what=name)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bf16"])
def test_quantized_weights_come_from_the_stepped_masters(name: str):
    """The launch that moves the masters encodes them: data and scales are the reference's."""
    format, shape = get_format(name), (3, 256, 384)
    (state,) = make_states([(weight_of(*shape[1:]), 3)], device="cuda")
    target = QuantizedWeight.empty(format, shape, device="cuda")
    members = MemberTable.build([TableEntry(parameter="w", source=state.master, target=target)])
    step([replace(state, weight=None)], members=[members])
    expected = reference.quantize(state.master.view(shape).cpu(), format)
    for buffer, tensor in expected.gathered_buffers().items():
        assert_bytes_equal(target.gathered_buffers()[buffer].cpu(), tensor, what=buffer)


@pytest.mark.parametrize("form", ["bf16", "fp16", "gram"])
def test_a_launch_neither_allocates_nor_waits(form: str):
    """Planning allocates everything; a step does not, whatever the number of matrices."""
    states = make_states([(weight_of(256, 384), 5), (weight_of(128, 256, (64, 32, 32)), 2)],
                         device="cuda")  # fmt: skip
    table = step(states, FORMS[form])
    assert_neither_allocates_nor_waits(table.launch)


def test_the_update_follows_the_direction_to_the_bit():
    """Given the orthogonalized direction of the kernels, masters are the reference's to the bit."""
    weight = weight_of(256, 384)
    (state,) = make_states([(weight, 2)], device="cuda")
    before = state.master.clone()
    table = step([state])
    (chunk,) = table.chunks
    (direction,) = chunk.places.tensors
    hyper = table.updates.hyper[0, :6].cpu()
    expected = before.cpu()
    apply_into(expected, direction.cpu().view(-1), hyper=hyper, clip=torch.tensor(1.0))
    assert_bytes_equal(state.master.cpu(), expected, what="master")


@pytest.mark.parametrize("form", ["bf16", "fp16", "gram"])
def test_a_replayed_step_is_an_eager_one(form: str):
    """A captured step gives the bits of the kernels that it holds, and reads gradients and the clip
    anew."""
    weights = [(weight_of(256, 384), 5), (weight_of(128, 256, (64, 32, 32)), 2)]
    eager, captured = (make_states(weights, device="cuda") for _ in range(2))
    step(eager, FORMS[form])
    for state in eager:
        state.gradient.mul_(2)
    for _ in range(2):
        step(eager, FORMS[form])
    table = step(captured, FORMS[form])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.launch()
    for state in captured:
        state.gradient.mul_(2)
    for _ in range(2):
        graph.replay()
    clips = table.updates.clips
    clips.fill_(-1.0)
    graph.replay()  # moves nothing
    for got, want in zip(captured, eager, strict=True):
        for name in ("master", "momentum", "weight"):
            assert_bytes_equal(getattr(got, name), getattr(want, name), what=name)
