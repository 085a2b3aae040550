"""Table of all Megatron names that moe_optim rebinds, with the reason for each.

A row is id, target, replacement, form of the target, reason, and what makes it obsolete; see
:class:`~moe_optim.integration.engine.Patch`.
"""

from typing import Any

from moe_optim.integration.engine import Patch


def _patches(*rows: tuple[str, str, str, str, str, str], **options: Any) -> tuple[Patch, ...]:
    return tuple(Patch(*row, **options) for row in rows)


_CORE, _TRAINING, _OURS = "megatron.core", "megatron.training", "moe_optim.integration"
_EXPERTS = f"{_CORE}.transformer.moe.experts:TEGroupedMLP"
_BUFFER = f"{_CORE}.distributed.param_and_grad_buffer"
_DDP = f"{_CORE}.distributed.distributed_data_parallel"
_OPTIMIZER = f"{_CORE}.optimizer"
_OF_DISTRIBUTED = f"{_OPTIMIZER}.distrib_optimizer"
_CHECKPOINTING = f"{_CORE}.dist_checkpointing"
_STRATEGY = f"{_CHECKPOINTING}.strategies.torch:TorchDistLoadShardedStrategy"

# fmt: off
DATASETS = _patches(
    ("dataset-helpers", f"{_CORE}.datasets.utils:compile_helpers",
     f"{_OURS}.dataset_helpers:compile_helpers", "()",
     "the wheel ships the dataset helper built but not its Makefile, and exits on make",
     "the wheel skips the compilation of a helper that is already importable"),
)
"""Required to train from the megatron-core wheel, with or without the plug-in."""

ENTRY = _patches(
    ("describe-run", f"{_TRAINING}.training:setup_model_and_optimizer",
     "moe_optim.commands.train.describe_run:setup_model_and_optimizer",
     "(model_type, model_provider_func, checkpointing_context, cfg_container, pg_collection)",
     "pretrain() keeps model and optimizer to itself, and summaries describe both",
     "pretrain() returns them or takes a callback"),
)
"""Required to describe a run, with or without the plug-in."""

TRAIN: tuple[Patch, ...] = (*DATASETS, *ENTRY)
"""Required by ``moe-optim train``, with or without the plug-in."""

SCRIPT = _patches(
    ("script-arguments", f"{_TRAINING}.arguments:add_megatron_arguments",
     f"{_OURS}.script_arguments:add_megatron_arguments", "(parser)",
     "the parser of an unmodified script refuses flags that it does not know",
     "Megatron accepts flags of other installed packages"),
    ("script-validation", f"{_TRAINING}.arguments:validate_args",
     f"{_OURS}.script_arguments:validate_args", "(args, defaults)",
     "Muon turns off the distributed optimizer, and layers of a missing Transformer Engine end in "
     "a TypeError",
     "Megatron's Muon is a distributed optimizer, and Transformer Engine is checked before its "
     "layers are built"),
    ("script-yaml", f"{_TRAINING}.yaml_arguments:validate_yaml",
     f"{_OURS}.script_arguments:validate_yaml", "(args, defaults)",
     "--yaml-cfg builds no GPT model: one name is required twice, and refused twice",
     "validate_yaml reads account_for_embedding_in_pipeline_split of language_model"),
)
"""Required by dry runs and, with ``--use-moe-grouped-optim``, by ``moe-optim run`` and by plain
``python`` after ``moe-optim enable``."""

