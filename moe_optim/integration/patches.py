"""Table of all Megatron names that moe_optim rebinds, with the reason for each."""

from dataclasses import replace

from moe_optim.integration.engine import Patch


def _deferred(*patches: Patch) -> tuple[Patch, ...]:
    return tuple(replace(patch, is_deferred=True) for patch in patches)


_FUSED_OPTIMIZERS = ("transformer_engine", "apex.optimizers")

DATASETS: tuple[Patch, ...] = (
    Patch(
        id="dataset-helpers",
        target="megatron.core.datasets.utils:compile_helpers",
        replacement="moe_optim.integration.dataset_helpers:compile_helpers",
        form="()",
        because="the wheel ships the dataset helper built but not its Makefile, and exits on make",
        remove_when="the wheel skips the compilation of a helper that is already importable",
    ),
)
"""Required to train from the megatron-core wheel, with or without the plug-in."""

ENTRY: tuple[Patch, ...] = (
    Patch(
        id="describe-run",
        target="megatron.training.training:setup_model_and_optimizer",
        replacement="moe_optim.commands.train.describe_run:setup_model_and_optimizer",
        form="(model_type, model_provider_func, checkpointing_context, cfg_container, "
        "pg_collection)",
        because="pretrain() keeps model and optimizer to itself, and summaries describe both",
        remove_when="pretrain() returns them or takes a callback",
    ),
)
"""Required to describe a run, with or without the plug-in."""

TRAIN: tuple[Patch, ...] = (*DATASETS, *ENTRY)
"""Required by ``moe-optim train``, with or without the plug-in."""

SCRIPT: tuple[Patch, ...] = (
    Patch(
        id="script-arguments",
        target="megatron.training.arguments:add_megatron_arguments",
        replacement="moe_optim.integration.script_arguments:add_megatron_arguments",
        form="(parser)",
        because="the parser of an unmodified script refuses flags that it does not know",
        remove_when="Megatron accepts flags of other installed packages",
    ),
    Patch(
        id="script-validation",
        target="megatron.training.arguments:validate_args",
        replacement="moe_optim.integration.script_arguments:validate_args",
        form="(args, defaults)",
        because="Muon turns off the distributed optimizer, and layers of a missing "
        "Transformer Engine end in a TypeError",
        remove_when="Megatron's Muon is a distributed optimizer, and Transformer Engine is "
        "checked before its layers are built",
    ),
    Patch(
        id="script-yaml",
        target="megatron.training.yaml_arguments:validate_yaml",
        replacement="moe_optim.integration.script_arguments:validate_yaml",
        form="(args, defaults)",
        because="--yaml-cfg builds no GPT model: one name is required twice, and refused twice",
        remove_when="validate_yaml reads account_for_embedding_in_pipeline_split of language_model",
    ),
)
"""Required by dry runs and, with ``--use-moe-grouped-optim``, by ``moe-optim run`` and by plain
``python`` after ``moe-optim enable``."""

ADAM: tuple[Patch, ...] = tuple(
    Patch(
        id=f"adam:{module.rpartition('.')[2]}.{name}",
        target=f"{module}:{name}",
        replacement=f"moe_optim.optimizer.adam:{replacement}",
        form=form,
        because="torch's Adam keeps `step` where the distributed optimizer cannot save or load it",
        remove_when="megatron-core saves and loads torch's Adam",
        not_needed_with=_FUSED_OPTIMIZERS,
    )
    for module, name, replacement, form in (
        ("megatron.core.optimizer", "Adam", "GroupStepAdam", "class"),
        ("megatron.core.optimizer", "USING_PYTORCH_OPTIMIZER", "USING_PYTORCH_OPTIMIZER", "bool"),
        ("megatron.core.optimizer.distrib_optimizer", "HAVE_APEX_OR_TE", "HAVE_APEX_OR_TE", "bool"),
        (
            "megatron.core.optimizer.distrib_optimizer",
            "USING_APEX_OPTIMIZER",
            "USING_APEX_OPTIMIZER",
            "bool",
        ),
        (
            "megatron.core.optimizer.optimizer_config",
            "OptimizerConfig.__post_init__",
            "check_optimizer_config",
            "(self)",
        ),
    )
)
"""Required without the fused optimizers of Transformer Engine and apex."""

