"""Translates a model between Megatron arguments and transformers' ``config.json``.

A model that only one side supports is refused with all differences listed, since a checkpoint that
loads but computes other logits is worse than none. Imports neither Megatron nor transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from moe_optim.commands.hugging_face import family_rules as rules
from moe_optim.commands.hugging_face.deepseek_v3 import DEEPSEEK_V3, WITHOUT_FLAG
from moe_optim.commands.hugging_face.family_rules import FamilyRules, Values
from moe_optim.commands.hugging_face.qwen3_moe import QWEN3_MOE
from moe_optim.errors import ConfigError
from moe_optim.experts.keys.finding import refuse_conversion
from moe_optim.rollout.families import FAMILIES, Anatomy, Family, family_of
from moe_optim.rollout.rows import Heads

MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys of the number of MTP layers: in published configurations, and in transformers 5."""
_refuse = partial(
    refuse_conversion,
    remedy="Megatron-Bridge converts more models.",
    kind=ConfigError,
    unit="difference(s)",
)
_RULES = {family.family: family for family in (QWEN3_MOE, DEEPSEEK_V3)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model in the terms of both sides."""

    family: Family
    anatomy: Anatomy
    arguments: Mapping[str, Any]  # Megatron arguments determined by the family
    config: Mapping[str, Any]  # config.json without dtype and special tokens

    @property
    def heads(self) -> Heads:
        """Sizes of attention heads; 0 rows each for latent attention."""
        groups, heads = self.arguments["num_query_groups"], self.arguments["num_attention_heads"]
        return Heads(groups, heads // groups, self.arguments.get("kv_channels", 0))

    @property
    def num_experts(self) -> int:
        """Number of experts per layer."""
        return int(self.arguments["num_experts"])

    @property
    def is_stacked(self) -> bool:
        """Whether Megatron stacks the tensors of all layers, which all have the same shapes."""
        return bool(self.arguments["moe_layer_freq"] == 1)


def model_from_arguments(given: Values, where: str) -> Model:
    """Return the model for the Megatron arguments saved at ``where``.

    ConfigError with all differences if transformers has no equivalent model.
    """
    family = _RULES[family_of(given.get("multi_latent_attention") is True).name]
    kinds = {**{one.argument: one.kind for one in family.shared}, **family.argument_kinds}
    faults = rules.kind_faults(given, kinds) + rules.unlike(given, family.arguments)
    faults = faults or rules.layer_faults(given["num_layers"], given.get("moe_layer_freq", 1))
    faults = faults or family.argument_faults(given)
    what = f"arguments of a model that transformers computes as {family.family}"
    _refuse(f"{where}: expected {what}", faults)
    return _model(family, _config_of(family, given))


def model_from_config(given: Values, where: str) -> Model:
    """Return the model for the ``config.json`` at ``where``.

    ConfigError with all differences if Megatron has no equivalent model.
    """
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in _RULES:
        raise ConfigError(
            f"{where}: model_type: expected {' or '.join(_RULES)}, got {str(kind)[:60]!r}. Convert "
            "other models with Megatron-Bridge."
        )
    family = _RULES[kind]
    config = {**family.defaults, **_as_published(given)}
    kinds = {**{one.key: one.kind for one in family.shared}, **family.config_kinds}
    faults = rules.kind_faults(config, kinds) + rules.unlike(config, family.config)
    faults = faults or rules.layer_faults(config["num_hidden_layers"], 1)
    faults = faults or family.config_faults(config)
    what = f"a configuration that Megatron computes as {family.family}"
    _refuse(f"{where}: expected {what}", faults)
    return _model(family, config)


_WITHOUT_ENGINE = (
    "--no-persist-layer-norm", "--no-rope-fusion", "--no-masked-softmax-fusion",
    "--no-gradient-accumulation-fusion",
)  # fmt: skip
"""Megatron flags that disable what needs Transformer Engine or apex."""


def megatron_flags(model: Model, impl: str) -> list[str]:
    """Return the Megatron flags that build a model with this ``--transformer-impl``."""
    flags = ["--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", "--qk-layernorm"]
    flags += ["--position-embedding-type", "rope"]
    for name, value in model.arguments.items():
        flag = "norm-epsilon" if name == "layernorm_epsilon" else name.replace("_", "-")
        is_said = name != "num_query_groups" or model.arguments.get("group_query_attention")
        if value is None or value is False or name in WITHOUT_FLAG or not is_said:
            continue
        if isinstance(value, float) and value.is_integer():  # the parser rejects 10000.0
            value = int(value)
        flags += [f"--{flag}", *([] if value is True else [str(value).replace(" ", "")])]
    flags += ["--transformer-impl", impl]
    if impl == "local":
        return [*flags, *_WITHOUT_ENGINE]
    plain_latent = model.arguments.get("rope_type") == "rope"  # Megatron fuses RoPE only for these
    return [*flags, "--no-rope-fusion"] if plain_latent else flags


def _model(rules_of: FamilyRules, given: Values) -> Model:
    shared = {one.argument: given.get(one.key) for one in rules_of.shared}
    arguments: dict[str, Any] = shared | rules_of.arguments_of(given)
    experts = rules.experts_of_layers(arguments)
    anatomy = Anatomy(
        num_layers=arguments["num_layers"],
        moe_layers=frozenset(layer for layer, has_experts in enumerate(experts) if has_experts),
        traits=rules_of.traits_of(arguments) | ({"untied"} if arguments[rules.UNTIED] else set()),
        mtp_layers=arguments.get("mtp_num_layers") or 0,
    )
    return Model(
        family=FAMILIES[rules_of.family],
        anatomy=anatomy,
        arguments=arguments,
        config=_config_of(rules_of, arguments),
    )


def _config_of(rules_of: FamilyRules, arguments: Values) -> dict[str, Any]:
    family = FAMILIES[rules_of.family]
    shared: dict[str, Any] = {one.key: arguments.get(one.argument) for one in rules_of.shared}
    numbers = [one.key for one in rules_of.shared if one.kind == "number"]
    shared |= {key: float(shared[key]) for key in numbers}  # transformers needs 1e4 as a float
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        **shared,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": arguments.get(rules.UNTIED) is not True,
        "use_cache": True,
        **rules_of.config_of(arguments),
    }


def _as_published(given: Values) -> dict[str, Any]:
    """Return a configuration under the keys of published models.

    transformers 5 writes ``rope_parameters`` and ``num_local_experts``.
    """
    config = dict(given)
    rope = config.pop("rope_parameters", None) or config.get("rope_scaling") or {}
    rope = dict(rope) if isinstance(rope, dict) else {"rope_type": "something else"}
    theta = rope.pop("rope_theta", None)
    if theta is not None:
        config["rope_theta"] = theta
    kind = rope.get("rope_type") or rope.get("type") or "default"
    config["rope_scaling"] = None if kind == "default" else rope | {"rope_type": kind}
    for published, other in (("num_experts", "num_local_experts"), MTP_KEYS):
        if published not in config and other in config:
            config[published] = config[other]
    return config
