"""What Transformer Engine's weights and quantizers say of their bytes, and no format here means."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_optim.errors import StateError
from moe_optim.formats import BlockScaledFormat

_DTYPES = {"e4m3": "kFloat8E4M3", "e2m1": "kFloat4E2M1"}
_FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"


@dataclass(frozen=True, slots=True)
class _Properties:
    """The fields of a weight and of its quantizer, which may differ: both are asked."""

    weight: Any
    quantizer: Any

    def values(self, field: str) -> list[Any]:
        """Return what is said of a property, nothing where neither has it."""
        weight, quantizer = self.weight, self.quantizer
        places = ((weight, f"_{field}"), (weight, field), (quantizer, field))
        values = [getattr(place, called, None) for place, called in places]
        return [value for value in values if value is not None]

    def other_than(self, field: str, *known: Any) -> Any:
        """Return a value of a property that is none of the known ones, None where there is none."""
        return next((value for value in self.values(field) if value not in known), None)

    @property
    def element(self) -> str | None:
        """The name of an element's dtype that is neither E4M3 nor E2M1."""
        dtypes = [*self.values("fp8_dtype"), *self.values("fp4_dtype")]
        dtypes += [getattr(self.quantizer, "dtype", None)]
        names = [getattr(dtype, "name", None) for dtype in dtypes]
        return next((name for name in names if name not in (None, *_DTYPES.values())), None)

    def are_square(self, format: BlockScaledFormat) -> set[bool]:
        """Return what is said of the blocks."""
        said = {*self.values("is_2D_scaled"), *self.values("with_2d_quantization")}
        said |= {dimensions == 2 for dimensions in self.values("block_scaling_dim")}
        if not said and format.name == "mxfp8_2d":
            return {self.quantizer is None}  # MXFP8 of Transformer Engine 2.18 has rows alone
        return said


def foreign_element(weight: Any) -> str | None:
    """Return what the elements of a weight are where it is neither E4M3 nor E2M1: E5M2."""
    return _properties_of(weight).element


def refuse_foreign_bytes(weight: Any, formats: Sequence[BlockScaledFormat], name: str) -> None:
    """Raise where a weight is quantized in another way than its format, or would be from now on.

    Directions are no matter: Transformer Engine asks for them as it needs them, and weights here
    have both. Neither is the order of scales, which changes.

    Args:
        weight: quantized, a ``GroupedTensor`` or a tensor [R, C].
        formats: what it may be in; of one kind of elements.
        name: of the weight, for errors.

    Raises:
        StateError: everything that makes it another, by its name.
    """
    own = _properties_of(weight)
    epsilon, length = own.other_than("amax_epsilon", 0.0), own.other_than("block_len", 128)
    largest = own.other_than("nvfp4_e4m3_max", 448)
    squares = own.are_square(formats[0])
    problems = {
        f"elements of {own.element}": own.element is not None,
        "blocks of one row (1-D)": all(one.is_2d for one in formats) and False in squares,
        "square blocks (2-D)": not any(one.is_2d for one in formats) and True in squares,
        f"blocks of {length}": length is not None,
        f"scales that are no powers of two (force_pow_2_scales=False: unset {_FP32_SCALES})": (
            False in own.values("force_pow_2_scales")
        ),
        f"an amax of {epsilon} at least (amax_epsilon)": epsilon is not None,
        "stochastic rounding": True in own.values("stochastic_rounding"),
        "a Hadamard transform": True in own.values("with_rht"),
        "an amax of several ranks (with_amax_reduction)": True in own.values("with_amax_reduction"),
        "an amax a row": True in own.values("row_scaled_nvfp4"),
        "four-over-six blocks": True in own.values("nvfp4_use_4over6"),
        f"block scales up to {largest}": largest is not None,
    }
    found = [what for what, is_so in problems.items() if is_so]
    if found:
        raise StateError(
            f"{name} {list(weight.shape)}: expected {' or '.join(one.name for one in formats)} as "
            f"Transformer Engine's default recipe makes it, got {', '.join(found)}. Build the "
            "model with moe_optim installed and that recipe, or train these weights with stock: "
            "drop --fp8-param-gather or --fp4-param-gather, or --use-moe-grouped-optim."
        )


def _properties_of(weight: Any) -> _Properties:
    quantizer = getattr(weight, "quantizer", None) or getattr(weight, "_quantizer", None)
    return _Properties(weight, quantizer)