ADAM = _patches(
    *((f"adam:{module.rpartition('.')[2]}.{name}", f"{module}:{name}",
       f"moe_optim.optimizer.adam:{replacement}", form,
       "torch's Adam keeps `step` where the distributed optimizer cannot save or load it",
       "megatron-core saves and loads torch's Adam")
      for module, name, replacement, form in (
          (_OPTIMIZER, "Adam", "GroupStepAdam", "class"),
          (_OPTIMIZER, "USING_PYTORCH_OPTIMIZER", "USING_PYTORCH_OPTIMIZER", "bool"),
          (_OF_DISTRIBUTED, "HAVE_APEX_OR_TE", "HAVE_APEX_OR_TE", "bool"),
          (_OF_DISTRIBUTED, "USING_APEX_OPTIMIZER", "USING_APEX_OPTIMIZER", "bool"),
          (f"{_OPTIMIZER}.optimizer_config", "OptimizerConfig.__post_init__",
           "check_optimizer_config", "(self)"),
      )),
    not_needed_with=("transformer_engine", "apex.optimizers"),
)
"""Required without the fused optimizers of Transformer Engine and apex."""

CPU = (
    *_patches(
        ("splits-on-host", f"{_CORE}.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
         f"{_OURS}.cpu_runtime:maybe_move_tensor_to_cpu", "(tensor, as_numpy, record_stream)",
         "tensors already on the host are not converted to the requested array",
         "the token dispatcher converts split sizes wherever they lie"),
        ("gathers-of-bytes", f"{_BUFFER}:dist_all_gather_func",
         f"{_OURS}.cpu_runtime:all_gather_bytes", "(output_tensor, input_tensor, group, async_op)",
         "gloo treats all tensors of a call as the first one's dtype",
         "gloo gathers tensors of several dtypes at once"),
        ("local-mtp", f"{_CORE}.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec",
         f"{_OURS}.cpu_runtime:get_gpt_mtp_block_spec",
         "(config, spec, use_transformer_engine, vp_stage, pp_rank)",
         "Megatron-Bridge builds MTP layers of Transformer Engine for any model",
         "Megatron-Bridge builds MTP layers like the model's"),
    ),
    *_patches(
        ("no-inference-linears",
         f"{_CORE}.transformer.multi_token_prediction:is_inference_column_parallel_linear",
         f"{_OURS}.cpu_runtime:is_inference_column_parallel_linear", "(module)",
         "megatron-core 0.20 requires classes that are mocks without Transformer Engine",
         "multi-token prediction is built without Transformer Engine"),
        only_if_there=True,
    ),
)
"""Required by the CPU runtime, in addition to its redirections in torch."""

EXPERTS = _patches(
    ("local-experts", f"{_CORE}.models.backends:LocalSpecProvider.grouped_mlp_modules",
     "moe_optim.experts.module:grouped_mlp_modules", "(self, moe_use_grouped_gemm)",
     "the local spec ignores --moe-grouped-gemm and loops over experts",
     "the local spec takes its expert module from the configuration"),
)
"""Patches for portable experts."""

TE_EXPERTS = _patches(
    ("te-experts", f"{_EXPERTS}.__init__", "moe_optim.experts.weight_copies:build_experts",
     "(self, num_local_experts, config, submodules, pg_collection, name)",
     "GEMMs of Transformer Engine's experts read their weights, not a copy of them",
     "a grouped linear takes a function that prepares its weights"),
    is_deferred=True,
)
"""Patches for Transformer Engine's experts."""

COPIES = _patches(
    ("first-microbatch", f"{_CORE}.transformer.module:MegatronModule.set_is_first_microbatch",
     "moe_optim.experts.weight_copies:set_is_first_microbatch", "(self)",
     "only models with FP8 or FP4 recipes learn that a step begins",
     "every model is told of its first microbatch"),
)
"""Patches applied once Transformer Engine's experts read quantized copies of their weights."""

