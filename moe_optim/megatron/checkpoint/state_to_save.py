"""What has to be communicated before the training loop walks the keys of what it saves."""

from typing import Any

from moe_optim.megatron.experts.amax import synchronize_amax
from moe_optim.megatron.patching.engine import original


def generate_state_dict(  # noqa: PLR0913  # Megatron's
    args: Any,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    rng_state: Any,
    iteration: int | None = None,
    optim_sd_kwargs: dict[str, Any] | None = None,
    model_sd_kwargs: dict[str, Any] | None = None,
    rerun_state: Any = None,
) -> Any:
    """Return the state to save or to load into; arguments and result are Megatron's.

    Every rank must call it.
    """
    synchronize_amax(model)
    return original("megatron.training.checkpointing:generate_state_dict")(
        args,
        model,
        optimizer,
        opt_param_scheduler,
        rng_state,
        iteration,
        optim_sd_kwargs,
        model_sd_kwargs,
        rerun_state,
    )
