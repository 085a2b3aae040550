"""Runs the health launch on the CPU, for test_health_kernel.py: Triton's interpreter is global."""

from tests.kernels import interpreted  # noqa: F401, I001  # before any kernel is decorated

import torch

from moe_optim.formats import FORMATS
from moe_optim.kernels.health import table as health_table
from tests.support.health import assert_same_health, masters_of, measure

THIRDS = (0.0, 0.36, 0.79, 1.0)

health_table.has_kernels = lambda device: True


def check(format):
    """Measure whole weights and each third of them, by the kernel and by plain torch."""
    masters = [master.bfloat16().float() for master in masters_of(format)]
    masters = [torch.where(master.abs() < 1e-30, 0.0, master) for master in masters]
    shards = [((0.0, 1.0), 0), (THIRDS, 1)]
    if format.has_global_amax:  # the last one, too: of four formats one is enough
        shards.append((THIRDS, 2))
    for cuts, shard in shards:
        got = measure(format, masters, cuts=cuts, shard=shard)
        want = measure(format, masters, cuts=cuts, shard=shard, backend="reference")
        assert_same_health(got, want, f"{format.name}, shard {shard} of {len(cuts) - 1}")


if __name__ == "__main__":
    for format in FORMATS.values():
        check(format)
    print("health is plain torch's")
