"""Transformer Engine's parts of a step as Megatron calls them, as a reference for the fused one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.te.cast import MasterCast
from moe_optim.errors import PatchError
from moe_optim.formats.reference.adam import Hyper
from moe_optim.kernels.adam_state import AdamState


class Step:
    """Gradient scaling, FusedAdam and the cast of masters, in sequence.

    Masters and moments are copies, made before either side steps.

    Args:
        states: states that the fused step updates.
        hyper: hyperparameters of both sides.
        clip: factor of the gradients.
        cast: cast of the masters of ``states``, redirected to the copies.
    """

    def __init__(
        self, states: Sequence[AdamState], hyper: Hyper, clip: float, cast: MasterCast
    ) -> None:
        import transformer_engine_torch as tex
        from transformer_engine.pytorch.optimizers import FusedAdam, multi_tensor_applier

        self._states, self._clip, self._cast = states, clip, cast
        self._masters = [torch.nn.Parameter(state.master.clone()) for state in states]
        for master, state in zip(self._masters, states, strict=True):
            master.grad = torch.empty_like(state.gradient)
        self._gradients = [[state.gradient for state in states], [m.grad for m in self._masters]]
        self._overflow = torch.zeros(1, dtype=torch.int, device=states[0].master.device)
        self._apply, self._scale = multi_tensor_applier, tex.multi_tensor_scale
        dtype = states[0].exp_avg.dtype
        self._adam = FusedAdam(
            self._masters,
            lr=hyper.lr,
            betas=hyper.betas,
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            exp_avg_dtype=dtype,
            exp_avg_sq_dtype=dtype,
        )
        cast.read(self._masters)

    def run(self) -> None:
        """Scale gradients into separate memory, perform a first step, and cast."""
        for group in self._adam.param_groups:
            group["step"] = 0
        self._apply(self._scale, self._overflow, self._gradients, self._clip)
        self._adam.step()
        self._cast.quantize()

    def check(self) -> None:
        """Compare masters, moments and bytes after equally many steps on both sides.

        Raises:
            PatchError: values differ.
        """
        for master, state in zip(self._masters, self._states, strict=True):
            theirs = self._adam.state[master]
            pairs: dict[str, tuple[Tensor, Tensor]] = {
                "master": (state.master, master.data),
                "exp_avg": (state.exp_avg, theirs["exp_avg"]),
                "exp_avg_sq": (state.exp_avg_sq, theirs["exp_avg_sq"]),
            }
            for name, (mine, other) in pairs.items():
                if not torch.equal(mine.view(torch.uint8), other.view(torch.uint8)):
                    raise PatchError(
                        f"{state.parameter}: expected the {name} of Transformer Engine's "
                        "FusedAdam, got other bits. Give step: stock, and report this."
                    )
        self._cast.check_bytes(derived=False)


def norm_of(gradients: Sequence[Tensor]) -> Callable[[], object]:
    """Return a function that computes the fp32 gradient norm like Megatron."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.optimizers import multi_tensor_applier

    overflow = torch.zeros(1, dtype=torch.int, device=gradients[0].device)
    lists = [list(gradients)]
    return lambda: multi_tensor_applier(tex.multi_tensor_l2norm, overflow, lists, False)
