"""Plans of partitioned GEMMs: gathers, executed literally without processes, and collectives."""

import doctest
import itertools
import re
from pathlib import Path

import pytest

from moe_optim.errors import ConfigError, LayoutError
from moe_optim.formats import FORMATS, QuantizedWeight, reference
from moe_optim.formats.gemm_partition import infer_gemm_partition
from moe_optim.formats.partition import infer_partition
from moe_optim.parts import quantize_part
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights
from tests.support.number_formats.meshes import coordinates, on_each_rank, part_of

_, ROWS, COLS = SHAPE = (4, 64, 128)
DIMENSIONS = ("experts", "rows", "columns")
GROUPS = ((64, 0, 32, 32), (0, 64, 32, 32), (32, 32, 64, 0), (64, 0, 0, 64))
"""Tokens of each expert; one row for each place along the axes that cut tokens."""
NAMES = [*FORMATS, "bf16"]

WEIGHT = wide_range_weights(*SHAPE, exponents=(-2, 2))

MESHES = {  # axes that cut the weight, those that cut tokens
    "fsdp x ep": ({"experts": {"ep": 2}, "rows": {"fsdp": 2}}, {"fsdp": 2}),
    "fsdp inside of tp, rows": ({"rows": {"tp": 2, "fsdp": 2}}, {"fsdp": 2}),
    "fsdp inside of tp, columns": ({"columns": {"tp": 2, "fsdp": 2}}, {"fsdp": 2}),
    "tp on rows, fsdp on columns": ({"rows": {"tp": 2}, "columns": {"fsdp": 2}}, {"fsdp": 2}),
    "ep x tp x fsdp": (
        {"experts": {"ep": 2}, "rows": {"fsdp": 2}, "columns": {"tp": 2}}, {"fsdp": 2}),
    "fsdp inside of blocks": ({"rows": {"fsdp": 8}}, {"fsdp": 8}),
    "fsdp, replicas": ({"columns": {"fsdp": 2}}, {"dp": 2, "fsdp": 2}),
    "fsdp on experts": ({"experts": {"ep": 2, "fsdp": 2}}, {"fsdp": 2}),
    "fsdp on two dimensions": (
        {"rows": {"fsdp": 2}, "columns": {"fsdp inner": 2}}, {"fsdp": 2, "fsdp inner": 2}),
    "fsdp ranks with the same tokens": ({"rows": {"tp": 2}, "columns": {"fsdp": 2}}, {"dp": 2}),
    "sequence parallel, rows": ({"rows": {"tp": 2}, "columns": {"fsdp": 2}}, {"tp": 2, "fsdp": 2}),
    "sequence parallel, columns": ({"columns": {"tp": 2, "fsdp": 2}}, {"tp": 2, "fsdp": 2}),
    "axes of one rank": (
        {"experts": {"ep": 1}, "rows": {"fsdp": 1, "tp": 1}, "columns": {"cp": 1}},
        {"fsdp": 1, "tp": 1, "ep": 1, "dp": 1}),
    "tp on rows and columns": ({"rows": {"tp": 2, "fsdp": 2}, "columns": {"cp": 2}}, {"fsdp": 2}),
}  # fmt: skip


def infer(format, axes, token_axes, **options):
    weight = infer_partition(format, axes, shape=SHAPE)
    fsdp = [axis.name for axis in weight.axes if axis.name.startswith("fsdp")]
    tokens = sum(GROUPS[0]) // axes.get("experts", {}).get("ep", 1)
    options = {"tokens": tokens, "token_axes": token_axes, "fsdp": fsdp} | options
    return infer_gemm_partition(weight, **options)


def read_whole(values, format, direction):
    """Return the values that a GEMM reads of a matrix that no axis cuts."""
    if format is None:
        return values.bfloat16().float()
    direction = "rowwise" if format.is_row_only else direction
    return reference.dequantize(reference.quantize(values, format), direction)