OPTIMIZER = (
    *_patches(
        ("param-and-grad-buffer", f"{_DDP}:_ParamAndGradBuffer",
         "moe_optim.buckets.buffer:GroupedParamAndGradBuffer", "class",
         "DistributedDataParallel constructs the buffer by name",
         "DistributedDataParallel accepts a buffer class"),
        ("bucket-group", f"{_BUFFER}:_ParamAndGradBucketGroup",
         "moe_optim.buckets.bucket_group:GroupedBucketGroup", "class",
         "partition_buckets constructs bucket groups by name",
         "partition_buckets accepts a bucket-group class"),
        ("partition-buckets", f"{_DDP}:partition_buckets",
         "moe_optim.buckets.bucket_group:partition_buckets",
         "(buffers, force_single_bucket_group, reduce_scatter_with_fp32_accumulation)",
         "all bf16 buckets are merged into the group of the last quantized one",
         "quantized and other buckets are grouped apart"),
        ("quantized-storage", f"{_BUFFER}:_param_uses_quantized_storage",
         "moe_optim.buckets.buffer:_param_uses_quantized_storage", "(param)",
         "only Transformer Engine's classes count as quantized", "a parameter can say so itself"),
        ("shared-buffer", f"{_BUFFER}:is_grouped_mxfp8tensor",
         "moe_optim.buckets.buffer:is_grouped_mxfp8tensor", "(tensor)",
         "the buffer allocates memory for the parameter unless it knows the weight's class",
         "a parameter can say so itself"),
        ("shared-memory-flag", f"{_DDP}_config:DistributedDataParallelConfig.__post_init__",
         "moe_optim.buckets.buffer:check_ddp_config", "(self)",
         "--reuse-grad-buf-for-mxfp8-param-ag is taken with --fp8-param-gather alone",
         "a parameter can say so itself"),
    ),
    *_patches(
        *((id, f"{_CORE}.full_cuda_graph:FullCudaGraphWrapper.{name}",
           f"moe_optim.buckets.replay:{replacement}", form,
           "a replay runs only kernels, and buckets track on the host what they hold",
           "a graph calls back before and after its replay")
          for id, name, replacement, form in (
              ("graph-begins", "data_read", "begin_iteration",
               "(self, data_iterator, model, training, num_microbatches)"),
              ("graph-ends", "next_iter", "end_iteration", "(self, stage)"),
          )),
        ("mxfp8-2d-recipe", f"{_CORE}.fp8_utils:get_fp8_recipe",
         "moe_optim.weights.te.recipe:get_fp8_recipe", "(config)",
         "no flag selects square blocks for Transformer Engine's MXFP8 weights",
         "--fp8-recipe has a value for MXFP8 with square blocks"),
        is_deferred=True,
    ),
    *_patches(
        *((f"group-params:{module.rpartition('.')[2]}", f"{module}:group_params_for_buffers",
           "moe_optim.buckets.matrix_buffers:group_params_for_buffers",
           "(params, grad_reduce_in_fp32)",
           "Muon's matrices share buffers with other parameters unless they are tagged",
           "an optimizer chooses which parameters share a buffer")
          for module in (_DDP, _OF_DISTRIBUTED)),
        other_forms=("(params, grad_reduce_in_fp32, merge_layerwise_fp8_grads)",),
    ),
    *_patches(
        ("optimizer-buckets", f"{_OF_DISTRIBUTED}:partition_buckets",
         "moe_optim.buckets.bucket_group:partition_buckets_of_optimizer",
         "(buffers, force_single_bucket_group, reduce_scatter_with_fp32_accumulation)",
         "it accepts one quantized buffer, and its result is never used",
         "the optimizer takes the groups of DistributedDataParallel"),
        ("param-layout", f"{_OF_DISTRIBUTED}:DistributedOptimizer._compute_per_buffer_param_layout",
         "moe_optim.buckets.buffer:AlignedDistributedOptimizer._compute_per_buffer_param_layout",
         "static (params, bucket_size, data_parallel_world_size, ddp_config, param_indices)",
         "the layout is computed by a method of the base class, called by its name",
         "the layout is computed by the optimizer's own class"),
        ("distributed-optimizer", f"{_OPTIMIZER}:DistributedOptimizer",
         "moe_optim.optimizer.distributed:GroupedDistributedOptimizer", "class",
         "the optimizer factory constructs the class by name",
         "OptimizerConfig accepts a distributed-optimizer class"),
        ("chained-optimizer", f"{_OPTIMIZER}:ChainedOptimizer",
         "moe_optim.optimizer.chained:GroupedChainedOptimizer", "class",
         "no hook lies between the gradient norm and the first thing a step changes",
         "the optimizer asks a policy what to do with a non-finite norm"),
    ),
    *_patches(
        ("state-to-save", f"{_TRAINING}.checkpointing:generate_state_dict",
         "moe_optim.checkpoint.saving:generate_state_dict",
         "(args, model, optimizer, opt_param_scheduler, rng_state, iteration, optim_sd_kwargs, "
         "model_sd_kwargs, rerun_state)",
         "amaxes of experts that are cut over ranks are reduced before keys are walked",
         "a model can prepare itself for a save"),
        is_deferred=True,
    ),
    *_patches(
        ("get-megatron-optimizer", f"{_TRAINING}.training:get_megatron_optimizer",
         "moe_optim.optimizer.factory:get_installed_optimizer",
         "(config, model_chunks, config_overrides, use_gloo_process_groups, pg_collection, "
         "dump_param_to_param_group_map)",
         "training loops of Megatron and others import the factory by name",
         "training loops take the optimizer from its configuration"),
        is_imported_by_name=True,
    ),
)
"""Patches for this package's buffers, bucket groups and optimizer."""

