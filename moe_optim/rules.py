"""Compatibility rules: which settings are refused, and which require Megatron's own step.

A :class:`Setup` describes a run, in increasing detail by stage: the configuration alone, Megatron's
flags (all that a dry run has), the model, the optimizer. A rule applies at every stage that
provides its inputs, so that invalid flags are refused before a model is built. The dry run, the
optimizer factory, ``moe-optim plan`` and the documents use this table.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from moe_optim.environment import find_package
from moe_optim.errors import ConfigError
from moe_optim.formats import FORMATS, FP8_BLOCK, FP8_BLOCK_FP32

Effect = Literal["refuse", "stock step", "warn", "note"]
Known = Literal["flags", "model", "optimizer"]

FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""Environment variable with which Transformer Engine's blockwise FP8 has fp32 scales, if 1."""
TENSORWISE_RECIPE = "--fp8-recipe tensorwise"
"""Recipe whose weights stay in Megatron's buffers; requires ``format: auto``."""
OPTIMIZERS = ("adam", "muon")
"""Supported values of ``--optimizer``, as Megatron's validation leaves them."""
MUON_VALUES = {
    "muon_coefficient_type": ("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"),
    "muon_fp32_matmul_prec": ("medium", "high", "highest"),
    "muon_scale_mode": ("spectral", "unit_rms_norm", "shape_scaling"),
    "muon_tp_mode": ("blockwise", "duplicated", "distributed"),
}
"""Field of Megatron's ``OptimizerConfig`` -> values with which Muon trains. Megatron's parser takes
any coefficient type, and ``low``, which torch refuses as a precision of products."""
_CHANGED_BYTES = (  # recipe, Transformer Engine variable, values
    ("--fp4-recipe nvfp4", "NVTE_NVFP4_DISABLE_2D_QUANTIZATION", ("1",)),
    ("--fp4-recipe nvfp4", "NVTE_NVFP4_4OVER6", ("weights", "all")),
)
"""Environment variables that give a recipe's weights an unsupported format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Known facts about a run; fields unknown at a stage keep their defaults."""

    config: Any  # MoEOptimConfig, which checks itself by these rules
    optimizer: Any = None
    """Megatron's ``OptimizerConfig``, or an object with the fields that rules read."""
    ddp: Any = None  # Megatron's DistributedDataParallelConfig
    models: Sequence[Any] = ()  # Megatron's TransformerConfig of every model chunk
    recipes: Sequence[str] = ()  # recipe flags in which Transformer Engine keeps primary weights
    portable: Sequence[Any] = ()  # TransformerConfig of portable experts to be built
    has_portable: bool = False  # whether portable experts exist or will be built
    has_te: bool = False
    """Whether bf16 experts of Transformer Engine exist or will be built, for ``compute``."""
    quantized: bool = False  # whether this package's buckets contain any weights
    tensorwise: bool = False
    """Whether any weights have per-tensor scaling and thus stay in Megatron's buffers."""
    accepted: Sequence[str] = ()
    """Values of ``format`` that Transformer Engine's weights permit besides ``auto``; empty without
    such weights, or if all are managed already."""
    stored: Sequence[str] = ()  # formats of existing quantized weights
    unknown: str | None = None  # class and shape of a quantized weight in no supported format
    linears: Mapping[str, Any] = MappingProxyType({})
    """Portable expert linears of Megatron-Bridge with interleaved rows, by name."""
    masters_of_adam: bool | None = None  # whether Adam holds the masters; None: derived from flags
    adam: str | None = None  # class of an optimizer whose steps are not Megatron's Adam's
    has_kernels: bool = True  # whether kernels can update every master
    can_capture: bool = True  # whether a CUDA graph can capture the step
    stock_reason: str | None = None
    """Reason for Megatron's step, agreed by all ranks; None before that."""
    args: Any = None
    """Megatron's arguments, under ``moe-optim train`` and for remarks on flags that its
    configurations do not contain."""

    @classmethod
    def of_flags(cls, config: Any, optimizer: Any, ddp: Any, models: Sequence[Any]) -> "Setup":
        """Return the setup given by Megatron's validated configurations, before a model is built.

        Arguments become the fields of the same names.
        """
        recipes = tuple(dict.fromkeys(found for m in models if (found := native_recipe(m))))
        tensorwise = TENSORWISE_RECIPE in recipes
        portable = [
            model
            for model in models
            if model.transformer_impl == "local" and model.num_moe_experts
            if model.moe_grouped_gemm
        ]
        return cls(
            config=config,
            optimizer=optimizer,
            ddp=ddp,
            models=models,
            recipes=recipes,
            portable=portable,
            has_portable=bool(portable),
            has_te=any(
                model.transformer_impl != "local"
                and model.num_moe_experts
                and model.moe_grouped_gemm
                for model in models
            ),
            quantized=len(recipes) > tensorwise or (bool(portable) and config.format != "bf16"),
            tensorwise=tensorwise,
            accepted=[
                *(name for flag in recipes for name in native_formats(flag)),
                *(["auto"] if tensorwise else []),
            ],
        )

    @property
    def has_muon(self) -> bool:
        """Whether Muon steps the matrices, and Adam all else."""
        return bool(self.optimizer.optimizer == "muon")

    @property
    def offload_states(self) -> float:
        """Fraction of masters and moments on the host, from configuration or flag."""
        return float(config_with_flags(self.config, self.optimizer).offload_states)

    @property
    def adam_holds_masters(self) -> bool:
        """Whether Adam rather than the distributed optimizer holds the masters of all weights.

        True with ``--use-precision-aware-optimizer`` unless anything else accesses masters:
        quantization of weights, ``step: fused``, or states on the host.
        """
        if self.masters_of_adam is not None:
            return self.masters_of_adam
        flags = self.optimizer
        is_shared = self.quantized or self.tensorwise or self.config.step == "fused"
        is_shared = is_shared or self.config.offload_states or flags.optimizer_cpu_offload
        has_others = not is_shared or str(flags.main_params_dtype) != "torch.float32"
        return bool(flags.use_precision_aware_optimizer and has_others)


