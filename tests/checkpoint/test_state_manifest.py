"""Manifests of flat optimizer states: any layout is read from any other, or everything is named."""

import json
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.checkpoint.flat_states import require_megatrons_offsets
from moe_optim.checkpoint.state_manifest import (
    Address,
    BucketPlaces,
    BufferPlaces,
    LayoutMap,
    ParameterPlace,
    StateManifest,
)
from moe_optim.errors import LayoutError

PREFIX = "decoder.layers.0.mlp.experts."


def parameters_of(layout: str, experts: int, rows: int, cols: int) -> list[tuple[str, tuple]]:
    """Return names and shapes of a layer's parameters in an expert layout, and of a dense one."""
    dense = [("decoder.layers.0.self_attention.linear_qkv.weight", (rows, rows))]
    found = []
    for linear, shape in (("linear_fc1", (2 * rows, cols)), ("linear_fc2", (cols, rows))):
        for kind, one in (("weight", shape), ("bias", shape[:1])):
            if layout == "grouped":
                found.append((f"{PREFIX}{linear}.{kind}", (experts, *one)))
            elif layout == "indexed":
                found += [(f"{PREFIX}{linear}.{kind}{i}", one) for i in range(experts)]
            else:
                found += [
                    (f"{PREFIX}local_experts.{i}.{linear}.{kind}", one) for i in range(experts)
                ]
    return dense + found


def flat_number(name: str, shape: tuple, element: int) -> tuple:
    """Name an element by what it is in the model, whatever the layout: the oracle."""
    match = re.fullmatch(r"(.*experts\.)(?:local_experts\.(\d+)\.)?(\w+\.)(weight|bias)(\d*)", name)
    if match is None:
        return name, element
    own = match[2] or match[5]
    if own:
        return match[1] + match[3] + match[4], int(own), element
    numel = torch.Size(shape[1:]).numel()
    return match[1] + match[3] + match[4], element // numel, element % numel


@st.composite
def manifests(draw: Callable, experts: int, rows: int, cols: int) -> StateManifest:
    """Lay a layer's parameters in some order over buffers and buckets, with gaps between them."""
    layout = draw(st.sampled_from(["grouped", "indexed", "sequential"]))
    parameters = draw(st.permutations(parameters_of(layout, experts, rows, cols)))
    cuts = sorted(draw(st.lists(st.integers(1, len(parameters) - 1), max_size=3, unique=True)))
    buffers: list[BufferPlaces] = []
    for first, last in zip([0, *cuts], [*cuts, len(parameters)], strict=True):
        places, at = [], 0
        for name, shape in parameters[first:last]:
            at += draw(st.integers(0, 3))
            places.append(ParameterPlace(name=name, shape=shape, start=at))
            at += places[-1].numel
        bucket = BucketPlaces(numel=at, parameters=tuple(places))
        if buffers and draw(st.booleans()):
            before = buffers.pop()
            buffers.append(BufferPlaces(dtype=before.dtype, buckets=(*before.buckets, bucket)))
        else:
            buffers.append(BufferPlaces(dtype=f"dtype{len(buffers)}", buckets=(bucket,)))
    return StateManifest(buffers=tuple(buffers), glu_interleave=None, versions={"torch": "2"})


def contents(manifest: StateManifest) -> dict[tuple[int, int, int], tuple]:
    """Return what lies at every element of every bucket; padding is not in it."""
    return {
        (buffer, bucket, place.start + element): flat_number(place.name, place.shape, element)
        for buffer, bucket, place in manifest.places()
        for element in range(place.numel)
    }


@settings(max_examples=150)
@given(st.data())
def test_every_element_is_read_from_where_it_lies(data):
    """Any range of any parameter, from any layout in any order: reads name, element by element, the
    same elements of the model."""
    sizes = [data.draw(st.integers(1, 4)) for _ in range(3)]
    source, target = (data.draw(manifests(*sizes)) for _ in range(2))
    reader, lies = LayoutMap(source, target, "checkpoint"), contents(source)
    places = list(target.places())
    assert len(places) == len({place.name for _, _, place in places}) > 0
    for _, _, place in places:
        start = data.draw(st.integers(0, place.numel - 1))
        end = data.draw(st.integers(start + 1, place.numel))
        got = [
            lies[read.buffer, read.bucket, read.start + element]
            for read in reader.spans(place, start, end)
            for element in range(read.numel)
        ]
        assert got == [flat_number(place.name, place.shape, i) for i in range(start, end)]


@settings(max_examples=50)
@given(st.data())
def test_a_manifest_survives_being_saved(data):
    manifest = data.draw(manifests(2, 3, 2))
    assert StateManifest.from_dict(json.loads(json.dumps(manifest.to_dict())), "x") == manifest
    assert StateManifest.from_dict(manifest.to_dict(), "x") == manifest


def one_bucket(*parameters: tuple[str, tuple]) -> StateManifest:
    places, at = [], 0
    for name, shape in parameters:
        places.append(ParameterPlace(name=name, shape=shape, start=at))
        at += places[-1].numel
    buffer = BufferPlaces(dtype="x", buckets=(BucketPlaces(numel=at, parameters=tuple(places)),))
    return StateManifest(buffers=(buffer,), glu_interleave=None, versions={})


