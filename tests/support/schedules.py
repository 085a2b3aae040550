"""Megatron's overlapped schedule, and what delays weight gradients, for this package's entry."""

from typing import Any


class _Planned:
    """A model that answers a call with the schedule of its layers instead of running them."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.build_schedule_plan(*args, **kwargs)


def let_entry_plan() -> None:
    """Let the entry's ``forward_step`` return a schedule plan where Megatron asks for one."""
    from moe_optim.megatron import pretrain

    forward_step = pretrain.forward_step

    def plan_or_step(batches: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        return forward_step(batches, _Planned(model) if return_schedule_plan else model)

    pretrain.forward_step = plan_or_step


def turn_on(setting: str) -> None:
    """Set a field of the transformer and the DDP configuration, behind Megatron's parser.

    It takes what delays weight gradients for layers of Transformer Engine only.
    """
    from megatron.training import argument_utils, arguments

    parse, configure = arguments.parse_and_validate_args, argument_utils.gpt_config_from_args

    def parse_and_set(*args: Any, **kwargs: Any) -> Any:
        parsed = parse(*args, **kwargs)
        setattr(parsed, setting, True)
        return parsed

    def configure_and_set(args: Any) -> Any:
        setattr(args, setting, False)  # checked again where the configuration is made
        made = configure(args)
        setattr(made.transformer, setting, True)
        setattr(args, setting, True)
        return made

    arguments.parse_and_validate_args = parse_and_set
    argument_utils.gpt_config_from_args = configure_and_set
