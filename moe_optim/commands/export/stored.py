"""Finds weights in safetensors that are already quantized, by name, dtype and shape."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.rollout.conventions import CONVENTIONS, Convention

Tensors = Mapping[str, TensorInfo]
_OF_ACTIVATIONS = ("input_scale", "input_global_scale")
"""Suffixes of activation scales that a calibration stores beside a weight."""
_SCALES_OF_ANY = {name for one in CONVENTIONS for name in one.suffixes[1:]}
_CODES = {one.data_dtype for one in CONVENTIONS}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeight:
    """One quantized weight in a convention."""

    shape: tuple[int, int]  # [R, C] of the dequantized values
    nbytes: int  # bytes of data and scales together


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights:
    """All quantized weights of a checkpoint, in one format."""

    conventions: tuple[Convention, ...]  # all conventions that match, at least one
    weights: Mapping[str, StoredWeight]  # name, ending in .weight -> weight
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all tensors: each quantized weight as one [R, C], scales omitted."""
    faults: tuple[str, ...]  # data and scales that are missing or inconsistent

    @property
    def format(self) -> str:
        """Name of the format in engines."""
        return self.conventions[0].format


def find_quantized(tensors: Tensors) -> StoredWeights | None:
    """Return the quantized weights, or None if no weight is complete in any convention."""
    found = [(one, dict(_whole(one, tensors))) for one in CONVENTIONS]
    most = max(len(weights) for _, weights in found)
    if not most:
        return None
    fitting = [(one, weights) for one, weights in found if len(weights) == most]
    convention, weights = fitting[0]
    kind = convention.format, *_suffixes(convention)
    stems = [name.removesuffix(".weight") for name in weights]
    parts = {stem + suffix for stem in stems for suffix in _suffixes(convention)}
    hidden = parts | {f"{stem}.{scale}" for stem in stems for scale in _OF_ACTIVATIONS}
    scales = tuple(_suffixes(convention)[1:])
    shapes = {
        name: info.shape
        for name, info in tensors.items()
        if name not in hidden and not name.endswith(scales)
    }
    return StoredWeights(
        conventions=tuple(one for one, _ in fitting if (one.format, *_suffixes(one)) == kind),
        weights=weights,
        shapes=shapes | {name: weight.shape for name, weight in weights.items()},
        faults=tuple(_faults(convention, tensors, parts)),
    )


def _suffixes(convention: Convention) -> list[str]:
    return [f".{name}" for name in convention.suffixes]


def _whole(convention: Convention, tensors: Tensors) -> Iterator[tuple[str, StoredWeight]]:
    end, *ends = _suffixes(convention)
    for name, data in tensors.items():
        if not name.endswith(end) or data.dtype != convention.data_dtype or len(data.shape) != 2:
            continue
        stem, shape = name.removesuffix(end), _shape_of(convention, data)
        scales = [tensors.get(stem + end) for end in ends]
        allowed = _allowed_scales(convention, shape)
        if all(one in fitting for one, fitting in zip(scales, allowed, strict=True)):
            nbytes = data.nbytes + sum(one.nbytes for one in scales if one is not None)
            yield f"{stem}.weight", StoredWeight(shape=shape, nbytes=nbytes)


def _shape_of(convention: Convention, data: TensorInfo) -> tuple[int, int]:
    rows, columns = data.shape
    return rows, columns * convention.elements


def _allowed_scales(convention: Convention, shape: tuple[int, int]) -> list[list[TensorInfo]]:
    """Return the accepted forms of each suffix but data, the convention's own first."""
    blocks = tuple(-(-n // size) for n, size in zip(shape, convention.scale_block, strict=True))
    allowed = [[TensorInfo(blocks, dtype) for dtype in convention.scale_dtypes]]
    if convention.global_scale is not None:
        allowed.append([TensorInfo((1,) if convention.divides else (), torch.float32)])
    if convention.shape is not None:
        allowed.append([TensorInfo((2,), dtype) for dtype in (torch.int64, torch.int32)])
    return allowed


def _is_otherwise(convention: Convention, tensors: Tensors, stem: str) -> bool:
    data = [tensors.get(f"{stem}.{name}") for name in {one.data for one in CONVENTIONS}]
    kinds = {one.dtype for one in data if one is not None and one.dtype in _CODES}
    scales = {name for name in _SCALES_OF_ANY if f"{stem}.{name}" in tensors}
    if kinds and convention.data_dtype not in kinds:
        return True
    if kinds and scales and not scales & set(convention.suffixes):
        return True
    scale, weight = tensors.get(f"{stem}.weight_scale"), tensors.get(f"{stem}.weight")
    if scale is None or weight is None or weight.dtype != torch.float8_e4m3fn:
        return False
    return scale.shape in ((), (1,), (*weight.shape[:1], 1))  # per tensor, or per row


def _faults(convention: Convention, tensors: Tensors, whole: set[str]) -> Iterator[str]:
    end, *ends = _suffixes(convention)
    stems = {
        name.rpartition(".")[0]
        for name, info in tensors.items()
        if name not in whole
        and (
            name.endswith(tuple(ends))
            or (name.endswith(end) and info.dtype == convention.data_dtype)
        )
    }
    for stem in sorted(stem for stem in stems if not _is_otherwise(convention, tensors, stem)):
        data = tensors.get(stem + end)
        if data is None or data.dtype != convention.data_dtype or len(data.shape) != 2:
            dtype = str(convention.data_dtype).removeprefix("torch.")
            yield f"{stem}{end}: expected {dtype} [R, C] beside its scales, got {_spell(data)}"
            continue
        allowed = _allowed_scales(convention, _shape_of(convention, data))
        for suffix, fitting in zip(ends, allowed, strict=True):
            if (scale := tensors.get(stem + suffix)) not in fitting:
                said = f"expected {_spell(fitting[0])} for {_spell(data)}, got {_spell(scale)}"
                yield f"{stem}{suffix}: {said}"


def _spell(info: TensorInfo | None) -> str:
    if info is None:
        return "nothing"
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"
