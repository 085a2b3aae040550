"""Plans of partitioned GEMMs, executed literally on meshes without processes."""

import doctest
import itertools
import re
from math import prod
from pathlib import Path

import pytest
import torch

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
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
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


def product(left, right):
    """Return left [M, K] right [N, K]^T, summed over K in fp32 from the first term to the last."""
    total = torch.zeros(len(left), len(right))
    for column in range(left.shape[1]):
        total = total + left[:, column, None] * right[None, :, column]
    return total


class Mesh:
    """Ranks in one process, which execute a plan: tensors are keyed by their places."""

    def __init__(self, plan, token_axes):
        self.plan = plan
        self.sizes = {axis.name: axis.parts for axis in plan.held.axes} | token_axes
        self.data = [
            axis for axis in token_axes if axis not in {one.name for one in plan.gathered.axes}
        ]
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

    def tokens_of(self, rank):
        """Return the place of a rank among those with tokens of their own."""
        place = 0
        for axis in self.data:
            place = place * self.sizes[axis] + rank[axis]
        return place

    def features(self, rank, dimension):
        """Return the slice of rows or columns that a rank's tokens have."""
        bounds = self.plan.gathered.bounds(self.place(rank, self.plan.gathered))
        return slice(bounds[dimension].start, bounds[dimension].stop)

    # Weights

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

    # Tokens

    def read_tokens(self, groups, operand, direction):
        """Return the values of the tokens that each rank's GEMM reads, a matrix an expert."""
        dimension = "columns" if operand.name == "tokens" else "rows"
        cuts = {
            axis.name: axis.parts for axis in self.plan.gathered.axes if axis.dimension == dimension
        }
        known = {}
        for place, group in enumerate(groups):
            for expert, whole in enumerate(group):
                known[place, expert] = self._read_group(whole, cuts, operand, direction)
        read = []
        for rank in self.ranks:
            experts = self.plan.gathered.bounds(self.place(rank, self.plan.gathered))["experts"]
            span = self.features(rank, dimension)
            read.append([known[self.tokens_of(rank), expert][:, span] for expert in experts])
        return read

    def _read_group(self, whole, cuts, operand, direction):
        """Quantize the features of each tensor-parallel rank; sequences are gathered before."""
        ranks = prod(self.sizes[axis] for axis in operand.gathered_over)
        whole = torch.cat(whole.bfloat16().chunk(ranks)) if len(whole) else whole
        if operand.format is None or not len(whole):
            return whole.bfloat16().float()
        partition = infer_partition(operand.format, {"columns": cuts}, shape=(1, *whole.shape))
        exchanged = {one.name: one.axes for one in partition.maxima}
        assert exchanged.items() >= {one.name: one.axes for one in operand.maxima}.items()
        parts = on_each_rank(
            partition,
            lambda place, reduce_max: quantize_part(
                part_of(whole[None], partition, place), partition, place, reduce_max
            ),
        )
        quantized = QuantizedWeight.empty(operand.format, partition.shape)
        for place, part in zip(coordinates(partition), parts, strict=True):
            for name, buffer in quantized.buffers().items():
                buffer[partition.buffer(name).slices(partition.bounds(place))] = part[name]
        assert operand.direction in (direction, "rowwise")
        return reference.dequantize(quantized, operand.direction)[0]

    # Outputs

    def reduce(self, outputs, reductions):
        """Return each rank's output after all collectives; sums are in rank order."""
        for one in reductions:
            dtype = DTYPES[one.dtype]
            keyed = {
                tuple(rank.values()): out for rank, out in zip(self.ranks, outputs, strict=True)
            }
            outputs = []
            for rank in self.ranks:
                peers = [keyed[tuple(p.values())] for p in self.peers(rank, [one.axis])]
                own = keyed[tuple(rank.values())]
                assert sum(tensor.nbytes for tensor in own) == one.nbytes
                assert {tensor.dtype for tensor in own} == {dtype}
                if one.kind != "slice":
                    own = [sum_in_order(terms) for terms in zip(*peers, strict=True)]
                if one.kind != "all_reduce":
                    dim = 0 if one.dimension == "tokens" else DIMENSIONS.index(one.dimension)
                    parts = self.sizes[one.axis]
                    own = [tensor.tensor_split(parts, dim)[rank[one.axis]] for tensor in own]
                outputs.append(own)
        return outputs


