"""One rank of ``moe-optim bench step``: trains, and counts the bytes that its gathers receive."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_optim.megatron import pretrain

REPORT = "MOE_OPTIM_BENCH_REPORT"
"""Environment variable: the folder that rank 0 writes ``iteration bytes peak`` lines into."""


def main() -> int:
    """Train with the arguments of the command line."""
    report = Path(os.environ[REPORT])
    count = _count_gathered_bytes()

    from megatron.training import training

    stock = training.train_step
    iteration = 0

    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal iteration
        before = count["bytes"]
        result = stock(*args, **kwargs)
        iteration += 1
        if dist.get_rank() == 0:
            peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            with (report / "rank0.txt").open("a") as file:
                file.write(f"{iteration} {count['bytes'] - before} {peak}\n")
        return result

    training.train_step = train_step
    return pretrain.main()


def _count_gathered_bytes() -> dict[str, int]:
    """Count the bytes of every all-gather into one tensor; parameter gathers are such."""
    from megatron.core.distributed import param_and_grad_buffer as upstream

    count = {"bytes": 0}

    def counting(gather: Any) -> Any:
        def gather_and_count(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            count["bytes"] += output.numel() * output.element_size()
            return gather(output, *args, **kwargs)

        return gather_and_count

    upstream.dist_all_gather_func = counting(upstream.dist_all_gather_func)
    # Ours; Megatron has taken its own reference, so that nothing is counted twice.
    dist.all_gather_into_tensor = counting(dist.all_gather_into_tensor)
    return count


if __name__ == "__main__":
    sys.exit(main())
