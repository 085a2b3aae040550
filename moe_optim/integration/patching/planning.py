"""What follows from Megatron's flags before anything is built; imports Megatron where it has to."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import Any, NoReturn

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError


def ranks_multiple(args: argparse.Namespace) -> int:
    """Return what the number of ranks must be a multiple of, for parsed flags of Megatron."""
    dense = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    whole = expert_tensor * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    instances = args.num_distributed_optimizer_instances
    return lcm(dense * args.context_parallel_size, dense * instances, whole * instances)


def offload_of_flags(config: Any) -> float:
    """Return the part of masters and moments that ``--optimizer-cpu-offload`` keeps on the host.

    Args:
        config: Megatron's ``OptimizerConfig``, or what a plan knows of it. A fraction above 1 means
            all there is and one below 0 nothing, as to Megatron.
    """
    if not config.optimizer_cpu_offload:
        return 0.0
    return min(max(config.optimizer_offload_fraction, 0.0), 1.0)


def knobs_with_flags(knobs: MoEOptimConfig, config: Any) -> MoEOptimConfig:
    """Return the knobs, with what Megatron's own flags ask for among them.

    ``--optimizer-cpu-offload`` asks for ``offload_states``, which counts before the flag's fraction
    where both are given. With ``step: stock`` it is refused elsewhere.

    Args:
        knobs: as they were given.
        config: as of :func:`offload_of_flags`.
    """
    fraction = knobs.offload_states or offload_of_flags(config)
    return knobs if knobs.step == "stock" else replace(knobs, offload_states=fraction)


def has_masters_of_adam(config: Any, knobs: MoEOptimConfig, *, quantized: bool) -> bool:
    """Return whether Adam holds the masters of all weights, and the distributed optimizer none.

    With ``--use-precision-aware-optimizer`` it does, unless something else reads or writes them:
    what quantizes weights, a fused step that was asked for, states on the host.

    Args:
        config: Megatron's ``OptimizerConfig``.
        knobs: as they were given.
        quantized: whether some weights are.
    """
    if not config.use_precision_aware_optimizer:
        return False
    on_host = config.optimizer_cpu_offload or knobs.offload_states
    wanted = quantized or on_host or knobs.step == "fused"
    return not wanted or str(config.main_params_dtype) != "torch.float32"


def settings_of_stocks_step(config: Any, *, masters_of_adam: bool) -> dict[str, bool]:
    """Return what a fused step cannot take of an ``OptimizerConfig`` -> whether it has it.

    Args:
        config: Megatron's, or what a plan knows of it. Dtypes may be spelt, as torch spells them.
        masters_of_adam: whether Adam holds masters of its own.
    """
    exp_avg, exp_avg_sq = str(config.exp_avg_dtype), str(config.exp_avg_sq_dtype)
    return {
        "a loss scale, of --fp16 or --loss-scale": config.fp16 or config.loss_scale is not None,
        "masters that Adam holds (--main-params-dtype other than fp32, or "
        "--use-precision-aware-optimizer with bf16 weights)": masters_of_adam,
        f"moments in {exp_avg} and {exp_avg_sq}, of --exp-avg-dtype and --exp-avg-sq-dtype": (
            exp_avg != exp_avg_sq or exp_avg not in ("torch.float32", "torch.bfloat16")
        ),
    }


class FlagsParser(argparse.ArgumentParser):
    """Raises what argparse would end the process with."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"megatron_args: expected flags that Megatron takes, got: {message}.")


def parse_with_megatron(argv: Sequence[str]) -> argparse.Namespace:
    """Return what Megatron's parser makes of ``argv``, unvalidated; imports Megatron.

    Raises:
        ConfigError: a flag that Megatron does not have, or a value that it does not take.
    """
    from megatron.training.arguments import add_megatron_arguments

    parser: argparse.ArgumentParser = add_megatron_arguments(FlagsParser(allow_abbrev=False))
    try:
        return parser.parse_args(list(argv))
    except (AssertionError, SyntaxError, ArithmeticError) as error:  # Megatron evaluates values
        raise ConfigError(
            f"megatron_args: expected values that Megatron takes, got: {error}."
        ) from error
