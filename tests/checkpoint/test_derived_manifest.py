"""Manifests of states that were saved without one: Megatron's own layout is among those found."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from moe_optim.checkpoint.derived_manifest import (
    Parameter,
    StoredBucket,
    StoredBuffer,
    derive_manifests,
)
from moe_optim.checkpoint.state_manifest import Address, ParameterPlace, StateManifest

DTYPE = "(torch.bfloat16, torch.float32)"
EXPERTS, ROWS, COLS = 4, 3, 5  # no multiples of 64: every parameter but the first is moved
SOURCES = ("sequential", "indexed", "beside biases", "grouped")
TARGETS = ("indexed", "grouped")


def layer(number: int, layout: str, *, biases: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of a layer as modules register them; the oracle of the orders."""
    prefix = f"decoder.layers.{number}."
    experts = f"{prefix}mlp.experts."
    shapes = {
        ("linear_fc1", "weight"): (2 * ROWS, COLS), ("linear_fc1", "bias"): (2 * ROWS,),
        ("linear_fc2", "weight"): (COLS, ROWS), ("linear_fc2", "bias"): (COLS,),
    }  # fmt: skip
    if not biases:
        shapes = {key: shape for key, shape in shapes.items() if key[1] == "weight"}
    numbers, of = range(EXPERTS), list(shapes)
    found = {
        "sequential": [(f"local_experts.{e}.{n}.{k}", (n, k)) for e in numbers for n, k in of],
        "indexed": [(f"{n}.{k}{e}", (n, k)) for n, k in of for e in numbers],
        "beside biases": [
            (f"{linear}.{k}{e}", (n, k))
            for linear in ("linear_fc1", "linear_fc2")
            for e in numbers
            for n, k in of
            if n == linear
        ],
        "grouped": [(f"{n}.{k}", (n, k)) for n, k in of],
    }[layout]
    stacked = (EXPERTS,) if layout == "grouped" else ()
    return [
        (f"{prefix}norm.weight", (COLS,)),
        (f"{prefix}router.weight", (EXPERTS, COLS)),
        *((f"{experts}{name}", (*stacked, *shapes[key])) for name, key in found),
        (f"{prefix}shared_experts.linear_fc1.weight", (2 * ROWS, COLS)),
    ]


def model(layout: str, *, biases: bool, layers: int = 2) -> list[Parameter]:
    named = [("embedding.weight", (7, COLS))]
    for number in range(layers):
        named += layer(number, layout, biases=biases)
    named.append(("output_layer.weight", (7, COLS)))
    return [Parameter(name=name, shape=shape, dtype="torch.bfloat16") for name, shape in named]


def megatrons_layout(
    parameters: Sequence[Parameter], bucket_size: int | None, ranks: int
) -> tuple[StoredBuffer, dict[Address, tuple[int, int]]]:
    """Return what Megatron stores of a buffer, and bucket and start of each address in it."""
    tensors = {torch.nn.Parameter(torch.empty(p.shape, device="meta")): p for p in parameters}
    for tensor, parameter in tensors.items():
        tensor.shared_embedding = parameter.begins_bucket
    layout = DistributedOptimizer._compute_per_buffer_param_layout(
        list(tensors), bucket_size, ranks, SimpleNamespace(pad_buckets_for_high_nccl_busbw=False)
    )
    edges: list[set[int]] = [set() for _ in layout.bucket_indices]
    places: dict[Address, tuple[int, int]] = {}
    for tensor, (start, end, bucket) in layout.param_index_map.items():
        first = layout.bucket_indices[bucket][0]
        edges[bucket] |= {start - first, end - first}
        at = start - first
        parameter = tensors[tensor]
        place = ParameterPlace(name=parameter.name, shape=parameter.shape, start=0)
        for address, numel in place.pieces():
            places[address] = (bucket, at)
            at += numel
    buckets = []
    for (start, end), numel, own in zip(
        layout.bucket_indices, layout.per_bucket_numel_unpadded, edges, strict=True
    ):
        shard = (end - start) // ranks
        cuts = set(range(0, numel, shard)) | {numel}
        buckets.append(StoredBucket(numel=numel, padded=end - start, edges=frozenset(own | cuts)))
    return StoredBuffer(dtype=DTYPE, buckets=tuple(buckets)), places


def places_of(manifest: StateManifest) -> dict[Address, tuple[int, int]]:
    return {address: (read.bucket, read.start) for address, read in manifest.addresses().items()}


SIZES = {"one bucket": None, "some buckets": 200, "a bucket a parameter": 1}


