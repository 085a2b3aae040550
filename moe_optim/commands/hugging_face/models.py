"""A model as Megatron's arguments and transformers' ``config.json`` describe it, both ways.

What one side can compute and the other cannot is refused, all of it at once: a model that loads and
gives other logits is worse than none. Pure: no tensor, no Megatron and no transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_optim.commands.hugging_face import sides
from moe_optim.commands.hugging_face.deepseek_v3 import DEEPSEEK_V3, WITHOUT_FLAG
from moe_optim.commands.hugging_face.qwen3_moe import QWEN3_MOE
from moe_optim.commands.hugging_face.sides import Row, Side
from moe_optim.commands.hugging_face.values import (
    MOST_LAYERS,
    Values,
    freq_faults,
    kind_faults,
    unlike,
)
from moe_optim.errors import ConfigError
from moe_optim.rollout.families import FAMILIES, Anatomy, Family

MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
"""What configurations call the number of layers that predict further tokens: as published, and as
transformers 5 does in its code."""
_SIDES = {side.family: side for side in (QWEN3_MOE, DEEPSEEK_V3)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What a conversion has to know of a model."""

    family: Family
    anatomy: Anatomy
    arguments: Mapping[str, Any]
    """Megatron's that the family determines; whatever else a run has is left out."""
    config: Mapping[str, Any]
    """What ``config.json`` holds, without dtype and special tokens."""

    @property
    def query_groups(self) -> tuple[int, int, int]:
        """Return groups of queries, queries of a group, and the width of a head."""
        groups, heads = self.arguments["num_query_groups"], self.arguments["num_attention_heads"]
        return groups, heads // groups, self.arguments["kv_channels"]

    @property
    def num_experts(self) -> int:
        """Of a layer."""
        return int(self.arguments["num_experts"])

    @property
    def is_stacked(self) -> bool:
        """Whether Megatron stores the tensors of all layers as one: where all layers are alike."""
        return bool(self.arguments["moe_layer_freq"] == 1)


def model_from_arguments(given: Values, where: str) -> Model:
    """Return the model that Megatron trained.

    Args:
        given: all arguments that were saved with the checkpoint.
        where: the checkpoint, for errors.

    Raises:
        ConfigError: transformers has no model that computes the same; everything that stands in the
            way is named.
    """
    side = DEEPSEEK_V3 if given.get("multi_latent_attention") is True else QWEN3_MOE
    kinds = {**{row.argument: row.kind for row in side.rows}, **side.argument_kinds}
    faults = kind_faults(given, kinds, side.optional) + unlike(given, side.arguments)
    if not faults:
        faults += _layer_faults(given["num_layers"], given.get("moe_layer_freq", 1))
    if not faults:
        faults += side.argument_faults(given)
    _refuse(faults, where, f"arguments of a model that transformers computes as {side.family}")
    copied = {row.argument: given.get(row.argument) for row in side.rows}
    return _model(side, copied | side.more_arguments(given))


def model_from_config(given: Values, where: str) -> Model:
    """Return the model that a ``config.json`` describes.

    Args:
        given: what it holds.
        where: its path, for errors.

    Raises:
        ConfigError: it is of another family, or of something that Megatron computes otherwise;
            everything that stands in the way is named.
    """
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in _SIDES:
        raise ConfigError(
            f"{where}: model_type: expected {' or '.join(_SIDES)}, got {str(kind)[:60]!r}. Convert "
            "other models with Megatron-Bridge."
        )
    side = _SIDES[kind]
    config = {**side.defaults, **_as_published(given)}
    kinds = {**{row.key: row.kind for row in side.rows}, **side.config_kinds}
    faults = kind_faults(config, kinds, side.optional) + unlike(config, side.config)
    if not faults:
        faults += _layer_faults(config["num_hidden_layers"], 1)
    if not faults:
        faults += side.config_faults(config)
    _refuse(faults, where, f"a configuration that Megatron computes as {side.family}")
    copied = {row.argument: config.get(row.key) for row in side.rows}
    return _model(side, copied | side.arguments_of(config))