CHECKPOINTS = _patches(
    ("load-checkpoint", f"{_CHECKPOINTING}:load", "moe_optim.checkpoint.loading:load",
     "(sharded_state_dict, checkpoint_dir, sharded_strategy, validate_access_integrity, strict, "
     "verify_integrity, process_group)",
     "nothing tells an optimizer what a checkpoint holds before it asks for it",
     "sharded_state_dict is given the checkpoint that will be loaded"),
    other_forms=("(sharded_state_dict, checkpoint_dir, sharded_strategy, "
                 "validate_access_integrity, strict, verify_integrity)",),
    is_deferred=True,
) + _patches(
    *((f"common-state:{module}", f"{_CORE}.{module}:load_common_state_dict",
       "moe_optim.checkpoint.loading:load_common_state_dict", "(checkpoint_dir)",
       "it reads a checkpoint first, runs code named there, and errors name no file",
       "Megatron looks for all files first, and unpickles only plain data")
      for module in ("dist_checkpointing", "dist_checkpointing.serialization")),
    *((f"checked-reading:{module.rpartition('.')[2]}",
       f"{_CHECKPOINTING}.{module}:_get_filesystem_reader",
       "moe_optim.checkpoint.load_session:get_filesystem_reader",
       "(checkpoint_dir, cache_metadata, async_strategy)",
       "torch verifies no checksums, and unpickles anything",
       "torch verifies the checksums of records, and unpickles only plain data")
      for module in ("strategies.torch", "serialization")),
    ("load-together", f"{_STRATEGY}.load", "moe_optim.checkpoint.load_session:load_tensors",
     "(self, sharded_state_dict, checkpoint_dir, async_strategy)",
     "a rank that finds damage leaves the others waiting for it",
     "an error of one rank is raised on all that load"),
    ("save-checkpoint", f"{_CHECKPOINTING}:save", "moe_optim.checkpoint.saving:save",
     "(sharded_state_dict, checkpoint_dir, sharded_strategy, validate_access_integrity, "
     "async_sharded_save, preprocess_common_before_consistancy_check, content_metadata, "
     "async_strategy, verify_integrity)",
     "an iteration saved again looks whole before it is, and no checksum is recorded",
     "metadata.json is removed first, and the default save records checksums"),
    ("staged-values",
     f"{_CHECKPOINTING}.strategies.filesystem_async:FileSystemWriterAsync.prepare_write_data",
     "moe_optim.checkpoint.staging:prepare_write_data", "(self, plan, planner)",
     "all that a rank saves is copied to the host before the first byte is written",
     "a synchronous save copies one chunk at a time"),
    ("te-amaxes", f"{_EXPERTS}.sharded_state_dict",
     "moe_optim.calibration.state_entries:sharded_state_dict",
     "(self, prefix, sharded_offsets, metadata)",
     "Transformer Engine's linears save their weights, and nothing recorded of these",
     "a parameter can say what is saved beside it"),
    ("tensor-metadata", f"{_STRATEGY}.load_tensors_metadata",
     "moe_optim.checkpoint.loading:load_tensors_metadata", "(self, checkpoint_dir, metadata)",
     "it gives torch.empty all that torch keeps of a tensor, since 2.15 also strides",
     "strict loads work with torch 2.15"),
    is_deferred=True,
)
"""Patches that check a checkpoint before it is read, and let the optimizer adapt to its layout."""

