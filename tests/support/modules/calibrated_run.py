"""A run on one rank whose experts are calibrated before the first step and after the last.

``torchrun --nproc-per-node 1 -m tests.support.modules.calibrated_run FILE FORMAT [FLAGS]`` writes
to FILE what :func:`moe_optim.calibrate` has found each time, and what plain torch finds. On a GPU
if there is one.
"""

import shlex
import sys
from typing import Any

import torch

from moe_optim.config import MoEOptimConfig
from tests.support.modules.amax import amax_of
from tests.support.training import pretrain

RUN = shlex.split("--train-iters 2 --eval-iters 0 --eval-interval 1000000 --seq-length 128")
RUN += shlex.split("--max-position-embeddings 128 --hidden-size 256 --ffn-hidden-size 256")
RUN += shlex.split(
    "--moe-ffn-hidden-size 256 --overlap-grad-reduce --overlap-param-gather --lr 0.1"
)
Amaxes = dict[str, torch.Tensor]


def _values(weight: Any) -> torch.Tensor:
    """Return what a weight dequantizes to by the code of its own class."""
    if hasattr(weight, "quantized_storage") or type(weight) is not torch.nn.Parameter:
        return weight.dequantize()
    return weight


def _oracle(chunks: list[Any]) -> Amaxes:
    """Return the amaxes of experts' weights by linear, in plain torch on the CPU."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, weight in chunks[0].named_parameters():
        linear, _, leaf = name.rpartition(".")
        if ".experts." in name and leaf.startswith("weight"):
            values = _values(weight).detach().cpu()
            parts.setdefault(linear, []).append(values if values.dim() == 3 else values[None])
    return {linear: amax_of(torch.cat(values)).view(-1, 1, 1) for linear, values in parts.items()}


def _found(chunks: list[Any]) -> Amaxes:
    import moe_optim

    moe_optim.calibrate(chunks)
    amaxes = {name: moe_optim.calibrated_amax(m) for name, m in chunks[0].named_modules()}
    parameter = next(chunks[0].parameters())
    assert all(amax.device == parameter.device for amax in amaxes.values() if amax is not None)
    return {name: amax.cpu() for name, amax in amaxes.items() if amax is not None}


def main(file: str, format: str, *flags: str) -> None:
    """Train, and write pairs of what is found and what plain torch finds."""
    pairs = []

    def compare(chunks: list[Any], _: Any) -> None:
        pairs.append((_found(chunks), _oracle(chunks)))

    config = MoEOptimConfig(format=format)
    pretrain([*RUN, *flags], config, after_setup=compare, observe=compare)
    torch.save((torch.cuda.get_device_name(), pairs), file)


if __name__ == "__main__":
    main(*sys.argv[1:])