@dataclass(frozen=True, slots=True)
class Rule:
    """An incompatibility between settings."""

    name: str  # the user's setting, as listed in documents
    when: Callable[[Setup], object]
    """Whether the rule applies to a setup; a string result replaces the name in messages."""
    reason: str
    remedy: str
    """Recommended change; ``{step}`` inserts the remedy for whatever requires Megatron's step."""
    known: Known = "flags"  # earliest stage that provides the rule's inputs. A dry run has flags
    scope: str = field(default="any run", kw_only=True)  # key of SCOPES
    effect: Effect = field(default="refuse", kw_only=True)

    def finding(self, setup: Setup) -> str | None:
        """Return the finding in a setup, None if the rule does not apply."""
        if not SCOPES[self.scope](setup) or not (found := self.when(setup)):
            return None
        return found if isinstance(found, str) else self.name


SCOPES: Mapping[str, Callable[[Setup], bool]] = {
    "any configuration": lambda _: True,
    "any run": lambda s: s.optimizer is not None,
    "Muon": lambda s: s.optimizer is not None and s.has_muon,
    "any model": lambda s: bool(s.models),
    "quantized weights": lambda s: s.optimizer is not None and s.quantized,
    "tensorwise weights": lambda s: s.optimizer is not None and s.tensorwise,
    "portable experts": lambda s: bool(s.portable),
    "Transformer Engine's experts": lambda s: s.has_te and copied_format(s.config) is not None,
    "Megatron-Bridge": lambda s: bool(s.linears),
    "moe-optim train": lambda s: s.args is not None,
    "Muon's arguments": lambda s: s.args is not None and s.args.optimizer == "muon",
}
"""Scope of a rule -> whether a setup is within it, and known in sufficient detail."""


def refusals(setup: Setup) -> list[str]:
    """Return refusals, one line each: finding, reason and remedy."""
    return remarks(setup, "refuse")


def check_setup(setup: Setup, where: str) -> None:
    """Raise ConfigError with one line per rule that a setup violates, starting with ``where``."""
    lines = refusals(setup)
    if len(lines) == 1:
        raise ConfigError(f"{where}: {lines[0]}")
    if lines:
        listed = "".join(f"\n  {line}" for line in lines)
        raise ConfigError(f"{where}: expected settings that go together, got:{listed}")


def remarks(setup: Setup, effect: Effect) -> list[str]:
    """Return warnings of settings without effect, or notes on unnecessary flags."""
    told = []
    for rule in RULES:
        if rule.effect == effect and (found := rule.finding(setup)):
            remedy = rule.remedy.replace("{step}", _remedy_of_stock_step(setup))
            told.append(f"{found}: {rule.reason}. {remedy}.")
    return told


def why_stock_step(setup: Setup) -> str | None:
    """Return the reason for using Megatron's step, None for a fused step.

    Sole criterion. Later stages may add reasons: an optimizer on any rank that cannot be fused.
    """
    found = _find_stock_step(setup)
    return found and found[1]


def _remedy_of_stock_step(setup: Setup) -> str:
    if found := _find_stock_step(setup):
        return found[0].remedy
    agreed = (r.remedy for r in RULES if r.effect == "stock step" and r.name == setup.stock_reason)
    return next(agreed, "Remove that")


def _find_stock_step(setup: Setup) -> tuple[Rule, str] | None:
    rules = (rule for rule in RULES if rule.effect == "stock step")
    return next(((rule, found) for rule in rules if (found := rule.finding(setup))), None)


def config_with_flags(config: Any, optimizer: Any) -> Any:
    """Return ``config``, a ``MoEOptimConfig``, with Megatron's own flags in ``optimizer`` applied.

    ``--optimizer-cpu-offload`` sets ``offload_states`` to its fraction, unless it is set already.
    With ``step: stock`` a rule refuses it.
    """
    if config.step == "stock" or config.offload_states or not optimizer.optimizer_cpu_offload:
        return config
    return replace(config, offload_states=offload_fraction(optimizer))


def offload_fraction(optimizer: Any) -> float:
    """Return the fraction of states that ``--optimizer-cpu-offload`` keeps on the host.

    ``optimizer`` is an object like :attr:`Setup.optimizer`; its fraction is clamped to 0 to 1.
    """
    if not optimizer.optimizer_cpu_offload:
        return 0.0
    return min(max(float(optimizer.optimizer_offload_fraction), 0.0), 1.0)


