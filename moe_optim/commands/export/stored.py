"""Weights that files hold quantized for engines, found by their names, types and shapes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.commands.conversion.fp8_blocks import SCALE_DTYPES
from moe_optim.rollout.conventions import CONVENTIONS, Convention

_OF_ACTIVATIONS = ("input_scale", "input_global_scale")
"""What a calibration leaves beside a weight; engines take it for activations."""
_SCALES_OF_ANY = {name for one in CONVENTIONS for name in (one.scale, one.global_scale) if name}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeight:
    """One weight as a convention stores it."""

    shape: tuple[int, int]
    """[R, C] of its values."""
    nbytes: int
    """Of data and scales together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights:
    """All weights of a checkpoint that are quantized in one format."""

    conventions: tuple[Convention, ...]
    """All that store a weight so, at least one."""
    weights: Mapping[str, StoredWeight]
    """By name of the weight, which ends in ``.weight``."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of everything in the checkpoint, each quantized weight as one [R, C] and no scales."""
    faults: tuple[str, ...]
    """What of data or scales is missing, or does not fit the other."""

    @property
    def format(self) -> str:
        """As engines read it."""
        return self.conventions[0].format


def find_quantized(tensors: Mapping[str, TensorInfo]) -> StoredWeights | None:
    """Return what is quantized for engines, None where no weight is whole in any convention.

    Args:
        tensors: of a checkpoint, by name. Values are not needed.
    """
    found = [(one, dict(_whole(one, tensors))) for one in CONVENTIONS]
    most = max(len(weights) for _, weights in found)
    if not most:
        return None
    fitting = [(one, weights) for one, weights in found if len(weights) == most]
    convention, weights = fitting[0]
    same = tuple(one for one, _ in fitting if _form(one) == _form(convention))
    parts = {f"{name}.{part}" for name in _stems(weights) for part in _parts(convention)}
    faults = tuple(_faults(convention, tensors, parts))
    inputs = {f"{name}.{scale}" for name in _stems(weights) for scale in _OF_ACTIVATIONS}
    shapes = {
        name: info.shape
        for name, info in tensors.items()
        if name not in parts and name not in inputs and not name.endswith(_scales(convention))
    }
    shapes |= {name: weight.shape for name, weight in weights.items()}
    return StoredWeights(conventions=same, weights=weights, shapes=shapes, faults=faults)


def _form(convention: Convention) -> tuple[object, ...]:
    return convention.format, *_parts(convention)


def _parts(convention: Convention) -> list[str]:
    """Return the names of data and scales, the data first."""
    return [convention.data, convention.scale, *filter(None, [convention.global_scale])]


def _scales(convention: Convention) -> tuple[str, ...]:
    return tuple(f".{part}" for part in _parts(convention)[1:])


def _stems(weights: Mapping[str, object]) -> Iterator[str]:
    return (name.removesuffix(".weight") for name in weights)


def _whole(
    convention: Convention, tensors: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, StoredWeight]]:
    """Yield each weight whose data and scales are there, and of the types and shapes they need."""
    end = f".{convention.data}"
    for name, data in tensors.items():
        if not name.endswith(end) or data.dtype != convention.data_dtype or len(data.shape) != 2:
            continue
        stem, shape = name.removesuffix(end), _shape_of(convention, data)
        scales = [tensors.get(stem + part) for part in _scales(convention)]
        allowed = _allowed_scales(convention, shape)
        if all(one in fitting for one, fitting in zip(scales, allowed, strict=True)):
            nbytes = data.nbytes + sum(one.nbytes for one in scales if one is not None)
            yield f"{stem}.weight", StoredWeight(shape=shape, nbytes=nbytes)


def _shape_of(convention: Convention, data: TensorInfo) -> tuple[int, int]:
    rows, columns = data.shape
    return rows, columns * (2 if convention.format == "nvfp4" else 1)


def _allowed_scales(convention: Convention, shape: tuple[int, int]) -> list[list[TensorInfo]]:
    """Return what each scale of a weight may be, as the convention has it first."""
    blocks = tuple(-(-n // size) for n, size in zip(shape, convention.scale_block, strict=True))
    dtypes = SCALE_DTYPES if convention.format == "fp8_block" else (convention.scale_dtype,)
    allowed = [[TensorInfo(blocks, dtype) for dtype in dtypes]]
    if convention.global_scale is not None:
        allowed.append([TensorInfo((1,) if convention.divides else (), torch.float32)])
    return allowed


def _is_otherwise(convention: Convention, tensors: Mapping[str, TensorInfo], stem: str) -> bool:
    """Return whether a weight is quantized, but in another format than the convention's."""
    data = [tensors.get(f"{stem}.{name}") for name in {one.data for one in CONVENTIONS}]
    kinds = {one.dtype for one in data if one is not None and one.dtype.itemsize == 1}
    scales = {name for name in _SCALES_OF_ANY if f"{stem}.{name}" in tensors}
    if kinds and convention.data_dtype not in kinds:
        return True
    if kinds and scales and not scales & {convention.scale, convention.global_scale}:
        return True
    scale, weight = tensors.get(f"{stem}.weight_scale"), tensors.get(f"{stem}.weight")
    if scale is None or weight is None or weight.dtype != torch.float8_e4m3fn:
        return False
    return scale.shape in ((), (1,), (*weight.shape[:1], 1))  # of a tensor, or of its rows


def _faults(
    convention: Convention, tensors: Mapping[str, TensorInfo], whole: set[str]
) -> Iterator[str]:
    """Say of each weight that is not whole what is wrong with it."""
    ends = tuple(f".{part}" for part in _parts(convention))
    stems = {
        name.rpartition(".")[0]
        for name, info in tensors.items()
        if name not in whole
        and name.endswith(ends)
        and (name.endswith(ends[1:]) or info.dtype == convention.data_dtype)
    }
    for stem in sorted(stem for stem in stems if not _is_otherwise(convention, tensors, stem)):
        data = tensors.get(stem + ends[0])
        if data is None or data.dtype != convention.data_dtype or len(data.shape) != 2:
            dtype = str(convention.data_dtype).removeprefix("torch.")
            yield f"{stem}{ends[0]}: expected {dtype} [R, C] beside its scales, got {_spell(data)}"
            continue
        allowed = _allowed_scales(convention, _shape_of(convention, data))
        for end, fitting in zip(ends[1:], allowed, strict=True):
            if (scale := tensors.get(stem + end)) not in fitting:
                said = f"expected {_spell(fitting[0])} for {_spell(data)}, got {_spell(scale)}"
                yield f"{stem}{end}: {said}"


def _spell(info: TensorInfo | None) -> str:
    if info is None:
        return "nothing"
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"