ADDRESSES = {
    "grouped": ("a.experts.linear_fc1.weight", (2, 3, 4), ["a.experts.linear_fc1.weight"]),
    "shared experts are none": ("a.shared_experts.linear_fc1.weight", (3, 4), None),
    "the name of a quantizer": ("a.experts.linear_fc1.weight_quantizer._amax", (2, 1, 1), None),
    "another linear": ("a.experts.linear_fc3.weight0", (3, 4), None),
    "a name that ends alike": ("a.my_experts.linear_fc1.weight0", (3, 4), None),
    "one of no number": ("a.experts.linear_fc1.weight", (3, 4), None),
}


@pytest.mark.parametrize(("name", "shape", "expected"), ADDRESSES.values(), ids=ADDRESSES.keys())
def test_only_exact_names_are_experts(name: str, shape: tuple, expected: list | None):
    place = ParameterPlace(name=name, shape=shape, start=0)
    addresses = [address for address, _ in place.pieces()]
    if expected is None:
        assert addresses == [Address(name)]
    else:
        assert addresses == [Address(expected[0], expert) for expert in range(shape[0])]


def test_eleven_experts_are_not_taken_for_one():
    """``weight1`` is not the beginning of ``weight10``."""
    names = [(f"{PREFIX}linear_fc1.weight{i}", (1, 2)) for i in range(12)]
    source = one_bucket(*names)
    target = one_bucket((f"{PREFIX}linear_fc1.weight", (12, 1, 2)))
    (place,) = target.buffers[0].buckets[0].parameters
    reads = LayoutMap(source, target, "x").spans(place, 20, 24)
    assert [(read.start, read.numel) for read in reads] == [(20, 4)]


def test_what_does_not_fit_is_all_named():
    """Missing, left over, and of another size: one error with each of them."""
    source = one_bucket(
        (f"{PREFIX}linear_fc1.weight", (2, 4, 2)), ("old.weight", (3,)), ("norm.weight", (4,))
    )
    target = one_bucket(
        (f"{PREFIX}linear_fc1.weight", (3, 4, 2)), ("new.weight", (3,)), ("norm.weight", (5,))
    )
    with pytest.raises(LayoutError) as raised:
        LayoutMap(source, target, "the checkpoint")
    message = str(raised.value)
    assert f"missing: {PREFIX}linear_fc1.weight of expert 2, new.weight" in message
    assert "left over: old.weight" in message
    assert "norm.weight has 4 elements, expected 5" in message
    assert message.startswith("the checkpoint: ")


def test_the_same_expert_twice_is_refused():
    twice = one_bucket(
        (f"{PREFIX}linear_fc1.weight", (2, 4, 2)), (f"{PREFIX}linear_fc1.weight1", (4, 2))
    )
    with pytest.raises(LayoutError, match="linear_fc1.weight of expert 1: expected one place"):
        twice.addresses()


DAMAGES: dict[str, Callable[[dict], object]] = {
    "a later version": lambda saved: saved.update(version=2),
    "a number for a list": lambda saved: saved.update(buffers=3),
    "no start": lambda saved: saved["buffers"][0]["buckets"][0]["parameters"][0].pop("start"),
    "infinitely many": lambda saved: saved["buffers"][0]["buckets"][0].update(numel=float("inf")),
    "a negative start": lambda saved: _place(saved).update(start=-1),
    "an end behind the bucket": lambda saved: _place(saved).update(start=1),
    "a list for a name": lambda saved: _place(saved).update(name=["norm"]),
    "more experts than any model has": lambda saved: (
        _place(saved).update(name=f"{PREFIX}linear_fc1.weight", shape=[2**40, 1, 1]),
        saved["buffers"][0]["buckets"][0].update(numel=2**40),
    ),
}


def _place(saved: dict) -> dict:
    return saved["buffers"][0]["buckets"][0]["parameters"][0]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_manifest_is_refused(damage: Callable[[dict], object]):
    saved = json.loads(json.dumps(one_bucket(("norm.weight", (4,))).to_dict()))
    damage(saved)
    with pytest.raises(LayoutError, match="key: expected a manifest"):
        StateManifest.from_dict(saved, "key")


@pytest.mark.parametrize("starts", [(0, 128, 256), (0, 100), (0, 192), (64, 192)], ids=str)
def test_flat_states_that_megatron_would_read_elsewhere_are_not_saved(starts: tuple[int, ...]):
    """Megatron begins parameters, here of 100 elements, at multiples of 64: another layout's is
    named, and what to do instead."""
    places = tuple(
        ParameterPlace(name=f"layer{index}.weight", shape=(10, 10), start=start)
        for index, start in enumerate(starts)
    )
    buffer = BufferPlaces(dtype="x", buckets=(BucketPlaces(numel=400, parameters=places),))
    manifest = StateManifest(buffers=(buffer,), glu_interleave=None, versions={})
    if starts == (0, 128, 256):
        require_megatrons_offsets(manifest)
        return
    with pytest.raises(LayoutError, match=r"layer\d.weight: expected element .*reshardable"):
        require_megatrons_offsets(manifest)
