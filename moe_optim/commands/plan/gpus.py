"""GPUs that a plan knows: memory, memory bandwidth and links.

Memory is what ``nvidia-smi`` reports: for H100 and H200 on the machines of ``recipes/results``, for
B200 in NVIDIA/TensorRT-LLM issue 10278, for GB200 and GB300 in public listings of NVL72 nodes. The
rest is from NVIDIA's data sheets: H100 and H200 Tensor Core GPU (SXM), HGX B200, GB200 NVL72 and
GB300 NVL72. A link is one direction of NVLink within a domain, and one network port per GPU beyond
it: ConnectX-7, and ConnectX-8 on GB300.
"""

import argparse
from typing import NamedTuple

STEP = 4
"""Ratio of successive numbers of GPUs by default."""


class PlannedGpu(NamedTuple):
    """One kind of GPU."""

    memory_mib: int
    memory_tb_per_s: float
    domain: int
    """GPUs that NVLink connects."""
    nvlink_gb_per_s: int
    network_gb_per_s: int
    is_blackwell: bool

    @property
    def memory_gib(self) -> float:
        """Memory in GiB."""
        return self.memory_mib / 1024

    def link_gb_per_s(self, ranks: int) -> int:
        """Return the bandwidth of a link within a block of ``ranks`` consecutive ranks."""
        return self.nvlink_gb_per_s if ranks <= self.domain else self.network_gb_per_s


GPUS = {
    "h100": PlannedGpu(81559, 3.35, 8, 450, 50, is_blackwell=False),
    "h200": PlannedGpu(143771, 4.8, 8, 450, 50, is_blackwell=False),
    "b200": PlannedGpu(183359, 8.0, 8, 900, 50, is_blackwell=True),
    "gb200": PlannedGpu(189471, 8.0, 72, 900, 50, is_blackwell=True),
    "gb300": PlannedGpu(284208, 8.0, 72, 900, 100, is_blackwell=True),
}
"""Name of ``--gpu`` -> GPU."""


class Hardware(NamedTuple):
    """What a plan knows of the machine; None where nothing was given."""

    gpu: PlannedGpu | None = None
    memory_gib: float | None = None
    memory_tb_per_s: float | None = None
    bandwidth_gb_per_s: float | None = None
    """Bus bandwidth for every number of ranks, in place of the GPU's links."""

    @classmethod
    def of_options(cls, args: argparse.Namespace) -> "Hardware":
        """Return the GPU of ``--gpu``, with the numbers that other options replace."""
        gpu = GPUS.get(args.gpu)
        memory = args.gpu_memory or (gpu and gpu.memory_gib)
        tb_per_s = args.memory_bandwidth or (gpu and gpu.memory_tb_per_s)
        return cls(gpu, memory, tb_per_s, args.bandwidth)

    def link_gb_per_s(self, ranks: int) -> float | None:
        """Return the bandwidth of a link within a block of ``ranks`` consecutive ranks."""
        if self.bandwidth_gb_per_s is not None or self.gpu is None:
            return self.bandwidth_gb_per_s
        return self.gpu.link_gb_per_s(ranks)
