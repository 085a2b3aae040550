"""What is asked of flat optimizer states before they are saved."""

import pytest

from moe_optim.checkpoint.flat_states import require_megatrons_offsets
from moe_optim.checkpoint.state_manifest import (
    BucketPlaces,
    BufferPlaces,
    ParameterPlace,
    StateManifest,
)
from moe_optim.errors import LayoutError


def manifest(*starts: int) -> StateManifest:
    """Lay parameters of 100 elements in one bucket."""
    places = tuple(
        ParameterPlace(name=f"layer{index}.weight", shape=(10, 10), start=start)
        for index, start in enumerate(starts)
    )
    bucket = BucketPlaces(numel=starts[-1] + 100, parameters=places)
    buffer = BufferPlaces(dtype="x", buckets=(bucket,))
    return StateManifest(buffers=(buffer,), glu_interleave=None, versions={})


def test_parameters_at_multiples_of_64_lie_as_megatron_lays_them():
    require_megatrons_offsets(manifest(0, 128, 256))


@pytest.mark.parametrize("starts", [(0, 100), (0, 192), (64, 192)], ids=str)
def test_flat_states_that_megatron_would_read_elsewhere_are_not_saved(starts):
    """A layout of somebody else's: the parameter is named, and what to do instead."""
    with pytest.raises(LayoutError, match=r"layer\d.weight: expected element .*reshardable"):
        require_megatrons_offsets(manifest(*starts))