class Mesh:
    """Ranks in one process, which execute a plan: tensors are keyed by their places."""

    def __init__(self, plan, token_axes):
        self.plan = plan
        self.sizes = {axis.name: axis.parts for axis in plan.held.axes} | token_axes
        places = itertools.product(*map(range, self.sizes.values()))
        self.ranks = [dict(zip(self.sizes, place, strict=True)) for place in places]
        self.held = self._hold(WEIGHT)

    def peers(self, rank, axes):
        """Return the ranks along ``axes`` that share all other places, in rank order."""
        spans = [range(self.sizes[axis]) for axis in axes]
        return [rank | dict(zip(axes, place, strict=True)) for place in itertools.product(*spans)]

    def place(self, rank, partition):
        return {axis.name: rank[axis.name] for axis in partition.axes}

    def key(self, rank, partition):
        return tuple(self.place(rank, partition).values())

    def _hold(self, weight):
        """Return what each rank holds between steps, by its place in the weight's mesh."""
        partition = self.plan.held
        results = on_each_rank(
            partition,
            lambda place, reduce_max: quantize_part(
                part_of(weight, partition, place), partition, place, reduce_max
            ),
        )
        places = [tuple(place.values()) for place in coordinates(partition)]
        return dict(zip(places, results, strict=True))

    def gather(self, operand):
        """Return the buffers that each rank has before the GEMM, by its place without FSDP axes."""
        plan, held, gathered = self.plan, self.held, {}
        for rank in self.ranks:
            parts = [
                (self.place(peer, plan.held), held[self.key(peer, plan.held)])
                for peer in self.peers(rank, operand.gathered_over)
            ]
            own = dict(held[self.key(rank, plan.held)])
            for name in operand.gathered_buffers:
                buffer = plan.held.buffer(name)
                whole = own[name].new_zeros(buffer.shape)
                for place, part in parts:
                    whole[buffer.slices(plan.held.bounds(place))] = part[name]
                kept = plan.gathered.bounds(self.place(rank, plan.gathered))
                spans = [slice(kept[one].start, kept[one].stop) for one in DIMENSIONS]
                if name != "data":
                    spans = plan.gathered.buffer(name).slices(kept)
                own[name] = whole[tuple(spans)]
            first = gathered.setdefault(self.key(rank, plan.gathered), own)
            for name in {*operand.gathered_buffers, "global_amax"} & own.keys():
                assert_bytes_equal(own[name], first[name], f"{name} of FSDP ranks")
        if plan.held.format is None and plan.gathered.format is not None:  # quantized after it
            results = on_each_rank(
                plan.gathered,
                lambda place, reduce_max: quantize_part(
                    gathered[tuple(place.values())]["data"], plan.gathered, place, reduce_max
                ),
            )
            return dict(zip(gathered, results, strict=True))
        return gathered

    def read_weight(self, gathered, operand):
        """Return the values of the weight that each rank's GEMM reads, by the same place."""
        plan, values = self.plan, {}
        for rank in self.ranks:
            key, place = self.key(rank, plan.gathered), self.place(rank, plan.gathered)
            own = gathered[key]
            if operand.format is None:
                values[key] = own["data"].float()
                continue
            quantized = QuantizedWeight.empty(operand.format, SHAPE)
            for name, buffer in quantized.buffers().items():
                buffer.zero_()
                slices = plan.gathered.buffer(name).slices(plan.gathered.bounds(place))
                if buffer[slices].shape == own[name].shape:
                    buffer[slices] = own[name]
            reference.derive_into(quantized)
            whole = reference.dequantize(quantized, operand.direction)
            values[key] = part_of(whole, plan.gathered, place)
        return values


def check_gathers(format, axes, token_axes, **options):
    plan = infer(format, axes, token_axes, **options)
    mesh, known = Mesh(plan, token_axes), plan.gathered.format
    whole = reference.quantize(WEIGHT, known).buffers() if known else {"data": WEIGHT.bfloat16()}
    for gemm, direction in ((plan.forward, "rowwise"), (plan.dgrad, "columnwise")):
        operand = gemm.right
        gathered = mesh.gather(operand)
        values = mesh.read_weight(gathered, operand)
        expected = read_whole(WEIGHT, known, direction)
        for place in coordinates(plan.gathered):
            key, bounds = tuple(place.values()), plan.gathered.bounds(place)
            for name in set(operand.gathered_buffers) & whole.keys():
                slices = plan.gathered.buffer(name).slices(bounds)
                assert_bytes_equal(gathered[key][name], whole[name][slices], f"{name} at {place}")
            read = part_of(expected, plan.gathered, place)
            assert_bytes_equal(values[key], read, f"{direction} at {place}")
        sent = [
            sum(buffers[name].nbytes for name in operand.gathered_buffers)
            for buffers in mesh.held.values()
        ]
        assert operand.nbytes == max(sent)
    return plan


FEW = ("fsdp inside of blocks", "ep x tp x fsdp")
"""Meshes that cut blocks, and that have every kind of axis."""


def crossed(names, few, meshes=MESHES):
    """Return all pairs of names and meshes, of which only ``few(name, mesh)`` always run."""
    return [
        pytest.param(
            *(name, *cuts),
            id=f"{name}, {mesh}",
            marks=() if few(name, mesh) else pytest.mark.extended,
        )
        for name, (mesh, cuts) in itertools.product(names, meshes.items())
    ]


@pytest.mark.parametrize(
    ("format", "axes", "token_axes"),
    crossed(NAMES, lambda format, mesh: mesh in (FEW if format == "mxfp8" else FEW[:1])),
)
def test_quantizing_before_the_gather_equals_quantizing_the_whole(format, axes, token_axes):
    """Bytes that travelled, and the values that GEMMs of both directions read."""
    check_gathers(format, axes, token_axes)


@pytest.mark.parametrize(
    ("format", "axes", "token_axes"),
    crossed(FORMATS, lambda format, mesh: format == "nvfp4" and mesh in FEW),
)
def test_quantizing_after_the_gather_reads_the_same_values(format, axes, token_axes):
    """Maxima are then exchanged over tensor axes alone."""
    plan = check_gathers(format, axes, token_axes, wire="bf16")
    axes_of_maxima = {axis for one in plan.dgrad.right.maxima for axis in one.axes}
    assert not any(axis.startswith("fsdp") for axis in axes_of_maxima)