def copied_format(config: Any) -> str | None:
    """Return ``compute`` if bf16 experts of Transformer Engine can take it, else None.

    GEMMs of both directions read one copy, so their values have to be the same.
    """
    compute: str | None = config.compute
    if config.format != "bf16" or compute is None:
        return None
    agrees = (
        FORMATS[compute].directions_agree if compute in FORMATS else compute.endswith("_per_expert")
    )
    return compute if agrees else None


def native_recipe(model: Any) -> str | None:
    """Return the recipe flag of a ``TransformerConfig``'s primary weights, None for bf16."""
    for on, kept, name in (("fp8", "fp8_param", "fp8_recipe"), ("fp4", "fp4_param", "fp4_recipe")):
        if getattr(model, on) and getattr(model, kept):
            recipe = getattr(model, name)
            return f"--{name.replace('_', '-')} {getattr(recipe, 'value', recipe)}"
    return None


def native_formats(recipe: str | None) -> tuple[str, ...]:
    """Return the formats in which weights of a recipe flag can be managed, ``auto``'s first.

    Empty for other recipes. Transformer Engine reads its variable when it is imported; a built
    weight knows its scales.
    """
    blocks = FP8_BLOCK_FP32 if os.environ.get(FP32_SCALES) == "1" else FP8_BLOCK
    native = {
        "--fp8-recipe mxfp8": ("mxfp8", "mxfp8_2d"),
        "--fp8-recipe blockwise": (blocks.name,),
        "--fp4-recipe nvfp4": ("nvfp4",),
    }
    return native.get(recipe or "", ())


def weight_shards(sizes: Any) -> tuple[int, int]:
    """Return the shards of a weight, and of an expert's, beside tensor parallelism.

    Args:
        sizes: Megatron's arguments, or its TransformerConfig; dev's have no such shards.
    """
    return (
        getattr(sizes, "gtp_weight_remat_size", 1),
        getattr(sizes, "expert_gtp_weight_remat_size", 1),
    )


def _any_model(test: Callable[[Any], object]) -> Callable[[Setup], bool]:
    return lambda setup: any(map(test, setup.models))


def _any_portable(test: Callable[[Any], object]) -> Callable[[Setup], bool]:
    return lambda setup: any(map(test, setup.portable))


def _rules(scope: str, effect: Effect, *rows: tuple[Any, ...]) -> tuple[Rule, ...]:
    return tuple(Rule(*row, scope=scope, effect=effect) for row in rows)


def _portable(*rows: tuple[str, Callable[[Any], object], str]) -> tuple[Rule, ...]:
    return tuple(
        Rule(name, _any_portable(test), "portable experts do not have it", remedy,
             scope="portable experts")
        for name, test, remedy in rows
    )  # fmt: skip


def _copied(*rows: tuple[str, Callable[[Any], object], str, str]) -> tuple[Rule, ...]:
    return tuple(
        Rule(f"compute with {name}", _any_model(test), reason, remedy,
             scope="Transformer Engine's experts")
        for name, test, reason, remedy in rows
    )  # fmt: skip


_GIVE_PORTABLE = (
    "Give --moe-grouped-gemm with --transformer-impl local (--use-checkpoint-args may undo both), "
    "or "
)
_SHARDS = (
    "Megatron gathers such shards separately for every GEMM, and scales and amax are those of "
    "a whole weight"
)

_OTHER_OPTIMIZERS = {
    "adaptive_muon": "no step here keeps the second moment of its orthogonalized updates",
    "soap": "no step here keeps its preconditioners",
    "lion": "no step here applies the sign of a momentum",
}


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


