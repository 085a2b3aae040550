"""Experts that load as the portable ones do, without Megatron and without ranks."""

from types import SimpleNamespace
from typing import Any

import torch

from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.loading import load_local_experts
from moe_optim.formats import BlockScaledFormat
from tests.support.bytes import assert_bytes_equal

LOCAL, FFN, HIDDEN = 2, 4, 3
"""Experts on a rank, their width, and the hidden size, unless a test says otherwise."""


class Experts(torch.nn.Module):
    """Two grouped linears of zeros, with process groups that are only numbers."""

    def __init__(
        self,
        layout: str = "grouped",
        *,
        format: BlockScaledFormat | None = None,
        ep: tuple[int, int] = (0, 1),
        bias: bool = False,
        ffn: int = FFN,
        hidden: int = HIDDEN,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"format": format, "expert_layout": layout, "bias": bias}
        self.linear_fc1 = GroupedLinear(LOCAL, 2 * ffn, hidden, **options)
        self.linear_fc2 = GroupedLinear(LOCAL, hidden, ffn, **options)
        groups = {"ep": ep, "expt_tp": (0, 1)}
        self.pg_collection = SimpleNamespace(
            **{
                name: SimpleNamespace(rank=lambda r=rank: r, size=lambda s=size: s)
                for name, (rank, size) in groups.items()
            }
        )
        self.config = SimpleNamespace(moe_mlp_glu_interleave_size=None)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.zeros(parameter.shape))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        load_local_experts(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Fail unless both have the same keys, in any order, and the same bytes under each."""
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert_bytes_equal(got[key], value, what=key)
