"""Header of a measurement report."""

from typing import Any

from benchmarks.kernel_hash import hash_kernels, kernel_sources
from moe_optim.commands.console.provenance import describe_environment


def begin_report(command: str, *, on_gpu: bool, ranks: int = 1) -> dict[str, Any]:
    """Return the header of a measurement report.

    Args:
        command: command that repeats the measurement.
        on_gpu: whether the measurement runs on GPUs or on the CPU.
        ranks: number of measuring ranks, one per GPU.

    Returns:
        ``command``, ``commit``, ``device`` and ``versions``, for JSON; on GPUs also ``kernels``.
    """
    return {
        "command": command,
        **describe_environment(on_gpu=on_gpu, ranks=ranks),
        **kernels(on_gpu=on_gpu),
    }


def kernels(*, on_gpu: bool) -> dict[str, str]:
    """Return ``{"kernels": hash}`` on a GPU, else an empty dict."""
    return {"kernels": hash_kernels(kernel_sources())} if on_gpu else {}