CPU: tuple[Patch, ...] = (
    Patch(
        id="splits-on-host",
        target="megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        replacement="moe_optim.integration.cpu_runtime:maybe_move_tensor_to_cpu",
        form="(tensor, as_numpy, record_stream)",
        because="tensors already on the host are not converted to the requested array",
        remove_when="the token dispatcher converts split sizes wherever they lie",
    ),
    Patch(
        id="no-inference-linears",
        target="megatron.core.transformer.multi_token_prediction:"
        "is_inference_column_parallel_linear",
        replacement="moe_optim.integration.cpu_runtime:is_inference_column_parallel_linear",
        form="(module)",
        because="megatron-core 0.20 requires classes that are mocks without Transformer Engine",
        remove_when="multi-token prediction is built without Transformer Engine",
        only_if_there=True,
    ),
    Patch(
        id="gathers-of-bytes",
        target="megatron.core.distributed.param_and_grad_buffer:dist_all_gather_func",
        replacement="moe_optim.integration.cpu_runtime:all_gather_bytes",
        form="(output_tensor, input_tensor, group, async_op)",
        because="gloo treats all tensors of a call as the first one's dtype",
        remove_when="gloo gathers tensors of several dtypes at once",
    ),
    Patch(
        id="local-mtp",
        target="megatron.core.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec",
        replacement="moe_optim.integration.cpu_runtime:get_gpt_mtp_block_spec",
        form="(config, spec, use_transformer_engine, vp_stage, pp_rank)",
        because="Megatron-Bridge builds MTP layers of Transformer Engine for any model",
        remove_when="Megatron-Bridge builds MTP layers like the model's",
    ),
)
"""Required by the CPU runtime, in addition to its redirections in torch."""

EXPERTS: tuple[Patch, ...] = (
    Patch(
        id="local-experts",
        target="megatron.core.models.backends:LocalSpecProvider.grouped_mlp_modules",
        replacement="moe_optim.experts.module:grouped_mlp_modules",
        form="(self, moe_use_grouped_gemm)",
        because="the local spec ignores --moe-grouped-gemm and loops over experts",
        remove_when="the local spec takes its expert module from the configuration",
    ),
)
"""Patches for portable experts."""

TE_EXPERTS: tuple[Patch, ...] = _deferred(
    Patch(
        id="te-experts",
        target="megatron.core.transformer.moe.experts:TEGroupedMLP.__init__",
        replacement="moe_optim.experts.weight_copies:build_experts",
        form="(self, num_local_experts, config, submodules, pg_collection, name)",
        because="GEMMs of Transformer Engine's experts read their weights, not a copy of them",
        remove_when="a grouped linear takes a function that prepares its weights",
    ),
)
"""Patches for Transformer Engine's experts."""

COPIES: tuple[Patch, ...] = (
    Patch(
        id="first-microbatch",
        target="megatron.core.transformer.module:MegatronModule.set_is_first_microbatch",
        replacement="moe_optim.experts.weight_copies:set_is_first_microbatch",
        form="(self)",
        because="only models with FP8 or FP4 recipes learn that a step begins",
        remove_when="every model is told of its first microbatch",
    ),
)
"""Patches applied once Transformer Engine's experts read quantized copies of their weights."""

_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_DDP = "megatron.core.distributed.distributed_data_parallel"

