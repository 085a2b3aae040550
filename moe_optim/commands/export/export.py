"""Exports a checkpoint with quantized experts."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_optim import ops
from moe_optim.checkpoint.files.reader import CheckpointReader, Recorded, is_state
from moe_optim.checkpoint.state_manifest import MASTERS
from moe_optim.commands.conversion.expert_finding import (
    check_row_order,
    find_experts,
    known_interleave,
    refuse_quantized,
    require_experts,
    without_experts,
)
from moe_optim.commands.conversion.file_plan import FilePlan, Part, by_layer, kept_parts
from moe_optim.commands.conversion.layer_view import STATE_KIND, LayerView, state_kind, stored_key
from moe_optim.commands.conversion.model_conversion import ModelRequest, plan_model
from moe_optim.commands.conversion.model_sources import (
    CONFIG,
    QUANTIZATION,
    folder_of,
    read_config,
    read_tokenizer,
    special_tokens,
    spell_config,
)
from moe_optim.commands.export.engine_config import quantization_config
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.experts.keys.conversion import convert_expert_set, interleave_faults
from moe_optim.experts.keys.finding import refuse_keys
from moe_optim.experts.keys.layouts import (
    CALIBRATED_INPUT_AMAX,
    LINEARS,
    ExpertSet,
    KeyLayout,
    KeyPattern,
    get_layout,
)
from moe_optim.formats import FORMATS, BlockScaledFormat, QuantizedWeight
from moe_optim.rollout.conventions import Convention, find_convention
from moe_optim.rollout.expert_tensors import export_experts, patterns_of, split_rows, tensor_name
from moe_optim.rollout.exported_as import require_input_amax, require_input_scale

_GROUPED, _TARGET = get_layout("grouped"), get_layout("hf_per_expert")


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """Options of an export; None derives the value from the checkpoint."""

    format: BlockScaledFormat
    convention: Convention
    source_layout: KeyLayout | None = None
    source_glu_interleave: int | None = None
    tokenizer: Path | None = None  # folder of tokenizer files to copy
    has_input_scales: bool = False  # whether the scale of its inputs is written with each weight


@dataclass(frozen=True, kw_only=True)
class ExportPlan(FilePlan):
    """Experts of all layers, from masters if every expert has one, and all other tensors."""

    request: ExportRequest
    config: Mapping[str, Any]  # config.json of the model, without quantization_config

    @property
    def _recorded(self) -> Recorded:
        return Recorded(iteration=self.view.recorded.iteration)

    def _texts(self) -> dict[str, bytes]:
        request, tokenizer = self.request, self.request.tokenizer
        files = read_tokenizer(tokenizer, beside=folder_of(self.view.reader))
        tokens = special_tokens(tokenizer)
        said = {name: one for name, one in tokens.items() if one is not None}
        of_engine = quantization_config(
            request.convention, self.unquantized, has_input_scales=request.has_input_scales
        )
        return files | spell_config({**tokens, **self.config, **said, QUANTIZATION: of_engine})

    @property
    def reads_masters(self) -> bool:
        """Whether experts are quantized from masters, as in training."""
        return all(state_kind(part.sources[0]) in MASTERS for part in self.experts)

    @property
    def unquantized(self) -> list[str]:
        """Sorted paths of the linears that stay in high precision."""
        named = [
            (name, self.view.tensors[part.sources[0]])
            for part in self.others
            for name in part.targets or part.sources
        ]
        return sorted(
            name.removesuffix(".weight")
            for name, info in named
            if name.endswith(".weight") and len(info.shape) == 2 and "embed_tokens" not in name
        )


def plan_export(
    reader: CheckpointReader, request: ExportRequest, config: Path | None = None
) -> ExportPlan:
    """Return the plan without reading tensor values, except amaxes of inputs.

    Megatron tensors are renamed according to the arguments saved in the checkpoint; safetensors
    must already have Hugging Face names. ``config`` None means the ``config.json`` of the
    checkpoint. ConfigError without any configuration or name, or for a request that contradicts the
    checkpoint; LayoutError for experts that are incomplete or do not fit the format.
    """
    if config is not None and config.name != CONFIG:
        raise ConfigError(
            f"--config {config}: expected a file called {CONFIG}, got {config.name}. Give that of "
            "the model."
        )
    described = None if config is None else read_config(config.parent)
    others: Sequence[Part]
    if reader.format == "torch_dist":
        asked = ModelRequest(to="hf", source_glu_interleave=request.source_glu_interleave)
        model = plan_model(reader, asked)
        view, others = model.view, model.others
        weights = {part.targets[0]: part.experts for part in model.experts if part.experts}
        found = {"torch_dtype": "bfloat16", **model.model.config}
    else:
        view = LayerView(reader)
        weights, others = _find_in_safetensors(view, request)
        found = read_config(folder_of(reader)) if described is None else {}
    interleave = known_interleave(view, request.source_glu_interleave)
    check_row_order(view, interleave)
    stored = _masters_of(view, request, weights) or weights
    _require_fits(stored.values(), request, interleave, reader.path)
    amaxes = _input_amaxes(view, request, weights)
    quantize = partial(_quantize, request=request, rows=interleave, path=reader.path)
    experts = [
        Part(
            sources=one.keys,
            nbytes=view.nbytes(one.keys),
            experts=one,
            convert_experts=partial(
                quantize, experts=one, target=target, input_amaxes=amaxes[target]
            ),
        )
        for target, one in stored.items()
    ]
    return ExportPlan(
        view=view,
        files=by_layer(experts, others),
        request=request,
        config=found if described is None else described,
    )


def _find_in_safetensors(
    view: LayerView, request: ExportRequest
) -> tuple[dict[str, ExpertSet], Sequence[Part]]:
    keys = [key for key in view.tensors if not is_state(key)]
    refuse_quantized(view, keys)
    sets = find_experts(view, keys, layout=request.source_layout)
    require_experts(view, sets, len(keys))
    if named := [one.prefix for one in sets if one.prefix.startswith("decoder.")]:
        raise ConfigError(
            f"{view.reader.path}: expected names of Hugging Face, which engines load, got "
            f"Megatron's {named[0]}*. Export the torch_dist checkpoint."
        )
    return {one.prefix: one for one in sets}, kept_parts(view, without_experts(keys, sets))


def _masters_of(
    view: LayerView, request: ExportRequest, weights: Mapping[str, ExpertSet]
) -> dict[str, ExpertSet] | None:
    """Return the masters of ``weights``, by the same keys; None if any are not stored by name."""
    keys = [key for key in view.tensors if state_kind(key) in MASTERS and STATE_KIND.match(key)]
    sets = find_experts(view, keys, layout=request.source_layout)
    masters = {STATE_KIND.sub("", one.prefix, count=1): one for one in sets}
    if any(one.prefix not in masters for one in weights.values()):
        return None
    return {target: masters[one.prefix] for target, one in weights.items()}


def _input_amaxes(
    view: LayerView, request: ExportRequest, weights: Mapping[str, ExpertSet]
) -> dict[str, dict[str, float]]:
    """Return the amax of the inputs of each linear, by the keys of ``weights``; empty if unused."""
    found: dict[str, dict[str, float]] = {target: {} for target in weights}
    if not request.has_input_scales:
        return found
    require_input_scale("--input-scales", request.convention)
    for target, one in weights.items():
        for linear in LINEARS:
            key = stored_key(f"{one.prefix}{linear}.{CALIBRATED_INPUT_AMAX}")
            amax = view.read(key).item() if key in view.tensors else None
            require_input_amax(f"--input-scales: {view.reader.path}: {key}", amax)
            found[target][linear] = float(amax or 0)
    return found


def _quantize(
    tensors: Mapping[str, Tensor],
    numbers: range,
    experts: ExpertSet,
    target: str,
    request: ExportRequest,
    rows: int,
    path: Path,
    input_amaxes: Mapping[str, float],
) -> dict[str, Tensor]:
    """Return the tensors of experts ``numbers``, quantized one by one.

    ``tensors`` are those of these experts alone; ``rows`` is the GLU interleave.
    """
    # blocks are those of training, unless a block of the engine would mix gate and up rows
    kept = rows if rows and rows % request.convention.scale_block[0] == 0 else None
    found: dict[str, Tensor] = {}
    for index, expert in enumerate(numbers):
        one = convert_expert_set(
            tensors,
            replace(experts, num_experts=len(numbers)),
            _GROUPED,
            source_interleave=rows or None,
            target_interleave=kept,
            experts=range(index, index + 1),
        )
        for linear in LINEARS:
            stem = f"{experts.prefix}{linear}"
            values = one[f"{stem}.weight"].float()
            if not values.is_meta and not values.isfinite().all():
                raise StateError(
                    f"{path}: {stem}, expert {expert}: expected numbers, got Inf or NaN, which "
                    "engines would spread to every token. Export an earlier checkpoint."
                )
            bias = one[f"{stem}.bias"] if experts.has_bias else None
            amax = input_amaxes.get(linear)
            for pattern, suffix, tensor in _tensors_of(linear, values, bias, request, kept, amax):
                found[tensor_name(target, pattern, expert, suffix)] = tensor
    return found


def _tensors_of(
    linear: str,
    values: Tensor,
    bias: Tensor | None,
    request: ExportRequest,
    kept: int | None,
    input_amax: float | None,
) -> Iterator[tuple[KeyPattern, str, Tensor]]:
    patterns = patterns_of(_TARGET, linear, "weight")
    interleave = kept if len(patterns) > 1 else None
    if values.is_meta:  # asks for names, shapes and dtypes
        quantized = QuantizedWeight.empty(request.format, values.shape, device=values.device)
    else:
        quantized = ops.quantize(values, request.format)
    (parts,) = export_experts(
        quantized,
        request.convention,
        parts=len(patterns),
        interleave=interleave,
        name=linear,
        input_amax=input_amax,
    )
    for pattern, part in zip(patterns, parts, strict=True):
        for suffix, tensor in part.items():
            yield pattern, suffix, tensor
    if bias is not None:
        patterns = patterns_of(_TARGET, linear, "bias")
        biases = split_rows(bias.bfloat16(), len(patterns), interleave)
        for pattern, one in zip(patterns, biases, strict=True):
            yield pattern, "bias", one[0]


def _require_fits(
    stored: Collection[ExpertSet], request: ExportRequest, rows: int, path: Path
) -> None:
    refuse_keys([fault for one in stored for fault in interleave_faults(one, rows or None)])
    block_rows, _ = request.convention.scale_block
    for ffn, hidden in {(one.ffn, one.hidden) for one in stored}:
        if ffn % block_rows:
            raise LayoutError(
                f"{path}: linear_fc1: expected gate and up in runs of {block_rows} rows or a "
                f"multiple, the height of a block of scales, got {ffn} rows each. "
                f"{_advise(ffn, hidden)} --moe-ffn-hidden-size that is such a multiple."
            )
        _check_shapes(request.format, ffn, hidden, f"{path}: ")


def _check_shapes(format: BlockScaledFormat, ffn: int, hidden: int, where: str = "") -> None:
    format.check_shape((1, 2 * ffn, hidden), f"{where}linear_fc1")
    format.check_shape((1, hidden, ffn), f"{where}linear_fc2")


def _advise(ffn: int, hidden: int) -> str:
    """Return a sentence on other formats for experts of this size, up to "train with a"."""
    fitting = []
    for format in FORMATS.values():
        with suppress(LayoutError):
            _check_shapes(format, ffn, hidden)
            if ffn % find_convention(format).scale_block[0] == 0:
                fitting.append(format.name)
    if not fitting:
        return "Train with a"
    named = " or ".join(filter(None, (", ".join(fitting[:-1]), fitting[-1])))
    return f"Give --format {named}, whose blocks fit, or train with a"
