"""GPUs that a plan knows: memory, memory bandwidth and links.

Numbers are those of NVIDIA's public data sheets: H100 and H200 Tensor Core GPU (SXM), HGX B200,
GB200 NVL72 and GB300 NVL72, whose totals are divided by their 72 GPUs. A link is one direction of
NVLink within a domain, and one network port per GPU beyond it: ConnectX-7, and ConnectX-8 on GB300.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_GB, _GIB = 10**9, 2**30
STEP = 4
"""Ratio of successive numbers of GPUs by default."""


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    """One kind of GPU, in the units of its data sheet."""

    memory_gb: int
    memory_tb_per_s: float
    domain: int
    """GPUs that NVLink connects."""
    nvlink_gb_per_s: int
    network_gb_per_s: int
    is_blackwell: bool

    @property
    def memory_gib(self) -> float:
        """Memory in GiB."""
        return self.memory_gb * _GB / _GIB

    def link_gb_per_s(self, ranks: int) -> int:
        """Return the bandwidth of a link within a block of ``ranks`` consecutive ranks."""
        return self.nvlink_gb_per_s if ranks <= self.domain else self.network_gb_per_s


GPUS: Mapping[str, PlannedGpu] = MappingProxyType(
    {
        "h100": PlannedGpu(80, 3.35, 8, 450, 50, is_blackwell=False),
        "h200": PlannedGpu(141, 4.8, 8, 450, 50, is_blackwell=False),
        "b200": PlannedGpu(180, 8.0, 8, 900, 50, is_blackwell=True),
        "gb200": PlannedGpu(186, 8.0, 72, 900, 50, is_blackwell=True),
        "gb300": PlannedGpu(279, 8.0, 72, 900, 100, is_blackwell=True),
    }
)
"""Name of ``--gpu`` -> GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What a plan knows of the machine; None where nothing was given."""

    gpu: PlannedGpu | None = None
    memory_gib: float | None = None
    memory_tb_per_s: float | None = None
    bandwidth_gb_per_s: float | None = None
    """Bus bandwidth for every number of ranks, in place of the GPU's links."""

    @classmethod
    def of_options(cls, args: argparse.Namespace) -> "Hardware":
        """Return the GPU of ``--gpu``, with the numbers that other options replace."""
        gpu = GPUS[args.gpu] if args.gpu else None
        return cls(
            gpu=gpu,
            memory_gib=args.gpu_memory or (gpu.memory_gib if gpu else None),
            memory_tb_per_s=args.memory_bandwidth or (gpu.memory_tb_per_s if gpu else None),
            bandwidth_gb_per_s=args.bandwidth,
        )

    def link_gb_per_s(self, ranks: int) -> float | None:
        """Return the bandwidth of a link within a block of ``ranks`` consecutive ranks."""
        if self.bandwidth_gb_per_s is not None or self.gpu is None:
            return self.bandwidth_gb_per_s
        return self.gpu.link_gb_per_s(ranks)