# fmt: off
RULES: tuple[Rule, ...] = (
    *_rules("any configuration", "refuse",
        ("compute in another format than that of quantized weights",
         lambda s: s.config.format != "bf16" and s.config.compute not in (None, s.config.format)
         and f"compute: {s.config.compute} with format: {s.config.format}",
         "expected null or the format of the weights, unless these are bf16",
         "Write null, or store bf16 weights with format: bf16"),
        ("record_amax: true with format: bf16",
         lambda s: s.config.record_amax and s.config.format == "bf16",
         "bf16 weights are never requantized, which is when amaxes are recorded",
         "Write false, or store quantized weights"),
        ("storage: transformer_engine with a row-only format",
         lambda s: s.config.storage == "transformer_engine"
         and s.config.format in FORMATS and FORMATS[s.config.format].is_row_only
         and f"storage: transformer_engine with format: {s.config.format}",
         "expected a format with columnwise data, which the GEMMs of its tensors read",
         "Set storage: portable, or another format"),
        ("offload_states with step: stock",
         lambda s: s.config.offload_states and s.config.step == "stock",
         "Megatron's code steps states on the device", "Write 0, or step: fused"),
    ),
    *_rules("any run", "refuse",
        ("--use-megatron-fsdp", lambda s: s.ddp is not None and s.ddp.use_megatron_fsdp,
         "it has its own buffers and shards", "Remove it"),
        ("an optimizer without --use-distributed-optimizer",
         lambda s: s.optimizer.optimizer in OPTIMIZERS
         and not s.optimizer.use_distributed_optimizer
         and f"--optimizer {s.optimizer.optimizer} without --use-distributed-optimizer",
         "masters are sharded by Megatron's distributed optimizer",
         "Set use_distributed_optimizer (the plug-in's flag and MoEOptimizerConfig imply it)"),
        *((f"--optimizer {name}", lambda s, name=name: s.optimizer.optimizer == name, reason,
           "Give --optimizer adam, or --optimizer muon")
          for name, reason in _OTHER_OPTIMIZERS.items()),
        ("--optimizer other than adam and muon",
         lambda s: s.optimizer.optimizer not in (*OPTIMIZERS, *_OTHER_OPTIMIZERS)
         and f"--optimizer {s.optimizer.optimizer}",
         "only Adam and Muon are supported", "Give --optimizer adam, or --optimizer muon"),
        ("--optimizer-cpu-offload with step: stock",
         lambda s: s.optimizer.optimizer_cpu_offload and s.config.step == "stock",
         "states on the host require a fused step", "Set step: fused, or remove the flag"),
        ("--optimizer-cpu-offload without --bf16",
         lambda s: s.optimizer.optimizer_cpu_offload and not (s.optimizer.bf16 or s.optimizer.fp16),
         "fp32 weights are their own masters", "Give --bf16, or remove the flag"),
        ("step: fused with what makes a step Megatron's",
         lambda s: s.config.step == "fused" and _without_fusing(s, "step: fused"),
         "a fused step does not support it", "{step}; or set step: auto or step: stock"),
        ("--optimizer-cuda-graph without a fused step",
         lambda s: s.optimizer.optimizer_cuda_graph
         and _without_fusing(s, "--optimizer-cuda-graph"),
         "Megatron's step handles non-finite gradients on the host",
         "{step}; or drop the flag"),
        ("--optimizer-cuda-graph on a GPU without kernels",
         lambda s: s.optimizer.optimizer_cuda_graph and not s.can_capture,
         "a step in plain torch synchronizes with the device; kernels require Triton and "
         "compute capability 8.9 or newer", "Drop the flag", "optimizer"),
        ("--chunked-optimizer-state-offload",
         lambda s: getattr(s.optimizer, "chunked_optimizer_state_offload", False),
         "Megatron moves masters between steps", "Set offload_states"),
        ("offload_states, or --optimizer-cpu-offload, without a fused step",
         lambda s: s.offload_states and _without_fusing(s, _offload(s)),
         "Megatron's step requires states on the device",
         "{step}; or leave states on the device"),
    ),
    *_rules("Muon", "refuse",
        ("use_layer_wise_distributed_optimizer",
         lambda s: s.optimizer.use_layer_wise_distributed_optimizer,
         "Megatron's layer-wise optimizer has its own buffers, shards and checkpoints",
         "Clear it and set use_distributed_optimizer once Megatron has validated its arguments "
         "(the plug-in's flag does)"),
        ("--muon-scalar-optimizer other than adam",
         lambda s: s.optimizer.muon_scalar_optimizer != "adam"
         and f"--muon-scalar-optimizer {s.optimizer.muon_scalar_optimizer}",
         "embeddings, norms, biases and heads take Adam's step", "Give adam"),
        *((f"another {_flag(name)}",
           lambda s, name=name, known=known: getattr(s.optimizer, name) not in known
           and f"{_flag(name)} {getattr(s.optimizer, name)}",
           f"expected {', '.join(known[:-1])} or {known[-1]}", "Give one of them")
          for name, known in MUON_VALUES.items()),
        ("--muon-num-ns-steps below 1", lambda s: s.optimizer.muon_num_ns_steps < 1,
         "an update without an iteration is not orthogonal", "Give 1 or more"),
        ("--muon-use-syrk with a fused step",  # a flag of 0.20
         lambda s: getattr(s.optimizer, "muon_use_syrk", False)
         and not _without_fusing(s, "--muon-use-syrk"),
         "the step's own products would ignore it", "Remove it, or set step: stock"),
        ("--use-precision-aware-optimizer with Muon",
         lambda s: s.optimizer.use_precision_aware_optimizer,
         "it sets dtypes of Adam's moments, and Megatron takes it with Adam alone", "Remove it"),
        ("offload_states, or --optimizer-cpu-offload, with Muon",
         lambda s: (s.optimizer.optimizer_cpu_offload or s.config.offload_states)
         and f"{_offload(s)} with Muon",
         "batches of whole matrices need their momentum on the device",
         "Leave states on the device"),
        ("--optimizer-cuda-graph with --muon-tp-mode duplicated or distributed",
         lambda s: s.optimizer.optimizer_cuda_graph and s.optimizer.muon_tp_mode != "blockwise"
         and any(max(m.tensor_model_parallel_size, _expert_tp(m)) > 1 for m in s.models),
         "ranks would have to replay their collectives together", "Give blockwise, or drop it"),
        ("--moe-single-grouped-bias with Muon",
         lambda s: any(model.moe_single_grouped_bias for model in s.models),
         "biases of all experts in one parameter would count as a matrix", "Remove it"),
        ("--fp16 with Muon", lambda s: s.optimizer.fp16,
         "Megatron's own Muon refuses it, and a fused step does not unscale gradients",
         "Give --bf16"),
        ("--num-distributed-optimizer-instances above 1 with Muon",
         lambda s: s.ddp is not None and s.ddp.num_distributed_optimizer_instances > 1,
         "a matrix has one owner among all data-parallel ranks, and Megatron's layer-wise "
         "optimizer refuses it, too", "Remove it"),
        ("shards of weights with Muon",
         lambda s: next(filter(None, map(_weight_shards, s.models)), None),
         "a matrix would be spread over ranks beside tensor parallelism", "Remove it"),
        ("muon_iteration other than auto with --muon-fp32-matmul-prec other than medium",
         lambda s: s.config.muon_iteration != "auto"
         and s.optimizer.muon_fp32_matmul_prec != "medium"
         and f"muon_iteration: {s.config.muon_iteration} with --muon-fp32-matmul-prec "
         f"{s.optimizer.muon_fp32_matmul_prec}",
         "both set the precision of the iteration", "Give medium, or set muon_iteration: auto"),
        ("muon_iteration: gram with --muon-tp-mode distributed",
         lambda s: s.config.muon_iteration == "gram"
         and s.optimizer.muon_tp_mode == "distributed",
         "the Gram form iterates whole matrices",
         "Give --muon-tp-mode duplicated, or set muon_iteration: fp16"),
        ("muon_gate_up: apart, or muon_iteration other than auto, without a fused step",
         lambda s: (changed := _changed_muon(s.config, "muon_gate_up", "muon_iteration"))
         and _without_fusing(s, changed),
         "Megatron's own Muon has neither", "{step}; or leave these settings at their defaults"),
        ("Megatron's own Muon without emerging-optimizers",
         lambda s: find_package("emerging-optimizers") is None
         and _without_fusing(s, "--optimizer muon"),
         "Megatron's own step calls emerging-optimizers, which cannot be imported",
         "{step}; or run pip install 'moe_optim[muon]'"),
    ),
    *_rules("any model", "refuse",
        ("--qk-clip", _any_model(lambda m: m.qk_clip),
         "Megatron rescales masters as if they were not sharded", "Remove it"),
        ("--fp8-param-gather with --fp8-recipe delayed or custom",
         lambda s: next((f"{flag} with weights kept in it" for flag in s.recipes
                         if flag != TENSORWISE_RECIPE and not native_formats(flag)), None),
         "this package does not support the format of its weights",
         "Drop --fp8-param-gather, or give another recipe"),
        ("a format other than that of Transformer Engine's weights", lambda s: _other_format(s),
         "--fp8-recipe or --fp4-recipe makes the weights",
         "Set --moe-optim-set format=auto, or drop --fp8-param-gather or --fp4-param-gather"),
        ("NVTE_NVFP4_DISABLE_2D_QUANTIZATION=1, or NVTE_NVFP4_4OVER6=weights or all",
         lambda s: _changed_bytes(s.recipes),
         "Transformer Engine's weights would have an unsupported format",
         "Unset the variable"),
        ("weights in several formats",
         lambda s: s.config.format == "auto" and len(s.stored) > 1
         and f"format: auto with weights in {' and '.join(s.stored)}",
         "expected quantized weights of one format", "Build all of them with one recipe", "model"),
        ("quantized weights in no format of this package", lambda s: s.unknown,
         "expected portable or bf16 weights, or MXFP8, NVFP4, blockwise FP8 or FP8 with current "
         "scaling of Transformer Engine",
         "Build with --transformer-impl local, or drop --fp8-param-gather or --fp4-param-gather",
         "model"),
        ("a format without weights to store in it",
         lambda s: not (s.quantized or s.tensorwise or s.accepted)
         and s.config.format not in ("auto", "bf16")
         and f"format: {s.config.format} without weights to store in it",
         "expected portable experts, or quantized weights of Transformer Engine",
         f"{_GIVE_PORTABLE}a recipe of Transformer Engine with its parameter gather; or set "
         "format: bf16"),
        ("compute: mxfp8 with experts of Transformer Engine", lambda s: _disagreeing_compute(s),
         "GEMMs of both directions read one copy, and this format has values of its own in each",
         "Write mxfp8_rows or mxfp8_2d"),
        ("compute without portable experts", lambda s: _unused_compute(s),
         "expected portable experts, or a grid or a format with the same values in both "
         "directions for bf16 experts of Transformer Engine",
         f"{_GIVE_PORTABLE}set compute: null"),
    ),
    *_copied(
        ("--transformer-impl inference_optimized",
         lambda m: m.transformer_impl == "inference_optimized",
         "its inference reads the weights themselves",
         "Give --transformer-impl transformer_engine"),
        ("--moe-single-grouped-weight", lambda m: m.moe_single_grouped_weight,
         "one parameter of all experts has a class of its own", "Remove it"),
        ("--use-transformer-engine-op-fuser", lambda m: m.use_transformer_engine_op_fuser,
         "its fused operations read the weights themselves", "Remove it"),
        ("--cuda-graph-impl over experts",
         lambda m: m.cuda_graph_impl != "none" and _graphs_experts(m.cuda_graph_modules),
         "a replay would read the copy of the step in which it was captured",
         "Give --cuda-graph-modules without moe"),
        ("--params-dtype other than bf16", lambda m: str(m.params_dtype) != "torch.bfloat16",
         "copies are bf16", "Give --bf16"),
        ("--expert-tensor-parallel-num-weight-shards above --expert-tensor-parallel-size",
         lambda m: weight_shards(m)[1] > 1, _SHARDS, "Remove it"),
    ),
    *_rules("quantized weights", "refuse",
        ("--fp16", lambda s: s.optimizer.fp16, "masters are rounded to bf16 before they are "
         "quantized", "Give --bf16"),
        ("--use-nccl-ub with quantized weights", lambda s: s.ddp.nccl_ub,
         "their gather buffers are not registered with NCCL", "Remove it"),
        ("--disable-grad-buffers-cpu-backup with quantized weights",
         lambda s: getattr(s.ddp, "disable_grad_buffers_cpu_backup", False),
         "their gathers keep bytes in that memory between steps", "Remove it"),
        ("--main-params-dtype other than fp32", lambda s: _narrow_masters(s.optimizer),
         "weights are quantized from fp32 masters", "Give fp32"),
        ("--tensor-parallel-num-weight-shards above --tensor-model-parallel-size",
         _any_model(lambda m: weight_shards(m)[0] > 1), _SHARDS, "Remove it"),
        ("--expert-tensor-parallel-num-weight-shards above --expert-tensor-parallel-size",
         _any_model(lambda m: weight_shards(m)[1] > 1), _SHARDS, "Remove it"),
    ),
    *_rules("tensorwise weights", "refuse",
        ("--optimizer-cuda-graph with tensorwise weights",
         lambda s: s.optimizer.optimizer_cuda_graph,
         "ranks reduce amaxes within the step", "Remove it"),
        ("record_amax with tensorwise weights", lambda s: s.config.record_amax,
         "Megatron's buffers hold them, and record nothing", "Set record_amax: false"),
        ("--reuse-grad-buf-for-mxfp8-param-ag with tensorwise weights",
         lambda s: s.ddp.reuse_grad_buf_for_mxfp8_param_ag,
         "Megatron gathers them, and shares that memory for MXFP8 alone", "Remove it"),
        ("offload_states, or --optimizer-cpu-offload, with tensorwise weights",
         lambda s: s.optimizer.optimizer_cpu_offload or s.config.offload_states,
         "their cast would read masters on the host twice, over the link",
         "Leave states on the device"),
    ),
    *_portable(
        ("biases with fused SwiGLU", lambda m: _fuses_swiglu(m) and m.add_bias_linear,
         "Give --disable-bias-linear or --no-bias-swiglu-fusion"),
        ("an activation other than --swiglu or --quick-geglu",
         lambda m: not m.gated_linear_unit or _activation(m) not in ("silu", "quick_gelu"),
         "Give one of the two"),
        ("--activation-func-clamp-value with fused SwiGLU",
         lambda m: _fuses_swiglu(m) and m.activation_func_clamp_value is not None,
         "Give --no-bias-swiglu-fusion"),
        ("--moe-mlp-glu-interleave-size that does not divide --moe-ffn-hidden-size",
         lambda m: m.moe_ffn_hidden_size % (m.moe_mlp_glu_interleave_size or 1), "Give a divisor"),
        ("--use-te-activation-func", lambda m: m.use_te_activation_func, "Remove it"),
        ("--moe-latent-size", lambda m: m.moe_latent_size is not None, "Remove it"),
        ("--expert-tensor-parallel-size that does not divide --moe-ffn-hidden-size",
         lambda m: m.moe_ffn_hidden_size % _expert_tp(m), "Give a divisor"),
        ("--moe-mlp-glu-interleave-size with --expert-tensor-parallel-size above 1",
         lambda m: m.moe_mlp_glu_interleave_size is not None and _expert_tp(m) > 1,
         "Remove one of the two"),
        ("--use-cpu-initialization", lambda m: m.use_cpu_initialization, "Remove it"),
        ("--params-dtype other than bf16", lambda m: str(m.params_dtype) != "torch.bfloat16",
         "Give --bf16"),
        ("--fp8-format or --fp4-format", lambda m: m.fp8 or m.fp4,
         "Remove it, since format and compute quantize portable experts"),
        ("--cuda-graph-impl over experts",
         lambda m: m.cuda_graph_impl != "none" and _graphs_experts(m.cuda_graph_modules),
         "A replay would skip the checks for stale weights; give --cuda-graph-modules without moe"),
        ("--recompute-modules moe_act",
         lambda m: m.recompute_granularity == "selective" and "moe_act" in m.recompute_modules,
         "Give moe, which recomputes the whole layer"),
        ("--offload-modules expert_fc1 or moe_act",
         lambda m: m.fine_grained_activation_offloading
         and not {"expert_fc1", "moe_act"}.isdisjoint(m.offload_modules),
         "Leave these modules out"),
        ("--moe-paged-stash", lambda m: m.moe_paged_stash, "Remove it"),
        ("--use-transformer-engine-op-fuser", lambda m: m.use_transformer_engine_op_fuser,
         "Remove it"),
        ("--expert-tensor-parallel-num-weight-shards with portable experts",
         lambda m: weight_shards(m)[1] > 1, "Remove it"),
    ),
    *_rules("portable experts", "refuse",
        ("--moe-apply-probs-on-input with --moe-router-topk above 1",
         _any_portable(lambda m: m.moe_apply_probs_on_input and m.moe_router_topk > 1),
         "Megatron's experts refuse it in their first forward pass",
         "Give --moe-router-topk 1, or remove it"),
        ("--hidden-size, or --moe-ffn-hidden-size of a tensor-parallel rank, that the blocks of "
         "format or compute do not divide",
         lambda s: next(filter(None, (_partial_blocks(s.config, m) for m in s.portable)), None),
         "expected whole blocks", "Pad the size, or use another format"),
    ),
    *_rules("any configuration", "stock step",
        ("step: stock", lambda s: s.config.step == "stock",
         "it requests Megatron's code", "Set step: fused"),
        ("layout: stock", lambda s: s.config.step == "auto" and s.config.layout == "stock",
         "it guarantees Megatron's bits, and a fused norm may differ in the last bit",
         "Set step: fused"),
        ("backend: reference", lambda s: s.config.step == "auto" and s.config.backend != "auto",
         "it requests plain torch", "Set step: fused"),
    ),
    *_rules("any run", "stock step",
        ("a loss scale (--loss-scale, --fp16)",
         lambda s: s.optimizer.fp16 or s.optimizer.loss_scale is not None,
         "a fused step does not unscale gradients", "Give --bf16 and no --loss-scale"),
        ("masters that Adam holds (--use-precision-aware-optimizer with bf16 weights, or with "
         "--main-params-dtype other than fp32)", lambda s: s.adam_holds_masters,
         "a fused step reads the distributed optimizer's masters; Transformer Engine's Adam, which "
         "is required, holds those of bf16 weights in 2 bytes beside the weight",
         "Give fp32 masters; for bf16 weights set step: fused, whose masters take 4 bytes"),
        ("moments in fp16 or fp8, or of two dtypes (--exp-avg-dtype, --exp-avg-sq-dtype)",
         lambda s: _unfit_moments(s.optimizer),
         "a fused step supports both in fp32, or both in bf16", "Give both fp32 or both bf16"),
        ("--use-megatron-fsdp", lambda s: s.ddp is not None and s.ddp.use_megatron_fsdp,
         "it is refused, unless Megatron's own factory is called", "Remove it"),
        ("an Adam other than Megatron's",
         lambda s: s.adam and f"{s.adam}, an Adam other than Megatron's",
         "a fused step would replace its step, and counts steps by group",
         "Call moe_optim.install() before building the optimizer, and keep Megatron's Adam",
         "optimizer"),
        ("masters on a device without kernels",
         lambda s: s.config.step == "auto" and not s.has_kernels and not s.offload_states
         and not s.has_muon,
         "kernels require Triton and compute capability 8.9 or newer",
         "Set step: fused, which runs in plain torch there", "optimizer"),
    ),
    *_rules("Megatron-Bridge", "refuse",
        ("one weight of all experts with model.moe_mlp_glu_interleave_size",
         lambda s: _linear(s, "one weight of all experts", lambda m: m.expert_layout == "grouped"),
         "Megatron-Bridge permutes the first axis of weights, expected rows",
         "Set optimizer.moe_optim.expert_layout=indexed, or the size null", "model"),
        ("recorded amaxes with model.moe_mlp_glu_interleave_size",
         lambda s: _linear(s, "recorded amaxes", lambda m: m.amax() is not None),
         "Megatron-Bridge permutes the first axis of weights and amaxes, expected rows",
         "Use a format other than nvfp4 and nvfp4_rows, and record_amax=false, or set the size "
         "null", "model"),
    ),
    *_rules("moe-optim train", "refuse",
        ("--context-parallel-size with --transformer-impl local",
         lambda s: getattr(s.args, "context_parallel_size", 1) > 1
         and s.args.transformer_impl == "local",
         "Megatron's own attention reads whole sequences",
         "Give --transformer-impl transformer_engine, or 1"),
        *((f"--{name.replace('_', '-')}", lambda s, name=name: getattr(s.args, name, False),
           "only whole sequences of plain text are read",
           "Remove it, or start pretrain_gpt.py of Megatron-LM")
          for name in ("hybrid_context_parallel", "sft", "fim_data",
                       "dataloader_inter_document_masking")),
    ),
    *_rules("any run", "warn",
        ("--optimizer-cpu-offload with --optimizer-offload-fraction 0",
         lambda s: s.optimizer.optimizer_cpu_offload and not s.offload_states,
         "nothing is on the host", "Give a fraction above 0, or drop the flag"),
        ("--muon-coefficient-type cans with --muon-fp32-matmul-prec medium",
         lambda s: s.has_muon and s.optimizer.muon_coefficient_type == "cans"
         and s.optimizer.muon_fp32_matmul_prec == "medium",
         "in bf16 it diverges on matrices of low rank, as of experts with few tokens",
         "Give --muon-fp32-matmul-prec high, or another type"),
        ("muon_gate_up, muon_iteration or muon_workspace_mib without Muon",
         lambda s: not s.has_muon
         and (changed := _changed_muon(s.config)) and f"{changed} without Muon",
         "without effect", "Give --optimizer muon, or leave these settings at their defaults"),
    ),
    *_rules("Muon's arguments", "note",
        ("--no-use-layer-wise-param-layout",
         lambda s: not getattr(s.args, "use_layer_wise_param_layout", True),  # YAML may lack it
         "it lays out buffers of Megatron's layer-wise optimizer, which is not built",
         "Nothing has to be changed"),
    ),
    *_rules("any run", "note",
        ("--reuse-grad-buf-for-mxfp8-param-ag",
         lambda s: s.optimizer.reuse_grad_buf_for_mxfp8_param_ag,
         "gathers of quantized weights need no memory beside the gradients', with or without "
         "the flag", "Nothing has to be changed"),
        ("--optimizer-cpu-offload",
         lambda s: s.optimizer.optimizer_cpu_offload and s.offload_states > 0,
         "it sets offload_states: states are stepped on the device, in chunks whose copies "
         "overlap, so that --overlap-cpu-optimizer-d2h-h2d, --use-torch-optimizer-for-cpu-offload "
         "and --no-pin-cpu-* change nothing", "Nothing has to be changed"),
    ),
)
# fmt: on
"""All rules, in reporting order."""