def sum_in_order(terms):
    total, *rest = terms
    for term in rest:
        total = total + term
    return total


def expected_sum(left, right, cuts):
    """Return a product in bf16: of every cut of the contracted dimension, summed in rank order."""
    parts = zip(left.chunk(cuts, 1), right.chunk(cuts, 1), strict=True)
    return sum_in_order([product(*part).bfloat16() for part in parts])


def some_tokens(places, features, seed):
    return [
        [
            wide_range_weights(count, features, seed=seed + 9 * place + expert, exponents=(-2, 2))
            for expert, count in enumerate(GROUPS[place % len(GROUPS)])
        ]
        for place in range(places)
    ]


def read_groups(groups, format, direction):
    return [[read_whole(one[None], format, direction)[0] for one in group] for group in groups]


def products_of_groups(left, right):
    """Return the outputs of a grouped GEMM, one of each expert."""
    return [product(*pair) for pair in zip(left, right, strict=True)]


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


def check_token_gemm(mesh, gemm, groups, direction, features):
    """Check y or dx; ``direction`` is that of the weight, ``features`` are those of the output."""
    plan = mesh.plan

    def operand_of(weight):
        return weight if features == "rows" else weight.transpose(1, 2)

    weights = mesh.read_weight(mesh.gather(gemm.right), gemm.right)
    outputs = []
    for rank, own in zip(mesh.ranks, mesh.read_tokens(groups, gemm.left, "rowwise"), strict=True):
        weight = operand_of(weights[mesh.key(rank, plan.gathered)])
        outputs.append([one.bfloat16() for one in products_of_groups(own, weight)])
    contracted = "columns" if features == "rows" else "rows"
    cuts = [axis.parts for axis in plan.gathered.axes if axis.dimension == contracted]
    weight = operand_of(read_whole(WEIGHT, plan.gathered.format, direction))
    expected = [
        [expected_sum(*pair, prod(cuts)) for pair in zip(group, weight, strict=True)]
        for group in read_groups(groups, gemm.left.format, "rowwise")
    ]
    scatters = [one.axis for one in gemm.output if one.kind == "reduce_scatter"]
    for rank, own in zip(mesh.ranks, mesh.reduce(outputs, gemm.output), strict=True):
        experts = plan.gathered.bounds(mesh.place(rank, plan.gathered))["experts"]
        for expert, got in zip(experts, own, strict=True):
            want = expected[mesh.tokens_of(rank)][expert][:, mesh.features(rank, features)]
            for axis in scatters:
                want = want.tensor_split(mesh.sizes[axis])[rank[axis]]
            assert_bytes_equal(got, want, f"{features} of expert {expert} at {rank}")


def check_weight_gemm(mesh, x, dy, dtype):
    gemm = mesh.plan.wgrad

    def gradients(dys, xs):
        """Return dW of the experts of each group of groups."""
        transposed = [
            products_of_groups([one.T for one in left], [one.T for one in right])
            for left, right in zip(dys, xs, strict=True)
        ]
        return [torch.stack(one).to(dtype) for one in transposed]

    own = [
        mesh.read_tokens(groups, operand, "columnwise")
        for groups, operand in ((dy, gemm.left), (x, gemm.right))
    ]
    outputs = mesh.reduce([[one] for one in gradients(*own)], gemm.output)
    whole = [
        read_groups(groups, operand.format, "columnwise")
        for groups, operand in ((dy, gemm.left), (x, gemm.right))
    ]
    sizes = [mesh.sizes[axis] for axis in mesh.data]
    terms, left = torch.stack(gradients(*whole)).view(*sizes, *SHAPE), list(mesh.data)
    for axis in sorted(mesh.data, key=lambda axis: not axis.startswith("fsdp")):  # those first
        terms = sum_in_order(terms.unbind(left.index(axis)))
        left.remove(axis)
    for rank, (got,) in zip(mesh.ranks, outputs, strict=True):
        want = part_of(terms, mesh.plan.held, mesh.place(rank, mesh.plan.held))
        assert_bytes_equal(got, want, f"weight gradient at {rank}")