OPTIMIZER: tuple[Patch, ...] = (
    Patch(
        id="param-and-grad-buffer",
        target=f"{_DDP}:_ParamAndGradBuffer",
        replacement="moe_optim.buckets.buffer:GroupedParamAndGradBuffer",
        form="class",
        because="DistributedDataParallel constructs the buffer by name",
        remove_when="DistributedDataParallel accepts a buffer class",
    ),
    Patch(
        id="bucket-group",
        target=f"{_BUFFER}:_ParamAndGradBucketGroup",
        replacement="moe_optim.buckets.bucket_group:GroupedBucketGroup",
        form="class",
        because="partition_buckets constructs bucket groups by name",
        remove_when="partition_buckets accepts a bucket-group class",
    ),
    Patch(
        id="partition-buckets",
        target=f"{_DDP}:partition_buckets",
        replacement="moe_optim.buckets.bucket_group:partition_buckets",
        form="(buffers, force_single_bucket_group, reduce_scatter_with_fp32_accumulation)",
        because="all bf16 buckets are merged into the group of the last quantized one",
        remove_when="quantized and other buckets are grouped apart",
    ),
    Patch(
        id="quantized-storage",
        target=f"{_BUFFER}:_param_uses_quantized_storage",
        replacement="moe_optim.buckets.buffer:_param_uses_quantized_storage",
        form="(param)",
        because="only Transformer Engine's classes count as quantized",
        remove_when="a parameter can say so itself",
    ),
    Patch(
        id="shared-buffer",
        target=f"{_BUFFER}:is_grouped_mxfp8tensor",
        replacement="moe_optim.buckets.buffer:is_grouped_mxfp8tensor",
        form="(tensor)",
        because="the buffer allocates memory for the parameter unless it knows the weight's class",
        remove_when="a parameter can say so itself",
    ),
    Patch(
        id="shared-memory-flag",
        target=(
            "megatron.core.distributed.distributed_data_parallel_config:"
            "DistributedDataParallelConfig.__post_init__"
        ),
        replacement="moe_optim.buckets.buffer:check_ddp_config",
        form="(self)",
        because="--reuse-grad-buf-for-mxfp8-param-ag is taken with --fp8-param-gather alone",
        remove_when="a parameter can say so itself",
    ),
    *(
        Patch(
            id=id,
            target=f"megatron.core.full_cuda_graph:FullCudaGraphWrapper.{name}",
            replacement=f"moe_optim.buckets.replay:{replacement}",
            form=form,
            is_deferred=True,
            because="a replay runs only kernels, and buckets track on the host what they hold",
            remove_when="a graph calls back before and after its replay",
        )
        for id, name, replacement, form in (
            (
                "graph-begins",
                "data_read",
                "begin_iteration",
                "(self, data_iterator, model, training, num_microbatches)",
            ),
            ("graph-ends", "next_iter", "end_iteration", "(self, stage)"),
        )
    ),
    Patch(
        id="mxfp8-2d-recipe",
        target="megatron.core.fp8_utils:get_fp8_recipe",
        replacement="moe_optim.weights.te.recipe:get_fp8_recipe",
        form="(config)",
        is_deferred=True,
        because="no flag selects square blocks for Transformer Engine's MXFP8 weights",
        remove_when="--fp8-recipe has a value for MXFP8 with square blocks",
    ),
    *(
        Patch(
            id=f"group-params:{module.rpartition('.')[2]}",
            target=f"{module}:group_params_for_buffers",
            replacement="moe_optim.buckets.matrix_buffers:group_params_for_buffers",
            form="(params, grad_reduce_in_fp32)",
            because="Muon's matrices share buffers with other parameters unless they are tagged",
            remove_when="an optimizer chooses which parameters share a buffer",
        )
        for module in (_DDP, "megatron.core.optimizer.distrib_optimizer")
    ),
    Patch(
        id="optimizer-buckets",
        target="megatron.core.optimizer.distrib_optimizer:partition_buckets",
        replacement="moe_optim.buckets.bucket_group:partition_buckets_of_optimizer",
        form="(buffers, force_single_bucket_group, reduce_scatter_with_fp32_accumulation)",
        because="it accepts one quantized buffer, and its result is never used",
        remove_when="the optimizer takes the groups of DistributedDataParallel",
    ),
    Patch(
        id="param-layout",
        target=(
            "megatron.core.optimizer.distrib_optimizer:"
            "DistributedOptimizer._compute_per_buffer_param_layout"
        ),
        replacement=(
            "moe_optim.buckets.buffer:AlignedDistributedOptimizer._compute_per_buffer_param_layout"
        ),
        form="static (params, bucket_size, data_parallel_world_size, ddp_config, param_indices)",
        because="the layout is computed by a method of the base class, called by its name",
        remove_when="the layout is computed by the optimizer's own class",
    ),
    Patch(
        id="distributed-optimizer",
        target="megatron.core.optimizer:DistributedOptimizer",
        replacement="moe_optim.optimizer.distributed:GroupedDistributedOptimizer",
        form="class",
        because="the optimizer factory constructs the class by name",
        remove_when="OptimizerConfig accepts a distributed-optimizer class",
    ),
    Patch(
        id="chained-optimizer",
        target="megatron.core.optimizer:ChainedOptimizer",
        replacement="moe_optim.optimizer.chained:GroupedChainedOptimizer",
        form="class",
        because="no hook lies between the gradient norm and the first thing a step changes",
        remove_when="the optimizer asks a policy what to do with a non-finite norm",
    ),
    Patch(
        id="state-to-save",
        target="megatron.training.checkpointing:generate_state_dict",
        replacement="moe_optim.checkpoint.saving:generate_state_dict",
        form=(
            "(args, model, optimizer, opt_param_scheduler, rng_state, iteration, "
            "optim_sd_kwargs, model_sd_kwargs, rerun_state)"
        ),
        is_deferred=True,
        because="amaxes of experts that are cut over ranks are reduced before keys are walked",
        remove_when="a model can prepare itself for a save",
    ),
    Patch(
        id="get-megatron-optimizer",
        target="megatron.training.training:get_megatron_optimizer",
        replacement="moe_optim.optimizer.factory:get_installed_optimizer",
        form=(
            "(config, model_chunks, config_overrides, use_gloo_process_groups, pg_collection, "
            "dump_param_to_param_group_map)"
        ),
        because="training loops of Megatron and others import the factory by name",
        remove_when="training loops take the optimizer from its configuration",
        is_imported_by_name=True,
    ),
)
"""Patches for this package's buffers, bucket groups and optimizer."""

