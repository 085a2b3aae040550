"""What each page of ``docs/api`` documents."""

from collections.abc import Mapping
from types import MappingProxyType

API: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "calibration": (
            "moe_optim.calibrate",
            "moe_optim.calibrated_amax",
            "moe_optim.calibrated_input_amax",
            "moe_optim.set_calibrated_amax",
            "moe_optim.set_calibrated_input_amax",
            "moe_optim.synchronize_amax",
            "moe_optim.amaxes_to_modelopt",
            "moe_optim.amaxes_from_modelopt",
        ),
        "checkpoints": (
            "moe_optim.commands.conversion.opening.open_checkpoint",
            "moe_optim.checkpoint.files.reader.*",
            "moe_optim.checkpoint.files.torch_dist.TorchDistReader",
            "moe_optim.commands.conversion.torch_dist_writer.TorchDistWriter",
            "moe_optim.commands.conversion.safetensors_files.SafetensorsReader",
            "moe_optim.commands.conversion.layer_view.LayerView",
            "moe_optim.commands.conversion.conversion.*",
            "moe_optim.commands.conversion.comparison.*",
            "moe_optim.checkpoint.integrity.*",
        ),
        "configuration": (
            "moe_optim.MoEOptimConfig",
            "moe_optim.load_recipe",
            "moe_optim.Recipe",
            "moe_optim.config.recipes.unmet_requirements",
            "moe_optim.config.recipes.check_requirements",
        ),
        "errors": ("moe_optim.errors.*",),
        "expert-layouts": (
            "moe_optim.convert_state_dict",
            "moe_optim.experts.keys.conversion.convert_expert_set",
            "moe_optim.experts.keys.finding.find_expert_sets",
            "moe_optim.experts.keys.layouts.*",
        ),
        "formats": ("moe_optim.get_format", "moe_optim.formats.*"),
        "health": ("moe_optim.formats.health_figures.*",),
        "modules": (
            "moe_optim.GroupedLinear",
            "moe_optim.weights.recorded_amax.RecordsAmax",
            "moe_optim.GroupedWeight",
            "moe_optim.weights.storage.WeightStorage",
            "moe_optim.weights.storage.PortableStorage",
        ),
        "partitions": (
            "moe_optim.infer_partition",
            "moe_optim.formats.partition.*",
            "moe_optim.infer_gemm_partition",
            "moe_optim.formats.gemm_partition.*",
        ),
        "quantizing": (
            "moe_optim.quantize",
            "moe_optim.dequantize",
            "moe_optim.fake_quantize",
            "moe_optim.quantize_part",
            "moe_optim.parts.ReduceMax",
        ),
        "rollouts": (
            "moe_optim.rollout.stacked_experts.plan_transfers",
            "moe_optim.rollout.stacked_experts.stacked_experts",
            "moe_optim.rollout.transfers.execute",
            "moe_optim.rollout.gpu_sharing.share_tensors",
            "moe_optim.rollout.gpu_sharing.open_tensors",
            "moe_optim.rollout.gpu_sharing.SharedTensors",
            "moe_optim.rollout.shards.*",
            "moe_optim.rollout.transfer_plan.*",
            "moe_optim.rollout.changed_words.*",
        ),
        "reference": ("moe_optim.formats.reference.*",),
        "reference-muon": (
            "moe_optim.formats.reference.muon.MuonHyper",
            "moe_optim.formats.reference.muon.momentum_into",
            "moe_optim.formats.reference.newton_schulz.Orthogonalization",
            "moe_optim.formats.reference.newton_schulz.orthogonalize",
            "moe_optim.formats.reference.muon.apply_into",
        ),
        "tables": (
            "moe_optim.kernels.plan.Plan",
            "moe_optim.kernels.member_table.MemberTable",
            "moe_optim.kernels.table_entry.TableEntry",
            "moe_optim.kernels.step_table.StepTable",
            "moe_optim.kernels.adam_state.MasterState",
            "moe_optim.kernels.adam_state.AdamState",
            "moe_optim.formats.reference.adam.Hyper",
            "moe_optim.kernels.norm.NormTable",
            "moe_optim.kernels.norm.NormInput",
            "moe_optim.kernels.health.HealthTable",
            "moe_optim.kernels.health.HealthEntry",
        ),
        "training": (
            "moe_optim.install",
            "moe_optim.uninstall",
            "moe_optim.get_megatron_optimizer",
            "moe_optim.MoEOptimizerConfig",
            "moe_optim.use_cpu",
            "moe_optim.describe",
            "moe_optim.merge_adapters",
            "moe_optim.export_weights",
            "moe_optim.Description",
            "moe_optim.optimizer.description.WeightsOfAFormat",
        ),
    }
)
"""Block of a page -> names on it, in order; ``module.*`` stands for all public names of a module,
without those that the block names otherwise.
"""
LEFT_OUT = frozenset({"moe_optim.errors.refuse", "moe_optim.errors.raise_faults"})
"""Names of documented modules that are no part of the API."""
