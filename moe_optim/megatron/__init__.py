"""Everything that knows Megatron or Transformer Engine; the rest of the package does not."""

from typing import TYPE_CHECKING, Any

from moe_optim.megatron.installation import install, uninstall

if TYPE_CHECKING:
    from moe_optim.megatron.optimizer.factory import get_megatron_optimizer

__all__ = ["get_megatron_optimizer", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    """Import Megatron only when its optimizer is asked for."""
    if name == "get_megatron_optimizer":
        from moe_optim.megatron.optimizer.factory import get_megatron_optimizer

        return get_megatron_optimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