CHECKPOINTS: tuple[Patch, ...] = _deferred(
    Patch(
        id="load-checkpoint",
        target="megatron.core.dist_checkpointing:load",
        replacement="moe_optim.checkpoint.loading:load",
        form=(
            "(sharded_state_dict, checkpoint_dir, sharded_strategy, validate_access_integrity, "
            "strict, verify_integrity, process_group)"
        ),
        because="nothing tells an optimizer what a checkpoint holds before it asks for it",
        remove_when="sharded_state_dict is given the checkpoint that will be loaded",
    ),
    *(
        Patch(
            id=f"common-state:{module}",
            target=f"megatron.core.{module}:load_common_state_dict",
            replacement="moe_optim.checkpoint.loading:load_common_state_dict",
            form="(checkpoint_dir)",
            because="it reads a checkpoint first, runs code named there, and errors name no file",
            remove_when="Megatron looks for all files first, and unpickles only plain data",
        )
        for module in ("dist_checkpointing", "dist_checkpointing.serialization")
    ),
    *(
        Patch(
            id=f"checked-reading:{module.rpartition('.')[2]}",
            target=f"megatron.core.dist_checkpointing.{module}:_get_filesystem_reader",
            replacement="moe_optim.checkpoint.load_session:get_filesystem_reader",
            form="(checkpoint_dir, cache_metadata, async_strategy)",
            because="torch verifies no checksums, and unpickles anything",
            remove_when="torch verifies the checksums of records, and unpickles only plain data",
        )
        for module in ("strategies.torch", "serialization")
    ),
    Patch(
        id="load-together",
        target=(
            "megatron.core.dist_checkpointing.strategies.torch:TorchDistLoadShardedStrategy.load"
        ),
        replacement="moe_optim.checkpoint.load_session:load_tensors",
        form="(self, sharded_state_dict, checkpoint_dir, async_strategy)",
        because="a rank that finds damage leaves the others waiting for it",
        remove_when="an error of one rank is raised on all that load",
    ),
    Patch(
        id="save-checkpoint",
        target="megatron.core.dist_checkpointing:save",
        replacement="moe_optim.checkpoint.saving:save",
        form=(
            "(sharded_state_dict, checkpoint_dir, sharded_strategy, validate_access_integrity, "
            "async_sharded_save, preprocess_common_before_consistancy_check, content_metadata, "
            "async_strategy, verify_integrity)"
        ),
        because="an iteration saved again looks whole before it is, and no checksum is recorded",
        remove_when="metadata.json is removed first, and the default save records checksums",
    ),
    Patch(
        id="staged-values",
        target=(
            "megatron.core.dist_checkpointing.strategies.filesystem_async:"
            "FileSystemWriterAsync.prepare_write_data"
        ),
        replacement="moe_optim.checkpoint.staging:prepare_write_data",
        form="(self, plan, planner)",
        because="all that a rank saves is copied to the host before the first byte is written",
        remove_when="a synchronous save copies one chunk at a time",
    ),
    Patch(
        id="te-amaxes",
        target="megatron.core.transformer.moe.experts:TEGroupedMLP.sharded_state_dict",
        replacement="moe_optim.calibration.state_entries:sharded_state_dict",
        form="(self, prefix, sharded_offsets, metadata)",
        because="Transformer Engine's linears save their weights, and nothing recorded of these",
        remove_when="a parameter can say what is saved beside it",
    ),
    Patch(
        id="tensor-metadata",
        target=(
            "megatron.core.dist_checkpointing.strategies.torch:"
            "TorchDistLoadShardedStrategy.load_tensors_metadata"
        ),
        replacement="moe_optim.checkpoint.loading:load_tensors_metadata",
        form="(self, checkpoint_dir, metadata)",
        because="it gives torch.empty all that torch keeps of a tensor, since 2.15 also strides",
        remove_when="strict loads work with torch 2.15",
    ),
)
"""Patches that check a checkpoint before it is read, and let the optimizer adapt to its layout."""