def check_products(format, axes, token_axes, **options):
    mesh = Mesh(infer(format, axes, token_axes, **options), token_axes)
    places = prod(mesh.sizes[axis] for axis in mesh.data)
    x, dy = some_tokens(places, COLS, seed=1), some_tokens(places, ROWS, seed=2)
    check_token_gemm(mesh, mesh.plan.forward, x, "rowwise", "rows")
    check_token_gemm(mesh, mesh.plan.dgrad, dy, "columnwise", "columns")
    check_weight_gemm(mesh, x, dy, DTYPES[options.get("wgrad_dtype", "fp32")])


FEW = ("fsdp inside of blocks", "ep x tp x fsdp")
"""Meshes that cut blocks, and that have every kind of axis."""
SEVERAL = ("ep x tp x fsdp", "sequence parallel, rows", "tp on rows and columns")


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


@pytest.mark.parametrize(
    ("format", "axes", "token_axes"),
    crossed(NAMES, lambda format, mesh: format == "mxfp8" and mesh in (*FEW, *SEVERAL)),
)
def test_partitioned_gemms_equal_whole_ones(format, axes, token_axes):
    """To the bit; a sum over a cut dimension is one of partial products in rank order."""
    check_products(format, axes, token_axes)


@pytest.mark.parametrize(
    ("format", "axes", "token_axes"),
    crossed(
        FORMATS,
        lambda format, mesh: (format, mesh) == ("nvfp4", SEVERAL[-1]),
        {mesh: MESHES[mesh] for mesh in SEVERAL},
    ),
)
def test_partitioned_gemms_of_quantized_tokens_equal_whole_ones(format, axes, token_axes):
    """But for dy of 64 features, which INT4 in groups of 128 does not hold."""
    grad_format = None if format == "int4_g128" else format
    options = {"token_format": format, "grad_format": grad_format, "wgrad_dtype": "bf16"}
    check_products(format, axes, token_axes, **options)


def test_features_of_tokens_that_are_cut_inside_of_blocks_exchange_maxima():
    """Each rank has 16 of the 32 columns of a block of x, and all rows of dy."""
    axes, options = {"columns": {"tp": 8}}, {"token_format": "mxfp8", "grad_format": "mxfp8"}
    plan = infer("mxfp8", axes, {}, **options)
    assert [one.axes for one in plan.forward.left.maxima] == [("tp",)]
    assert not plan.dgrad.left.maxima and not plan.wgrad.right.maxima
    check_products("mxfp8", axes, {}, **options)


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


TRAVELS = {  # format -> buffers of the forward GEMM and of dgrad, bytes of each
    "bf16": (("data",), ("data",), 8192, 8192),
    "mxfp8": (
        ("rowwise_data", "rowwise_scale"), ("columnwise_data", "columnwise_scale"), 4096 + 128,
        4096 + 128),
    "mxfp8_2d": (("rowwise_data", "rowwise_scale"),) * 2 + (4096 + 4,) * 2,
    "nvfp4": (("rowwise_data", "rowwise_scale"),) * 2 + (2048 + 16,) * 2,
    "fp8_block": (("rowwise_data", "rowwise_scale"),) * 2 + (4096 + 4,) * 2,
    "int4": (("rowwise_data", "rowwise_scale"),) * 2 + (2048 + 256,) * 2,
}  # fmt: skip


