"""The amax of an expert from ranges of its weight, and what NVFP4 makes of it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.formats import NVFP4, reference
from moe_optim.formats.reference.blocks import expert_amax_into
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights, with_specials
from tests.support.modules.amax import amax_of


@settings(max_examples=60)
@given(data=st.data())
def test_a_maximum_over_any_ranges_is_that_of_whole_experts(data):
    """However a weight is cut, special values included, the shares' maxima are plain torch's."""
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)))
    master = wide_range_weights(*shape, seed=data.draw(st.integers(0, 99)))
    master = with_specials(master, every=data.draw(st.integers(3, 97)))
    if data.draw(st.booleans()):
        master = master.bfloat16()
    numel = master.numel()
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=6)))
    shares = []
    for start, end in zip((0, *cuts), (*cuts, numel), strict=True):
        shares.append(torch.zeros(shape[0]))
        source = master.view(-1)[start:end]
        expert_amax_into(shares[-1], source, start, shape[1] * shape[2])
    assert_bytes_equal(torch.stack(shares).amax(0), amax_of(master))


def test_the_amax_of_what_nvfp4_holds_is_that_of_the_masters():
    """For every bf16 amax from 2^-116 to 2^119, where no scale overflows: weights that are loaded
    without masters quantize to the bytes they came from, by the amax they have themselves."""
    amaxes = torch.arange(11 << 7, 246 << 7, dtype=torch.int16).view(torch.bfloat16).float()
    assert (amaxes[0].log2(), amaxes[-1].log2().ceil()) == (-116, 119)
    generator = torch.Generator().manual_seed(0)
    master = torch.rand((len(amaxes), 16, 16), generator=generator) * 2 - 1
    master[:, 3, 5] = 1
    first = reference.quantize(master * amaxes.view(-1, 1, 1), NVFP4)
    assert_bytes_equal(first.global_amax, amaxes)
    again = reference.quantize(reference.dequantize(first, "rowwise").bfloat16(), NVFP4)
    for name, buffer in first.buffers().items():
        assert_bytes_equal(again.buffers()[name], buffer, what=name)
