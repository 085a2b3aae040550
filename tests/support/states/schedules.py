"""Settings that Megatron's parser refuses for layers that are not Transformer Engine's."""

from typing import Any


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