def _changed_bytes(recipes: Sequence[str]) -> str | None:
    for recipe, variable, values in _CHANGED_BYTES:
        if recipe in recipes and (value := os.environ.get(variable)) in values:
            return f"{variable}={value} with {recipe}"
    return None


def _other_format(setup: Setup) -> str | None:
    accepted = dict.fromkeys(setup.accepted)
    if not accepted or setup.config.format in ("auto", *accepted):
        return None
    found = f"format: {setup.config.format} with weights that take {' or '.join(accepted)}"
    if {FP8_BLOCK.name, FP8_BLOCK_FP32.name} == {setup.config.format, *accepted}:
        found += f" ({'with' if FP8_BLOCK_FP32.name in accepted else 'without'} {FP32_SCALES}=1)"
    return found


def _disagreeing_compute(setup: Setup) -> str | None:
    compute = setup.config.compute
    is_copied = setup.has_te and setup.config.format == "bf16" and compute in FORMATS
    if not is_copied or FORMATS[compute].directions_agree:
        return None
    return f"compute: {compute} with experts of Transformer Engine"


def _unused_compute(setup: Setup) -> str | None:
    compute = setup.config.compute
    is_own = setup.stored and compute == setup.config.format  # same as null
    is_copied = setup.has_te and copied_format(setup.config) is not None
    is_used = setup.has_portable or is_own or is_copied or compute in (None, "bf16")
    if is_used or _disagreeing_compute(setup):
        return None
    return f"compute: {compute} without portable experts"


