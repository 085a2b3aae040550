"""Steps along directions on a GPU are those of plain torch, to the bit, in any pieces."""

import pytest
import torch

from moe_optim.formats import FORMATS
from tests.support.bytes import assert_values_equal
from tests.support.steps.directing import ROWS, Directing
from tests.support.steps.launches import assert_neither_allocates_nor_waits

pytestmark = pytest.mark.gpu
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def weights_of(format):
    """Return shapes and formats of weights that are read in every way, dense ones among them."""
    ragged = (3, 99 if format.is_row_only else 96, 5 * max(32, format.block_length))
    if format.dimension_multiple == 1:
        ragged = (3, 264, 136)
    return [
        ((6, 256, 512), format),
        (ragged, format),
        ((2, 128, 128), format),
        ((4, 40, 96), torch.bfloat16),
        ((1, 9, 11), torch.bfloat16),
        ((2, 64, 33), torch.float32),
    ]


def run_of(format, **options):
    """Return weights whose tables have kernels for everything."""
    run = Directing(weights_of(format), device="cuda", **options)
    assert not run.updates.finish.calls
    return run


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@EVERY_FORMAT
def test_pieces_in_any_order_step_and_encode_as_the_whole(format, dtype):
    run = run_of(format, directions=dtype)
    for seed in (0, 100, 200):
        run.step(run.directions(seed), seed)
        run.assert_equal_to_the_oracle()


@EVERY_FORMAT
def test_a_negative_clip_moves_nothing_and_encodes_again(format):
    run = run_of(format)
    run.clips.fill_(-1)
    run.step(run.directions(0), seed=0)
    run.assert_equal_to_the_oracle()


@EVERY_FORMAT
def test_a_captured_graph_takes_further_steps(format):
    """A launch allocates nothing and does not wait. Directions, hyper-parameters and clip factors
    are read anew by every replay."""
    eager, captured = run_of(format), run_of(format)
    pieces = [run.cut(run.directions(0), seed=3) for run in (eager, captured)]
    plans = [
        run.updates.plan_along(own) for run, own in zip((eager, captured), pieces, strict=True)
    ]
    for plan in plans:  # launches it twice
        assert plan.kernels
        assert_neither_allocates_nor_waits(plan.launch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plans[1].launch()
    for number, clip in ((1, 1.0), (0, 0.5)):
        for run, own, launch in zip(
            (eager, captured), pieces, (plans[0].launch, graph.replay), strict=True
        ):
            run.hyper[0, : len(ROWS[number])] = torch.tensor(ROWS[number]).cuda()
            run.clips.fill_(clip)
            for *_, direction in own:
                direction.neg_()
            launch()
        for got, want in zip(captured.states, eager.states, strict=True):
            assert_values_equal(got.master, want.master, what=got.parameter)