_WITHOUT_ENGINE = (
    "--no-persist-layer-norm",
    "--no-rope-fusion",
    "--no-masked-softmax-fusion",
    "--no-gradient-accumulation-fusion",
)
"""Megatron's flags for what local layers have of Transformer Engine or apex alone."""


def megatron_flags(model: Model, impl: str) -> list[str]:
    """Return the flags of Megatron's command line that build a model.

    Args:
        model: what is built.
        impl: ``--transformer-impl``; with ``local`` flags that need no Transformer Engine.
    """
    flags = ["--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", "--qk-layernorm"]
    flags += ["--position-embedding-type", "rope"]
    for name, value in model.arguments.items():
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        is_said = name != "num_query_groups" or model.arguments.get("group_query_attention")
        if value is None or value is False or name in WITHOUT_FLAG or not is_said:
            continue
        flags += [flag] if value is True else [flag, _spell(value)]
    flags += ["--transformer-impl", impl]
    if impl == "local":
        return [*flags, *_WITHOUT_ENGINE]
    plain_latent = model.arguments.get("rope_type") == "rope"  # Megatron fuses no others' positions
    return [*flags, "--no-rope-fusion"] if plain_latent else flags


def _spell(value: Any) -> str:
    """Return a value as Megatron's parser takes it: its --rotary-base is no 10000.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).replace(" ", "")


_FLAGS = {"layernorm_epsilon": "--norm-epsilon"}


def _model(side: Side, arguments: Values) -> Model:
    family = FAMILIES[side.family]
    experts = sides.layers_with_experts(arguments["moe_layer_freq"], arguments["num_layers"])
    config = {
        "architectures": [family.architecture],
        "model_type": family.name,
        **{row.key: _number(row, arguments[row.argument]) for row in side.rows},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": not arguments[sides.UNTIED],
        "use_cache": True,
        **side.config_of(arguments),
    }
    anatomy = Anatomy(
        num_layers=arguments["num_layers"],
        moe_layers=frozenset(layer for layer, has_experts in enumerate(experts) if has_experts),
        traits=side.traits_of(arguments) | ({"untied"} if arguments[sides.UNTIED] else set()),
        mtp_layers=arguments.get("mtp_num_layers") or 0,
    )
    return Model(family=family, anatomy=anatomy, arguments=arguments, config=config)


def _number(row: Row, value: Any) -> Any:
    """Return a value as ``config.json`` has it: transformers takes no whole number for a base."""
    return float(value) if row.kind == "number" else value


def _layer_faults(num_layers: int, freq: Any) -> list[str]:
    if num_layers > MOST_LAYERS:
        return [f"layers: expected at most {MOST_LAYERS:,}, got {num_layers:,}"]
    return freq_faults(freq, num_layers)


def _as_published(given: Values) -> dict[str, Any]:
    """Return a configuration as published models have it.

    transformers 5 writes ``rope_parameters`` where others have ``rope_theta`` and ``rope_scaling``,
    and ``num_local_experts``.
    """
    config = dict(given)
    rope = config.pop("rope_parameters", None) or config.get("rope_scaling") or {}
    rope = dict(rope) if isinstance(rope, dict) else {"rope_type": "something else"}
    theta = rope.pop("rope_theta", None)
    if theta is not None:
        config["rope_theta"] = theta
    kind = rope.get("rope_type") or rope.get("type") or "default"
    config["rope_scaling"] = None if kind == "default" else rope | {"rope_type": kind}
    for published, other in (
        ("num_experts", "num_local_experts"),
        MTP_KEYS,
    ):
        if published not in config and other in config:
            config[published] = config[other]
    return config


def _refuse(faults: list[str], where: str, what: str) -> None:
    if faults:
        raise ConfigError(
            f"{where}: expected {what}, got {len(faults)} difference(s):\n"
            + "".join(f"  {fault}\n" for fault in faults)
            + "Nothing was converted. Megatron-Bridge converts more models."
        )