CHECKPOINTS_OF_RANKS = (
    *_patches(
        *((f"save-files-of-ranks:{module}", f"{_TRAINING}.{module}:save_checkpoint",
           f"moe_optim.checkpoint.saving:{replacement}",
           "(iteration, model, optimizer, opt_param_scheduler, "
           "num_floating_point_operations_so_far, checkpointing_context, pipeline_rank, "
           "expert_rank, tensor_rank, pipeline_parallel, expert_parallel, non_persistent_ckpt, "
           "train_data_iterator, preprocess_common_state_dict_fn, release, tp_group, pp_group, "
           "dp_cp_group, dp_group, expt_dp_group, rng_state_key_prefix)",
           "--ckpt-format torch records neither checksums nor that all files are there",
           "--ckpt-format torch writes what it consists of when all of it is there")
          for module, replacement in (("checkpointing", "save_checkpoint"),
                                      ("training", "save_checkpoint_in_loop"))),
        ("load-files-of-ranks", f"{_TRAINING}.checkpointing:_get_checkpoint_format",
         "moe_optim.checkpoint.loading:get_checkpoint_format", "(checkpoint_name, args)",
         "--ckpt-format torch compares no checksums, and exits with 0 where a file is torn",
         "--ckpt-format torch compares checksums of what it reads"),
        is_deferred=True,
    ),
    *_patches(
        ("load-model-of-ranks", f"{_TRAINING}.checkpointing:load_checkpoint",
         "moe_optim.checkpoint.loading:load_checkpoint",
         "(ddp_model, optimizer, opt_param_scheduler, load_arg, strict, checkpointing_context, "
         "skip_load_to_model_and_opt, tp_group, pp_group, dp_cp_group, dp_group, expt_dp_group, "
         "rng_state_key_prefix)",
         "files of another model end in errors that name tensors, or one argument of many",
         "it compares all arguments that shape a model"),
        is_deferred=True,
        is_imported_by_name=True,
    ),
)
"""Patches for files of ranks: checksums of ``--ckpt-format torch``, and errors of other models."""

CONFIGURATIONS: tuple[Patch, ...] = tuple(
    patch for patch in (*ADAM, *OPTIMIZER) if patch.target.endswith("Config.__post_init__")
)
"""Patches that permit configurations which Megatron would refuse."""

INSTALLED: tuple[Patch, ...] = (
    *ADAM, *EXPERTS, *TE_EXPERTS, *OPTIMIZER, *CHECKPOINTS, *CHECKPOINTS_OF_RANKS
)
"""Patches applied by ``install()``."""

BRIDGE = _patches(
    *((f"bridge:{module}", f"megatron.bridge.peft.{module}:get_adapter_attributes_from_linear",
       f"{_OURS}.bridge:get_adapter_attributes_from_linear",
       "(m, is_expert, pg_collection, sequence_parallel_input_regather)",
       "LoRA refuses linears of classes that Megatron-Bridge does not know",
       "Megatron-Bridge asks a linear itself how it is cut")
      for module in ("lora", "canonical_lora")),
    only_if_there=True,
)
"""Required to adapt portable experts with Megatron-Bridge, whose optimizer configuration applies
them; not a part of Megatron, and therefore not of ``PATCHES``."""

PATCHES: tuple[Patch, ...] = (
    *TRAIN, *SCRIPT, *ADAM, *CPU, *(patch for patch in INSTALLED if patch not in ADAM), *COPIES
)
# fmt: on
