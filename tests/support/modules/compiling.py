"""Compiled functions whose graphs are counted: what was not compiled proves nothing."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import BlockScaledFormat
from tests.support.inputs import wide_range_weights


def enable_compiler() -> None:
    """Let this process compile, from a clean slate, whatever its environment says.

    A process that installs the CPU runtime calls it before, when torch looks for a GPU once and for
    all, and after, since the runtime switches compiling off.
    """
    import torch._dynamo
    from torch.utils._triton import has_triton

    has_triton()
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    torch._dynamo.config.disable = False
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Let this process compile inside of the context, and leave it as it was, without graphs."""
    import torch._dynamo

    with mock.patch.dict(os.environ), torch._dynamo.config.patch(disable=False):
        enable_compiler()
        yield
        torch._dynamo.reset()


@dataclass
class Compiled:
    """A function that is compiled as one graph, ``aot_eager`` unless said otherwise."""

    function: Callable[..., Any]
    backend: str = "aot_eager"
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        """Wrap the function; it is compiled when first called."""
        from torch._dynamo.testing import CompileCounterWithBackend

        self._counter = CompileCounterWithBackend(self.backend)
        self._compiled = torch.compile(
            self.function, fullgraph=True, backend=self._counter, dynamic=self.dynamic
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self._compiled(*args, **kwargs)

    @property
    def graphs(self) -> int:
        """How many graphs have been compiled."""
        return int(self._counter.frame_count)


def make_linear(
    format: BlockScaledFormat | None,
    layout: str = "grouped",
    *,
    compute: BlockScaledFormat | None = None,
    fuse: bool = True,
    seed: int = 0,
    shape: tuple[int, int, int] = (3, 64, 32),
    device: str = "cpu",
    delay_wgrad: bool = False,
) -> GroupedLinear:
    """Return a linear whose rowwise and columnwise copies differ where the format has two."""
    linear = GroupedLinear(
        *shape,
        format=format,
        compute=compute,
        expert_layout="grouped" if layout == "grouped" else "indexed",
        fuse_wgrad_accumulation=fuse,
        delay_wgrad=delay_wgrad,
        name="experts.linear_fc1",
        device=device,
    )
    rewrite(linear, seed)
    return linear


def rewrite(linear: GroupedLinear, seed: int) -> None:
    """Give a linear other weights, as the end of a step does."""
    values = wide_range_weights(*linear.shape, seed=seed, exponents=(-8, 8)).bfloat16()
    linear.load_values(values.to(linear.weights()[0].device))


def make_tokens(
    linear: GroupedLinear, counts: Sequence[int], seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [T, C] bf16 activations that want a gradient, and where each expert's tokens end."""
    device = linear.weights()[0].device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(sum(counts), linear.shape[2], generator=generator).bfloat16().to(device)
    return tokens.requires_grad_(), torch.tensor(counts).cumsum(0).to(device, torch.int32)


def run_passes(
    call: Callable[..., torch.Tensor],
    linear: GroupedLinear,
    counts: Sequence[int] = (5, 8, 3),
    seed: int = 1,
) -> dict[str, torch.Tensor]:
    """Return what a forward and a backward pass give: output, dgrad, and wgrads by weight."""
    tokens, ends = make_tokens(linear, counts, seed)
    output = call(tokens, ends)
    output.backward(output.detach().flip(0) * 0.5)
    found = {"output": output.detach(), "dgrad": tokens.grad}
    for index, weight in enumerate(linear.weights()):
        found[f"wgrad {index}"], weight.grad = weight.grad, None
    return found