# Rules, as a table

RULES = {  # axes that cut the weight, those that cut tokens, collectives of the three GEMMs
    "experts need no communication": ({"experts": {"ep": 4}}, {}, "", "", ""),
    "data parallel": ({}, {"dp": 2}, "", "", "all_reduce dp"),
    "column parallel: rows are cut": ({"rows": {"tp": 2}}, {}, "", "all_reduce tp", ""),
    "row parallel: columns are cut": ({"columns": {"tp": 2}}, {}, "all_reduce tp", "", ""),
    "column parallel, sequence parallel": (
        {"rows": {"tp": 2}},
        {"tp": 2},
        "gather tokens tp",
        "reduce_scatter tp",
        "gather tokens tp",
    ),
    "row parallel, sequence parallel": (
        {"columns": {"tp": 2}}, {"tp": 2}, "reduce_scatter tp", "gather output_grad tp",
        "gather output_grad tp"),
    "fsdp": (
        {"columns": {"fsdp": 4}}, {"fsdp": 4}, "gather weight fsdp", "gather weight fsdp",
        "reduce_scatter fsdp"),
    "fsdp of the same tokens": (
        {"rows": {"fsdp": 4}}, {}, "gather weight fsdp", "gather weight fsdp", "slice fsdp"),
    "ep x tp x fsdp, replicas": (
        {"experts": {"ep": 2}, "rows": {"tp": 2, "fsdp": 2}}, {"dp": 2, "fsdp": 2},
        "gather weight fsdp", "gather weight fsdp, all_reduce tp",
        "reduce_scatter fsdp, all_reduce dp"),
    "axes of one rank": ({"experts": {"ep": 1}, "rows": {"fsdp": 1}}, {"fsdp": 1}, "", "", ""),
}  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "token_axes", "forward", "dgrad", "wgrad"), RULES.values(), ids=RULES
)
def test_each_gemm_has_the_collectives_of_its_cuts(axes, token_axes, forward, dgrad, wgrad):
    plan = infer("mxfp8", axes, token_axes)
    assert plan.group_axes == tuple(name for name, n in axes.get("experts", {}).items() if n > 1)
    for gemm, expected in zip(
        (plan.forward, plan.dgrad, plan.wgrad), (forward, dgrad, wgrad), strict=True
    ):
        found = [
            f"gather {one.name} {axis}"
            for one in (gemm.left, gemm.right)
            for axis in one.gathered_over
        ]
        found += [f"{one.kind} {one.axis}" for one in gemm.output]
        assert ", ".join(found) == expected


def test_sequence_parallel_axes_share_tokens_in_bf16():
    """10 tokens of 64 rows; four ranks hold 3 at most."""
    cuts = {"cp": 2, "tp": 2}
    plan = infer("mxfp8", {"columns": cuts}, cuts, tokens=10, grad_format="mxfp8")
    for operand in (plan.dgrad.left, plan.wgrad.left):
        assert (operand.gathered_buffers, operand.nbytes) == (("data",), 3 * 64 * 2)
    assert [one.nbytes for one in plan.forward.output] == [10 * 64 * 2, 5 * 64 * 2]


# What is refused

REFUSED = {  # axes that cut the weight, those that cut tokens, options, error
    "half a byte of the weight": (
        {"columns": {"fsdp": 128}}, {"fsdp": 128}, {},
        (LayoutError, "nvfp4 packs 2 columns into one byte of rowwise_data")),
    "half a byte of tokens": (
        {"rows": {"tp": 64}}, {}, {"format": "bf16", "grad_format": "nvfp4"},
        (LayoutError, "^output_grad: nvfp4 packs 2 columns into one byte")),
    "tokens before dispatch": (
        {"experts": {"ep": 2}}, {"ep": 2}, {},
        (ConfigError, "^token_axes: .* after dispatch, got ep, which cuts experts.*Leave it out")),
    "fsdp outside of tp": (
        {"rows": {"fsdp": 2, "tp": 2}}, {"fsdp": 2}, {},
        (ConfigError, "^fsdp: expected fsdp inside of tp, .* Write tp before fsdp")),
    "fsdp that does not cut the weight": (
        {"rows": {"tp": 2}}, {}, {"fsdp": ["fsdp"]},
        (ConfigError, "^fsdp: expected mesh axes of the weight, got fsdp besides tp")),
}  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "token_axes", "options", "refusal"), REFUSED.values(), ids=REFUSED
)
def test_what_cannot_be_planned_is_refused_with_a_reason(axes, token_axes, options, refusal):
    error, message = refusal
    with pytest.raises(error, match=message):
        infer(**{"format": "nvfp4", "axes": axes, "token_axes": token_axes} | options)


def test_the_example_of_the_document_prints_what_it_says():
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    (code,) = re.findall(r"^```pycon\n(.*?)^```", text, re.M | re.S)
    example = doctest.DocTestParser().get_doctest(code, {}, "formats.md", None, 0)
    assert example.examples and not doctest.DocTestRunner().run(example).failed
