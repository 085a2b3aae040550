"""Parts on a GPU, by kernels and in plain torch, are slices of what the reference makes."""

import pytest

from moe_optim.formats import FORMATS, round_up
from moe_optim.formats.partition import infer_partition
from moe_optim.parts import quantize_part
from tests.support.bytes import assert_bytes_equal, assert_values_equal
from tests.support.inputs import wide_range_weights, with_specials
from tests.support.number_formats.meshes import coordinates, on_each_rank, part_of
from tests.test_parts import quantized_whole

pytestmark = pytest.mark.gpu

CUTS = {  # shape, axes
    "whole blocks": ((3, 512, 768), {"rows": {"tp": 2}, "columns": {"fsdp": 3}}),
    "inside of blocks": ((3, 192, 288), {"rows": {"tp": 4}, "columns": {"fsdp": 6}}),
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("format", [*FORMATS, "bf16"])
@pytest.mark.parametrize(("shape", "axes"), CUTS.values(), ids=CUTS)
def test_parts_on_a_gpu_equal_the_whole_weight(format, shape, axes, backend):
    if format in FORMATS:
        shape = (*shape[:2], round_up(shape[2], FORMATS[format].dimension_multiple))
    partition = infer_partition(format, axes, shape=shape)
    weight = with_specials(wide_range_weights(*shape))
    on_gpu = weight.cuda()
    whole = quantized_whole(weight, format)
    results = on_each_rank(
        partition,
        lambda coordinate, reduce_max: quantize_part(
            part_of(on_gpu, partition, coordinate),
            partition,
            coordinate,
            reduce_max,
            backend=backend,
        ),
    )
    for coordinate, buffers in zip(coordinates(partition), results, strict=True):
        bounds = partition.bounds(coordinate)
        for buffer in partition.buffers:
            expected = whole[buffer.name][buffer.slices(bounds)]
            found = buffers[buffer.name]
            assert found.is_cuda
            equal = assert_values_equal if partition.format is None else assert_bytes_equal
            equal(found.cpu(), expected, what=buffer.name)  # a GPU has another NaN in bf16