@pytest.mark.parametrize("bucket_size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("source", SOURCES)
def test_sizes_and_edges_leave_megatrons_own_layout_alone(source: str, bucket_size: int | None):
    """Whatever order experts were saved in and are wanted in, on any number of ranks."""
    for target, biases, ranks in product(TARGETS, (False, True), (1, 2, 3, 8)):
        stored, places = megatrons_layout(model(source, biases=biases), bucket_size, ranks)
        found = derive_manifests([model(target, biases=biases)], [stored], None)
        assert [places_of(manifest) for manifest in found] == [places], (target, biases, ranks)


@pytest.mark.parametrize("bucket_size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("source", SOURCES)
def test_whole_buffers_without_edges_can_have_been_laid_out_so(
    source: str, bucket_size: int | None
):
    """Megatron's layout is among those found, its places counted from the start of the buffer."""
    stored, places = megatrons_layout(model(source, biases=True), bucket_size, 2)
    starts = [0]
    for bucket in stored.buckets:
        starts.append(starts[-1] + bucket.numel)
    whole = replace(stored, buckets=(StoredBucket(numel=stored.numel),))
    found = derive_manifests(
        [model("grouped", biases=True)], [whole], None, bucket_sizes=[bucket_size]
    )
    expected = {address: (0, starts[bucket] + at) for address, (bucket, at) in places.items()}
    assert expected in [places_of(manifest) for manifest in found]
    for manifest in found:
        assert [bucket.numel for bucket in manifest.buffers[0].buckets] == [stored.numel]


OTHERS: dict[str, Callable[[list[Parameter]], list[Parameter]]] = {
    "a layer more": lambda _: model("grouped", biases=False, layers=3),
    "biases": lambda _: model("grouped", biases=True),
    "no output layer": lambda parameters: parameters[:-1],
    "another dtype": lambda parameters: [replace(p, dtype="torch.float32") for p in parameters],
    "a larger embedding": lambda parameters: [
        replace(parameters[0], shape=(8, COLS)), *parameters[1:],
    ],
    "embedding and output layer exchanged": lambda parameters: [
        *parameters[1:3], parameters[0], *parameters[3:],
    ],
}  # fmt: skip


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_states_of_another_model_fit_nowhere(change):
    stored, _ = megatrons_layout(model("sequential", biases=False), 200, 2)
    assert derive_manifests([change(model("grouped", biases=False))], [stored], None) == []


def test_an_embedding_that_two_stages_share_has_a_bucket_of_its_own():
    """The bucket before it ends where the embedding would have begun, padding included."""

    def shared(layout: str) -> list[Parameter]:
        first, *others = model(layout, biases=False)
        return [replace(first, begins_bucket=True), *others]

    stored, places = megatrons_layout(shared("sequential"), None, 2)
    assert len(stored.buckets) == 2 and stored.buckets[0].numel % 64 == 0
    (found,) = derive_manifests([shared("grouped")], [stored], None)
    assert places_of(found) == places
    whole = replace(stored, buckets=(StoredBucket(numel=stored.numel),))
    assert derive_manifests([shared("grouped")], [whole], None, bucket_sizes=[None])


def test_quantized_weights_lie_apart_where_they_were_quantized_when_saved():
    """A stock model in bf16 had one buffer of what is quantized here, one in FP8 had two."""

    def quantized(layout: str) -> list[Parameter]:
        parameters = model(layout, biases=False)
        return [replace(p, is_quantized=".experts." in p.name) for p in parameters]

    together, _ = megatrons_layout(model("indexed", biases=False), None, 2)
    (one,) = derive_manifests([quantized("grouped")], [together], None)
    assert len(one.buffers) == 1
    groups = [
        [p for p in quantized("indexed") if p.is_quantized == apart] for apart in (False, True)
    ]
    buffers = [megatrons_layout(group, None, 2)[0] for group in groups]
    apart = [buffers[0], replace(buffers[1], dtype="(torch.uint8, torch.float32)")]
    (two,) = derive_manifests([quantized("grouped")], apart, None)
    assert [len(buffer.buckets[0].parameters) for buffer in two.buffers] == [8, 16]
    assert derive_manifests([model("grouped", biases=False)], apart, None) == []


def test_buffers_of_several_chunks_follow_each_other():
    chunks = [
        [replace(p, name=f"chunk{n}.{p.name}") for p in model("sequential", biases=False)]
        for n in range(2)
    ]
    stored = [megatrons_layout(chunk, 200, 2)[0] for chunk in chunks]
    wanted = [
        [replace(p, name=f"chunk{n}.{p.name}") for p in model("grouped", biases=False)]
        for n in range(2)
    ]
    (found,) = derive_manifests(wanted, stored, None)
    assert len(found.buffers) == 2
    assert {place.name[:6] for _, _, place in found.places()} == {"chunk0", "chunk1"}


@settings(max_examples=60)
@given(
    edges=st.frozensets(st.integers(0, 4000), max_size=40),
    numels=st.lists(st.integers(1, 4000), max_size=4),
    padded=st.none() | st.integers(0, 5000),
)
def test_any_numbers_give_some_manifests_or_none(edges, numels, padded):
    """A damaged checkpoint raises nothing here."""
    buckets = tuple(StoredBucket(numel=n, padded=padded, edges=edges) for n in numels)
    stored = StoredBuffer(dtype=DTYPE, buckets=buckets)
    chunks = [model("grouped", biases=False)]
    for found in (
        derive_manifests(chunks, [stored], None),
        derive_manifests(chunks, [stored], None, bucket_sizes=[None, 1]),
    ):
        assert isinstance(found, list)