def _without_fusing(setup: Setup, flag: str) -> str | None:
    reason = why_stock_step(setup) or setup.stock_reason
    return reason and f"{flag} with {reason}"


def _changed_muon(config: Any, *names: str) -> str | None:
    """Return Muon's settings in ``config`` that differ from their defaults; None if none does.

    ``names`` are the settings to look at; none for all.
    """
    changed = [
        f"{one.name}: {value}"
        for one in fields(config)
        if (one.name in names if names else one.name.startswith("muon_"))
        if (value := getattr(config, one.name)) != one.default
    ]
    return " and ".join(changed) or None


def _weight_shards(model: Any) -> str | None:
    flags = ("--tensor-parallel-num-weight-shards", "--expert-tensor-parallel-num-weight-shards")
    sizes = zip(flags, weight_shards(model), strict=True)
    return next((f"{flag} with Muon" for flag, size in sizes if size > 1), None)


def _offload(setup: Setup) -> str:
    if setup.optimizer.optimizer_cpu_offload:
        return "--optimizer-cpu-offload"
    return f"offload_states: {setup.offload_states}"


def _narrow_masters(optimizer: Any) -> str | None:
    dtype = str(optimizer.main_params_dtype).removeprefix("torch.")
    if not optimizer.use_precision_aware_optimizer or dtype == "float32":
        return None
    return f"--main-params-dtype {'fp16' if dtype == 'float16' else dtype}"