CHECKPOINTS_OF_RANKS: tuple[Patch, ...] = _deferred(
    *(
        Patch(
            id=f"save-files-of-ranks:{module}",
            target=f"megatron.training.{module}:save_checkpoint",
            replacement=f"moe_optim.checkpoint.saving:{replacement}",
            form=(
                "(iteration, model, optimizer, opt_param_scheduler, "
                "num_floating_point_operations_so_far, checkpointing_context, pipeline_rank, "
                "expert_rank, tensor_rank, pipeline_parallel, expert_parallel, "
                "non_persistent_ckpt, train_data_iterator, preprocess_common_state_dict_fn, "
                "release, tp_group, pp_group, dp_cp_group, dp_group, expt_dp_group, "
                "rng_state_key_prefix)"
            ),
            because="--ckpt-format torch records neither checksums nor that all files are there",
            remove_when="--ckpt-format torch writes what it consists of when all of it is there",
        )
        for module, replacement in (
            ("checkpointing", "save_checkpoint"),
            ("training", "save_checkpoint_in_loop"),
        )
    ),
    Patch(
        id="load-files-of-ranks",
        target="megatron.training.checkpointing:_get_checkpoint_format",
        replacement="moe_optim.checkpoint.loading:get_checkpoint_format",
        form="(checkpoint_name, args)",
        because="--ckpt-format torch compares no checksums, and exits with 0 where a file is torn",
        remove_when="--ckpt-format torch compares checksums of what it reads",
    ),
)
"""Patches for checksums of ``--ckpt-format torch`` files, verified before a load."""

CONFIGURATIONS: tuple[Patch, ...] = tuple(
    patch for patch in (*ADAM, *OPTIMIZER) if patch.target.endswith("Config.__post_init__")
)
"""Patches that permit configurations which Megatron would refuse."""

INSTALLED: tuple[Patch, ...] = (
    *ADAM,
    *EXPERTS,
    *TE_EXPERTS,
    *OPTIMIZER,
    *CHECKPOINTS,
    *CHECKPOINTS_OF_RANKS,
)
"""Patches applied by ``install()``."""

BRIDGE: tuple[Patch, ...] = tuple(
    Patch(
        id=f"bridge:{module}",
        target=f"megatron.bridge.peft.{module}:get_adapter_attributes_from_linear",
        replacement="moe_optim.integration.bridge:get_adapter_attributes_from_linear",
        form="(m, is_expert, pg_collection, sequence_parallel_input_regather)",
        because="LoRA refuses linears of classes that Megatron-Bridge does not know",
        remove_when="Megatron-Bridge asks a linear itself how it is cut",
        only_if_there=True,
    )
    for module in ("lora", "canonical_lora")
)
"""Required to adapt portable experts with Megatron-Bridge, whose optimizer configuration applies
them; not a part of Megatron, and therefore not of ``PATCHES``."""

PATCHES: tuple[Patch, ...] = (
    *(*TRAIN, *SCRIPT, *ADAM, *CPU),
    *(patch for patch in INSTALLED if patch not in ADAM),
    *COPIES,
)
