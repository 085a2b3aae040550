"""An attention of any width of heads, which Megatron's local layers lack."""

import math
from typing import Any

import torch


def replace_core_attention() -> None:
    """Let latent attention run in local layers: Megatron's own has no such widths."""
    from megatron.core.models.backends import LocalSpecProvider

    LocalSpecProvider.core_attention = lambda self: CausalAttention


class CausalAttention(torch.nn.Module):
    """softmax(q k^T * scale) v of every head, each of any width. It has no parameters."""

    def __init__(
        self,
        config: Any,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or 1 / math.sqrt(k_channels or config.kv_channels)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return [S, B, heads * width of v]; query and key are [S, B, heads, width], value too."""
        groups = query.shape[2] // key.shape[2]
        key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * self.scale
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        shares = scores.float().masked_fill(later, -torch.inf).softmax(-1).to(value.dtype)
        return torch.einsum("bhst,tbhd->sbhd", shares, value).flatten(2)