def _unfit_moments(optimizer: Any) -> str | None:
    first, second = str(optimizer.exp_avg_dtype), str(optimizer.exp_avg_sq_dtype)
    is_fit = first == second and first in ("torch.float32", "torch.bfloat16")
    said = f"moments in {first} and {second} (--exp-avg-dtype, --exp-avg-sq-dtype)"
    return None if is_fit else said


def _activation(model: Any) -> str:
    return getattr(model.activation_func, "__name__", "")


def _fuses_swiglu(model: Any) -> bool:
    """Return whether Megatron would use its fused SwiGLU, which lacks interleaved rows."""
    is_fused = model.bias_activation_fusion and model.moe_mlp_glu_interleave_size is None
    return is_fused and _activation(model) == "silu"


def _expert_tp(model: Any) -> int:
    return int(model.expert_tensor_parallel_size or model.tensor_model_parallel_size)


def _graphs_experts(modules: Any) -> bool:
    """Return whether CUDA graphs capture experts: ``moe``, or no module (whole layers)."""
    return not modules or "moe" in [getattr(module, "name", module) for module in modules]


def _partial_blocks(config: Any, model: Any) -> str | None:
    """Return the first weight of portable experts that does not fill the blocks of its format."""
    stored = "mxfp8" if config.format == "auto" else config.format
    name = config.compute if stored == "bf16" else stored
    if name not in FORMATS:
        return None
    hidden, ffn = model.hidden_size, model.moe_ffn_hidden_size // _expert_tp(model)
    format = FORMATS[name]
    for linear, rows, cols in (("linear_fc1", 2 * ffn, hidden), ("linear_fc2", hidden, ffn)):
        if not format.fits(rows, cols):
            length = format.dimension_multiple
            return f"{linear} [{rows}, {cols}] in {name}, whose blocks have {length} elements"
    return None


def _linear(setup: Setup, what: str, test: Callable[[Any], object]) -> str | None:
    name = next((name for name, linear in setup.linears.items() if test(linear)), None)
    return name and f"{name}: {what} with model.moe_mlp_glu_interleave_size"
