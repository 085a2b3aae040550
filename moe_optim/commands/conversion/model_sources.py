"""Identifies the model of a checkpoint from the files saved beside its tensors."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from moe_optim.checkpoint.files.reader import CheckpointReader
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.files.untrusted_files import parse_json, read_file
from moe_optim.commands.conversion.published_weights import DequantizedWeights, encodings_of
from moe_optim.commands.hugging_face.models import (
    MTP_KEYS,
    Model,
    model_from_arguments,
    model_from_config,
)
from moe_optim.errors import ConfigError, StateError

Target = Literal["hf", "megatron"]

CONFIG = "config.json"
QUANTIZATION = "quantization_config"
_TEXT = "text_config"
"""Key of the language model in the configuration of a multimodal model."""
_EXPERT_DTYPE = "expert_dtype"
"""Key of DeepSeek-V4's element format."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_TOKENIZER_BYTES = 64 * 2**20  # several times the longest known file
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys of the number of experts per layer."""
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def names_of(tensors: Collection[str]) -> str | None:
    """Return whose names a whole model has, ``Hugging Face`` or ``Megatron``; None if unknown."""
    for owner, embedding in (("Hugging Face", "embed_tokens"), ("Megatron", "word_embeddings")):
        if any(name.endswith(f".{embedding}.weight") for name in tensors):
            return owner
    return None


def require_format(reader: CheckpointReader, to: Target) -> None:
    """Raise ConfigError if a checkpoint already is in the target format."""
    wanted = "torch_dist" if to == "hf" else "safetensors"
    if to == "hf" and names_of(reader.tensors) == "Hugging Face":
        raise ConfigError(
            f"{reader.path}: expected a Megatron checkpoint, or quantized weights with a "
            f"{QUANTIZATION} in {CONFIG}, for --to hf, got one that is Hugging Face's already. "
            "Use it as it is."
        )
    if reader.format != wanted:
        also = f", or safetensors whose {CONFIG} has a {QUANTIZATION}," if to == "hf" else ""
        raise ConfigError(
            f"{reader.path}: expected {wanted}{also} for --to {to}, got {reader.format}. "
            "Convert expert layouts alone with --experts."
        )


def read_model(reader: CheckpointReader) -> Model:
    """Return the model of a checkpoint.

    Raises:
        ConfigError: nothing identifies it, or the other side has no such model.
        StateError: ``config.json`` is damaged.
    """
    if not isinstance(reader, TorchDistReader):
        folder = folder_of(reader)
        config = read_config(folder)
        if isinstance(reader, DequantizedWeights):
            config = unquantized_config(config)
        return model_from_config(config, str(folder / CONFIG))
    arguments = reader.model_arguments
    if not arguments:
        raise ConfigError(
            f"{reader.path}: expected Megatron's arguments saved with the checkpoint, "
            "got none. Convert it with the library that trained it, such as Megatron-Bridge."
        )
    return model_from_arguments(arguments, str(reader.path))


def dequantized(reader: CheckpointReader) -> CheckpointReader:
    """Return a reader of bf16 values if ``config.json`` declares quantized weights.

    Otherwise, returns ``reader`` itself. An unknown quantization is a ConfigError; missing or
    misshapen scales are a LayoutError.
    """
    folder = folder_of(reader)
    if reader.format != "safetensors" or not (folder / CONFIG).is_file():
        return reader
    config = read_config(folder)
    found = config.get(QUANTIZATION)
    if found is None:
        found = _text_config(config).get(QUANTIZATION)
    if found is None:
        return reader
    return DequantizedWeights(reader, encodings_of(found, str(folder / CONFIG)))


def unquantized_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` without what it says about quantized weights."""
    kept = {key: one for key, one in config.items() if key not in (QUANTIZATION, _EXPERT_DTYPE)}
    if isinstance(kept.get(_TEXT), dict):
        kept[_TEXT] = unquantized_config(kept[_TEXT])
    return kept


def require_promised_layers(model: Model, reader: CheckpointReader) -> None:
    """Raise ConfigError if ``config.json`` counts MTP layers whose tensors are missing."""
    own, further = model.anatomy.num_layers, model.anatomy.mtp_layers
    behind = tuple(f"model.layers.{layer}." for layer in range(own, own + further))
    if reader.format == "torch_dist" or not behind:
        return
    if not any(name.startswith(behind) for name in reader.tensors):
        path = folder_of(reader) / CONFIG
        key = next(key for key in MTP_KEYS if key in read_config(path.parent))
        raise ConfigError(
            f"{path}: {key}: expected {further} layer(s) behind the {own} others, as it says, got "
            f"no tensor of model.layers.{own}. Set it to 0: transformers drops these layers when "
            "it saves a model."
        )


def folder_of(reader: CheckpointReader) -> Path:
    """Return the folder of a checkpoint."""
    return reader.path if reader.path.is_dir() else reader.path.parent


def read_config(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a folder; raises as :func:`read_model` does."""
    try:
        config = parse_json(read_file(folder, CONFIG))
        if not isinstance(config, dict):
            raise ValueError("something else than names and values")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder / CONFIG}: expected the configuration of the model, got no such file. Fetch "
            "it beside the weights, or convert expert layouts alone with --experts."
        ) from error
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise StateError(
            f"{folder / CONFIG}: expected JSON, got: {said}. Fetch or write it again."
        ) from error
    return config


def spell_config(config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return name and content of a ``config.json``."""
    return {CONFIG: (json.dumps(config, indent=2) + "\n").encode()}


def configured_experts(reader: CheckpointReader) -> int | None:
    """Return the experts per layer from ``config.json`` beside safetensors, or None."""
    folder = folder_of(reader)
    if reader.format != "safetensors" or not (folder / CONFIG).is_file():
        return None
    config = read_config(folder)
    config |= _text_config(config)
    numbers = (config.get(name) for name in _NUM_EXPERTS)
    return next((one for one in numbers if type(one) is int and one > 0), None)


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    found = config.get(_TEXT)
    return found if isinstance(found, dict) else {}


def read_tokenizer(given: Path | None, *, beside: Path) -> dict[str, bytes]:
    """Return the files of a given tokenizer, else of the one in folder ``beside``, if any.

    Links within a Hugging Face cache are followed; a link out of the folder is a StateError, and a
    given folder without a tokenizer is a ConfigError.
    """
    folder = given or beside
    names = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if given and not names:
        raise ConfigError(
            f"{folder}: expected files of a tokenizer, such as {_TOKENIZER_FILES[0]}, got none. "
            "Give the folder of a Hugging Face model."
        )
    found = {}
    for name in names:
        try:
            found[name] = read_file(folder, name, _TOKENIZER_BYTES)
        except OSError as error:
            raise StateError(
                f"{folder / name}: expected a file of a tokenizer, got: {error.strerror}. Copy "
                "the target of the link into the folder, or give a snapshot folder of a Hugging "
                "Face cache."
            ) from error
    return found


def special_tokens(folder: Path | None) -> dict[str, int | list[int] | None]:
    """Return the special tokens in the ``config.json`` of a tokenizer's folder, if any."""
    if folder is None:
        return {}
    config = read_config(folder) if (folder / CONFIG).is_file() else {}
    found = {name: config.get(name) for name in _SPECIAL_TOKENS}
    for name, token in found.items():
        numbers = token if isinstance(token, list) else [] if token is None else [token]
        if not all(type(number) is int for number in numbers):
            raise StateError(
                f"{folder / CONFIG}: {name}: expected a whole number or a list of them, got "
                f"{str(token)[:60]}. Correct it."
            )
    return found
