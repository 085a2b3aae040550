"""The five ways in which moe_optim refuses to go on.

Messages follow one pattern: *where: what was expected, got what. What to change.*
"""


class MoEOptimError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(MoEOptimError, ValueError):
    """What the user wrote cannot be honoured: a recipe, a flag, a combination of flags."""


class LayoutError(MoEOptimError, ValueError):
    """Tensors, state-dict keys or checkpoints do not have the promised shape or names."""


class PatchError(MoEOptimError, RuntimeError):
    """Megatron, Transformer Engine or torch is not what a replacement was written for."""


class StateError(MoEOptimError, RuntimeError):
    """A storage was asked for what it does not hold, or an event came out of order."""


class NonFiniteError(MoEOptimError, ArithmeticError):
    """A gradient or a master weight is Inf or NaN."""