@pytest.mark.parametrize(("format", "travels"), TRAVELS.items(), ids=TRAVELS)
def test_each_gemm_gathers_one_direction(format, travels):
    """Each rank holds one expert, 32 rows of 128 columns; the derived direction never travels."""
    plan = infer(format, {"experts": {"ep": 4}, "rows": {"fsdp": 2}}, {"fsdp": 2})
    operands = plan.forward.right, plan.dgrad.right
    assert (
        *(one.gathered_buffers for one in operands),
        *(one.nbytes for one in operands),
    ) == travels


def test_all_gemms_read_the_only_direction_of_a_row_only_format():
    plan = infer("int4", {}, {}, token_format="int4", grad_format="mxfp8")
    operands = [one for gemm in (plan.dgrad, plan.wgrad) for one in (gemm.left, gemm.right)]
    assert [one.direction for one in operands] == ["rowwise", "rowwise", "columnwise", "rowwise"]


def test_bytes_are_those_of_the_rank_that_holds_the_most_scales():
    """Of 96 rows in blocks of 32, every rank has 24: those in the middle lie in two blocks."""
    weight = infer_partition("mxfp8_2d", {"rows": {"fsdp": 4}}, shape=(1, 96, 32))
    plan = infer_gemm_partition(weight, tokens=0, token_axes={"fsdp": 4}, fsdp=["fsdp"])
    assert plan.forward.right.nbytes == 24 * 32 + 2


def test_sequence_parallel_axes_share_tokens_in_bf16():
    """10 tokens of 64 rows; four ranks hold 3 at most."""
    cuts = {"cp": 2, "tp": 2}
    plan = infer("mxfp8", {"columns": cuts}, cuts, tokens=10, grad_format="mxfp8")
    for operand in (plan.dgrad.left, plan.wgrad.left):
        assert (operand.gathered_buffers, operand.nbytes) == (("data",), 3 * 64 * 2)
    assert [one.nbytes for one in plan.forward.output] == [10 * 64 * 2, 5 * 64 * 2]


def test_each_gemm_exchanges_the_maxima_of_its_own_direction():
    """Of blocks of 32 rows that FSDP ranks share, which dgrad alone reads."""
    plan = infer("mxfp8", {"rows": {"fsdp": 8}}, {"fsdp": 8})
    assert not plan.forward.right.maxima
    assert plan.dgrad.right.maxima == plan.held.maxima != ()
    plan = infer("mxfp8", {"rows": {"tp": 4, "fsdp": 2}}, {"fsdp": 2}, wire="bf16")
    assert [one.axes for one in plan.dgrad.right.maxima] == [("tp",)]


def test_amaxes_of_experts_travel_with_experts_alone():
    rows = infer("nvfp4", {"rows": {"fsdp": 2}}, {"fsdp": 2}).forward.right
    assert "global_amax" not in rows.gathered_buffers
    assert [one.axes for one in rows.maxima if one.name == "global_amax"] == [("fsdp",)]
    experts = infer("nvfp4", {"experts": {"fsdp": 2}}, {"fsdp": 2}).forward.right
    assert "global_amax" in experts.gathered_buffers and not experts.maxima


# What is refused

REFUSED = {  # axes that cut the weight, those that cut tokens, options, error
    "an axis for experts and rows": (
        {"experts": {"ep": 2}, "rows": {"ep": 2}}, {}, {},
        (ConfigError, "expected each mesh axis once, with one rank or more, got ep: 2 for rows")),
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
    "an axis of two sizes": (
        {"rows": {"fsdp": 2}}, {"fsdp": 4}, {},
        (ConfigError, "^token_axes: expected 2 ranks along fsdp, got 4")),
    "an axis without ranks": ({}, {"dp": 0}, {}, (ConfigError, "one or more ranks along dp")),
    "another wire": ({}, {}, {"wire": "fp8"}, (ConfigError, "^wire: expected quantized or bf16")),
    "another dtype": (
        {}, {}, {"wgrad_dtype": "fp16"},
        (ConfigError, "^wgrad_dtype: expected bf16 or fp32, got 'fp16'")),
    "an unknown format": ({}, {}, {"token_format": "mxfp6"}, (ConfigError, "got 'mxfp6'")),
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
