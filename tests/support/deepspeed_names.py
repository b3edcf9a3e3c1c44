"""Names by which programs written for DeepSpeed reach it: where each is in dsrun, and what differs.

The tests compare this with what `import deepspeed` gives in drop-in mode, and with the facts of `deepspeed_surface.txt`
(made by scripts/deepspeed_surface.py); docs/reference/deepspeed-api.md is made from it (scripts/deepspeed_api.py).

[Note: tiers] Who needs a name: 1 transformers, accelerate, trl, peft; 2 Lightning and the kits for fine-tuning and
reinforcement learning; 3 scripts like Megatron's; 4 DeepSpeed's own examples, or what comes with another name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Homes whose names are there for scripts that import dsrun as deepspeed, too, and the module where they find them.
_OWN = {
    "dsrun": ".",
    "torch.distributed": "comm",
    **{
        f"dsrun.{name}": name
        for name in (
            "checkpointing",
            "comm",
            "ops.adagrad",
            "ops.adam",
            "ops.lamb",
            "ops.lion",
            "pipe",
            "utils",
            "zero",
        )
    },
}
#: Modules below `deepspeed` that are attributes and cannot be imported, as in DeepSpeed itself.
ATTRIBUTES = ("zero", "checkpointing")


class Row(NamedTuple):
    """Names of one home.

    Attributes:
        modules: Modules below `deepspeed` that have them, `.` for the package; first the one that defines them.
        names: The names; `name=there` where dsrun's home calls it otherwise.
        home: Module of dsrun with the same objects.
        tier: The tier, see [Note: tiers].
        differs: Remark for the page, empty where nothing differs.
        lacks: Parameters of DeepSpeed's that ours do not take; `*` for classes that only dsrun makes.
    """

    modules: str
    names: str
    home: str
    tier: int
    differs: str = ""
    lacks: str = ""

    def is_own(self) -> bool:
        """Whether the names are there for scripts that import dsrun as deepspeed, too."""
        return self.home in _OWN and self.names != "dist=comm"

    def modules_in_order(self) -> list[str]:
        """Returns the modules, first the one that dsrun has too, then the shorter ones."""
        own = _OWN.get(self.home)
        return sorted(self.modules.split(), key=lambda module: (module != own, module != ".", len(module), module))

    def paths(self, module: str) -> list[str]:
        """Returns the names at a module, as paths below the package."""
        return [_path("" if module == "." else module, entry.partition("=")[0]) for entry in self.names.split()]


class Known(NamedTuple):
    """A name below `deepspeed`.

    Attributes:
        path: Its path there.
        home: Path of the same object in dsrun.
        parameters: DeepSpeed's parameters that it takes, in their order.
        tier: The tier, see [Note: tiers].
    """

    path: str
    home: str
    parameters: tuple[str, ...]
    tier: int


_LEAVES = (
    "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules",
    "set_z3_leaf_module z3_leaf_module set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix",
)
_FULL = "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state"
_FULL_SET = "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state safe_update_full_grad_vectorized"
_LOCAL = "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state"
_LOCAL_SET = "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state"
_FRAGMENTS = "utils.tensor_fragment utils"
_PARAMETERS = "runtime.zero.partition_parameters runtime.zero zero"

ROWS = (
    # The package.
    Row(
        ".",
        "initialize",
        "dsrun",
        1,
        "`mpu` and `mesh_param` are taken where they divide the ranks as the config does; `distributed_port` has no "
        "effect: ranks meet where the environment says",
    ),
    Row(
        ".",
        "tp_model_init",
        "dsrun",
        1,
        "what it is given stays with the model, and `initialize` refuses a config that says otherwise; `tp_group` has "
        "to be of neighbours; without `config`, the config's `tensor_parallel.autotp_size` says the same",
    ),
    Row(
        "comm.comm comm .",
        "init_distributed",
        "dsrun",
        1,
        "the group stays when engines end; `rank`, `world_size` and `init_method` have to say what the environment "
        "says; the other arguments have no effect",
    ),
    Row(".", "add_config_arguments", "dsrun", 1),
    Row("runtime.engine .", "DeepSpeedEngine=Engine", "dsrun", 1, "the class `Engine`; `initialize` makes one", "*"),
    Row("utils.init_on_device utils .", "OnDevice", "dsrun", 4, "`dtype` is the default of floating tensors"),
    Row(
        ". git_version_info",
        "version",
        "dsrun.as_deepspeed.version_names",
        1,
        "0.19.8, with `+dsrun` and dsrun's version; with `import dsrun` it is dsrun's own",
    ),
    Row(
        ".", "__version__ __version_major__ __version_minor__ __version_patch__", "dsrun.as_deepspeed.version_names", 1
    ),
    Row(
        ". git_version_info",
        "git_hash git_branch",
        "dsrun.as_deepspeed.version_names",
        4,
        "dsrun is built from no commit of DeepSpeed's",
    ),
    Row(".", "__git_hash__ __git_branch__", "dsrun.as_deepspeed.version_names", 4),
    # ZeRO.
    Row(
        _PARAMETERS,
        "Init",
        "dsrun.zero",
        1,
        "parameters keep their shape; see [models larger than a rank](../guides/sharded-parameters.md)",
        "zero_param_parallel_group zero_quantized_weights zero_quantized_nontrainable_weights "
        "sequence_data_parallel_group param_swapper tensor_overrides",
    ),
    Row(_PARAMETERS, "GatheredParameters", "dsrun.zero", 1, "may be nested over one parameter"),
    Row(_PARAMETERS, "register_external_parameter", "dsrun.zero", 1, "accepted and not needed"),
    Row(
        "runtime.zero.partition_parameters runtime.zero zero",
        "unregister_external_parameter",
        "dsrun.zero",
        4,
        "accepted and not needed",
    ),
    Row(_PARAMETERS, "ZeroParamStatus", "dsrun.zero", 1),
    Row("runtime.zero.utils runtime.zero.partition_parameters runtime.zero zero", "is_zero_param", "dsrun.zero", 4),
    Row("runtime.zero zero", "unwrap_model_for_generation", "dsrun.zero", 4),
    Row(
        "runtime.zero.partition_parameters",
        "zero_wrapper_for_fp_tensor_constructor",
        "dsrun.runtime.zero.creation.constructors",
        1,
        "transformers sets it, and sets it back",
        "target_device",
    ),
    Row(
        "runtime.zero.partition_parameters",
        "_orig_torch_arange=arange",
        "torch",
        1,
        "transformers sets it, and sets it back",
    ),
    # State of parameters, and modules that are gathered together.
    Row(_FRAGMENTS, _FULL, "dsrun.utils", 2),
    Row(_FRAGMENTS, _FULL_SET, "dsrun.utils", 2),
    Row(_FRAGMENTS, _LOCAL, "dsrun.utils", 4, "at every stage; a rank without a piece gets a tensor without elements"),
    Row(_FRAGMENTS, _LOCAL_SET, "dsrun.utils", 4, "at every stage"),
    Row(
        "utils.z3_leaf_module utils",
        _LEAVES[0],
        "dsrun.utils",
        1,
        "before `initialize`: later it is an error at stage 3",
    ),
    Row("utils.z3_leaf_module utils", _LEAVES[1], "dsrun.utils", 4),
    # Talk.
    Row(
        "utils.logging utils .",
        "logger log_dist",
        "dsrun.utils",
        2,
        "`logger` is the logger `dsrun`, which nobody configures but the script; `ranks=None` are all ranks",
    ),
    Row("utils.logging utils", "log_dist_once set_log_level_from_string", "dsrun.utils", 4),
    # Devices and collectives.
    Row(
        "accelerator.real_accelerator accelerator . runtime.zero.partition_parameters",
        "get_accelerator",
        "dsrun.runtime.accelerator",
        1,
        "an object over `torch.accelerator`; methods that are not there say why",
    ),
    Row("accelerator.real_accelerator accelerator", "is_current_accelerator_supported", "dsrun.runtime.accelerator", 4),
    Row(
        "accelerator.abstract_accelerator accelerator",
        "DeepSpeedAccelerator=Accelerator",
        "dsrun.runtime.accelerator",
        4,
    ),
    Row(".", "dist=comm", "dsrun", 1, "`comm`"),
    Row(
        "comm.comm comm",
        "get_rank get_world_size is_initialized is_available new_group destroy_process_group",
        "torch.distributed",
        1,
        "torch's own",
    ),
    Row("comm.reduce_op comm", "ReduceOp", "torch.distributed", 1, "torch's own"),
    Row(
        "comm.comm comm",
        "all_reduce barrier broadcast all_gather all_gather_into_tensor all_gather_object inference_all_reduce",
        "dsrun.comm",
        1,
        "torch's, which take DeepSpeed's words for logs (`prof`, `log_name`, `debug`) too, by keyword only",
    ),
    Row(
        "comm.comm comm",
        "all_reduce_coalesced all_to_all all_to_all_single broadcast_object_list gather isend irecv send recv reduce "
        "reduce_scatter reduce_scatter_tensor scatter monitored_barrier batch_isend_irecv P2POp",
        "dsrun.comm",
        3,
        "torch's, which take DeepSpeed's words for logs (`prof`, `log_name`, `debug`) too, by keyword only",
    ),
    Row(
        "comm.comm comm",
        "all_gather_coalesced has_all_gather_into_tensor has_all_reduce_coalesced has_coalescing_manager "
        "has_reduce_scatter_tensor",
        "dsrun.comm",
        4,
    ),
    Row(
        "comm.comm comm",
        "log_summary",
        "dsrun.comm",
        3,
        "of the engine's collectives, where the config has `comms_logger`; `show_straggler` has no effect",
    ),
    Row("comm.comm comm", "allgather_fn reduce_scatter_fn", "dsrun.comm", 4, "`prof` and `debug` go by keyword only"),
    Row("comm.comm comm", "get_local_rank", "dsrun.comm", 1),
    Row("comm.comm comm", "get_world_group get_all_ranks_from_group get_global_rank", "dsrun.comm", 3),
    Row("comm.comm comm", "initialize_mesh_device", "dsrun.comm", 4),
    Row(
        "comm.comm comm",
        "get_local_rank_from_launcher get_world_rank_from_launcher get_world_size_from_launcher",
        "dsrun.comm",
        4,
    ),
    Row("comm.torch comm comm.comm", "TorchBackend", "dsrun.comm", 1),
    Row(
        "utils.groups",
        "_get_sequence_parallel_group _get_sequence_parallel_rank _get_sequence_parallel_world_size "
        "_get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size "
        "_get_sequence_data_parallel_group _get_sequence_data_parallel_rank _get_sequence_data_parallel_world_size",
        "dsrun.runtime.deepspeed.groups",
        2,
        "the axes of the last engine, and its groups; before there is one every rank is a data-parallel one; an axis "
        "of one rank has no group",
    ),
    Row(
        "utils.groups utils",
        "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_group "
        "get_model_parallel_rank get_model_parallel_world_size get_tensor_model_parallel_group "
        "get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size",
        "dsrun.runtime.deepspeed.groups",
        3,
        "the axes of the last engine, and its groups; before there is one every rank is a data-parallel one; an axis "
        "of one rank has no group",
    ),
    Row(
        "utils.groups",
        "_clone_world_group _get_broadcast_src_rank _get_data_parallel_group_ranks _get_expert_broadcast_src_rank "
        "_get_expert_data_parallel_group _get_expert_data_parallel_group_dict _get_expert_data_parallel_group_ranks "
        "_get_expert_data_parallel_rank _get_expert_data_parallel_world_size _get_expert_model_parallel_world_size "
        "_get_expert_parallel_group _get_expert_parallel_group_dict _get_expert_parallel_group_ranks "
        "_get_expert_parallel_rank _get_expert_parallel_src_rank _get_expert_parallel_world_size _get_max_expert_size "
        "_get_model_parallel_world_size _get_zero_param_intra_parallel_group _zero_param_parallel_is_initialized "
        "expert_tensor_parallel_world_size mesh_device mpu",
        "dsrun.runtime.deepspeed.groups",
        3,
        "the axes of the last engine, and its groups; before there is one every rank is a data-parallel one; an axis "
        "of one rank has no group",
    ),
    # Optimizers and rates.
    Row(
        "ops.adam.cpu_adam ops.adam",
        "DeepSpeedCPUAdam",
        "dsrun.ops.adam",
        1,
        "torch's fused Adam, without `amsgrad`; see [optimizers](../guides/optimizers.md)",
    ),
    Row(
        "ops.adam.fused_adam ops.adam",
        "FusedAdam",
        "dsrun.ops.adam",
        1,
        "torch's fused Adam, without `amsgrad`; see [optimizers](../guides/optimizers.md)",
    ),
    Row("ops.lamb.fused_lamb ops.lamb", "FusedLamb", "dsrun.ops.lamb", 4, "", "max_grad_norm amsgrad"),
    Row(
        "ops.lion.cpu_lion ops.lion",
        "DeepSpeedCPULion",
        "dsrun.ops.lion",
        1,
        "one class for both devices",
        "model_params fp32_optimizer_states",
    ),
    Row(
        "ops.lion.fused_lion ops.lion", "FusedLion", "dsrun.ops.lion", 4, "one class for both devices", "set_grad_none"
    ),
    Row(
        "ops.adagrad.cpu_adagrad ops.adagrad",
        "DeepSpeedCPUAdagrad",
        "dsrun.ops.adagrad",
        1,
        "one class for both devices",
    ),
    Row("runtime.lr_schedules", "VALID_LR_SCHEDULES", "dsrun.runtime.optim.schedules.registry", 1),
    Row("runtime.lr_schedules", "WarmupLR WarmupDecayLR WarmupCosineLR", "dsrun.runtime.optim.schedules.warm_up", 1),
    Row("runtime.lr_schedules", "OneCycle LRRangeTest", "dsrun.runtime.optim.schedules.cycle", 1),
    Row(
        "runtime.lr_schedules",
        "add_tuning_arguments parse_arguments override_params override_lr_range_test_params override_1cycle_params "
        "override_warmupLR_params override_warmupCosineLR_params get_config_from_args get_lr_from_config "
        "get_torch_optimizer update_lr LR_SCHEDULE LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR "
        "LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE EDGE_VALUE "
        "MID_VALUE CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE CYCLE_SECOND_STAIR_COUNT "
        "DECAY_STEP_SIZE CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE "
        "WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_LOG_RATE WARMUP_LINEAR_RATE WARMUP_MIN_RATIO "
        "COS_MIN_RATIO TOTAL_NUM_STEPS",
        "dsrun.runtime.optim.schedules.tuning",
        3,
    ),
    # Activations and data.
    Row(
        "runtime.activation_checkpointing.checkpointing checkpointing",
        "configure checkpoint is_configured reset get_cuda_rng_tracker model_parallel_cuda_manual_seed "
        "non_reentrant_checkpoint partition_activations_in_checkpoint",
        "dsrun.checkpointing",
        3,
        "see [activations](../guides/activations.md)",
    ),
    Row(
        "runtime.activation_checkpointing.checkpointing checkpointing",
        "profile_table Reversible ReversibleStack",
        "dsrun.checkpointing",
        4,
        "dsrun's own",
    ),
    Row("runtime.dataloader utils", "RepeatingLoader", "dsrun.utils", 3),
    Row(
        "runtime.dataloader .",
        "DeepSpeedDataLoader",
        "dsrun.runtime.deepspeed.loader",
        4,
        "for scripts that make one; the engine's loaders are dsrun's own",
    ),
    # Optimizers as classes for `isinstance`.
    Row(
        "runtime.base_optimizer .",
        "DeepSpeedOptimizer",
        "dsrun.runtime.deepspeed.optimizer_types",
        2,
        "a class for `isinstance`: whether DeepSpeed would have made one of the optimizer; it makes nothing",
    ),
    Row(
        "runtime.base_optimizer",
        "ZeROOptimizer",
        "dsrun.runtime.deepspeed.optimizer_types",
        2,
        "a class for `isinstance`: whether DeepSpeed would have made one of the optimizer; it makes nothing",
    ),
    Row(
        "runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer",
        "dsrun.runtime.deepspeed.optimizer_types",
        2,
        "a class for `isinstance`: whether DeepSpeed would have made one of the optimizer; it makes nothing",
        "*",
    ),
    Row(
        "runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "dsrun.runtime.deepspeed.optimizer_types",
        2,
        "a class for `isinstance`: whether DeepSpeed would have made one of the optimizer; it makes nothing",
        "*",
    ),
    Row(
        "runtime.bf16_optimizer",
        "BF16_Optimizer",
        "dsrun.runtime.deepspeed.optimizer_types",
        2,
        "a class for `isinstance`: whether DeepSpeed would have made one of the optimizer; it makes nothing",
        "*",
    ),
    Row(
        "runtime.fp16.fused_optimizer",
        "FP16_Optimizer",
        "dsrun.runtime.deepspeed.optimizer_types",
        2,
        "a class for `isinstance`: whether DeepSpeed would have made one of the optimizer; it makes nothing",
        "*",
    ),
    Row(
        "runtime.fp16.unfused_optimizer",
        "FP16_UnfusedOptimizer",
        "dsrun.runtime.deepspeed.optimizer_types",
        2,
        "a class for `isinstance`: whether DeepSpeed would have made one of the optimizer; it makes nothing",
        "*",
    ),
    Row("runtime.zero.utils", "is_zero_supported_optimizer", "dsrun.runtime.deepspeed.optimizer_types", 4),
    # Configs as objects.
    Row(
        "runtime.config .",
        "DeepSpeedConfig",
        "dsrun.runtime.deepspeed.config_views",
        2,
        "what dsrun makes of the config, to read: values that dsrun decides by itself are None, and a name that has no "
        "meaning here says so",
    ),
    Row(
        "runtime.config",
        "DeepSpeedActivationCheckpointingConfig",
        "dsrun.runtime.deepspeed.config_views",
        4,
        "a section of a `DeepSpeedConfig`",
        "*",
    ),
    Row(
        "runtime.config .",
        "DeepSpeedConfigError=ConfigError",
        "dsrun.errors",
        2,
        "the class `dsrun.errors.ConfigError`",
    ),
    Row(
        "runtime.config",
        "ADAGRAD_OPTIMIZER ADAM_OPTIMIZER ADAMW_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER MUADAM_OPTIMIZER "
        "MUADAMW_OPTIMIZER MUSGD_OPTIMIZER DEEPSPEED_OPTIMIZERS",
        "dsrun.runtime.deepspeed.config_views",
        4,
    ),
    Row("runtime.config .", "MUON_OPTIMIZER", "dsrun.runtime.deepspeed.config_views", 4),
    Row(
        "runtime.zero.config",
        "DeepSpeedZeroConfig",
        "dsrun.runtime.deepspeed.config_views",
        2,
        "a section of a `DeepSpeedConfig`",
    ),
    Row("runtime.zero.config runtime.config", "get_zero_config", "dsrun.runtime.deepspeed.config_views", 4),
    Row(
        "runtime.zero.config runtime.config",
        "ZeroStageEnum",
        "dsrun.runtime.deepspeed.offload_names",
        2,
        "found by pickles of DeepSpeed's",
    ),
    Row(
        "runtime.precision_config", "DeepSpeedFP16Config DeepSpeedBF16Config", "dsrun.runtime.deepspeed.config_views", 3
    ),
    Row(
        "runtime.zero.offload_config",
        "OffloadDeviceEnum OffloadStateTypeEnum",
        "dsrun.runtime.deepspeed.offload_names",
        2,
        "members equal their text",
    ),
    Row(
        "runtime.zero.offload_config",
        "DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig",
        "dsrun.runtime.deepspeed.config_views",
        4,
        "sections of a `DeepSpeedConfig`",
    ),
    Row("runtime.constants", "ROUTE_TRAIN ROUTE_EVAL ROUTE_PREDICT", "dsrun.as_deepspeed.constants", 4),
    Row("runtime.zero.utils", "ZeRORuntimeException=CheckpointError", "dsrun.errors", 4),
    Row(
        "elasticity.elasticity elasticity",
        "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config",
        "dsrun.runtime.deepspeed.estimates.batches",
        2,
        "arithmetic of DeepSpeed 0.18; a checkpoint loads at any number of ranks without it",
    ),
    Row(
        "elasticity.config",
        "ElasticityConfig ElasticityError ElasticityConfigError ElasticityIncompatibleWorldSize",
        "dsrun.runtime.deepspeed.estimates.batches",
        4,
    ),
    Row(
        "elasticity.constants elasticity",
        "ELASTICITY ENABLED ENABLED_DEFAULT",
        "dsrun.runtime.deepspeed.estimates.batches",
        4,
    ),
    Row("elasticity.constants", "DEEPSPEED_ELASTICITY_CONFIG", "dsrun.runtime.deepspeed.estimates.batches", 4),
    # Loss scales and places in pickles.
    Row(
        "runtime.fp16.loss_scaler",
        "LossScaler DynamicLossScaler LossScalerBase",
        "dsrun.runtime.deepspeed.loss_scalers",
        2,
        "found by pickles of DeepSpeed's; the engine has a loss scale of its own",
    ),
    Row(
        "runtime.fp16.loss_scaler",
        "CreateLossScaler=create_loss_scaler INITIAL_LOSS_SCALE SCALE_WINDOW DELAYED_SHIFT CONSECUTIVE_HYSTERESIS "
        "MIN_LOSS_SCALE",
        "dsrun.runtime.deepspeed.loss_scalers",
        4,
    ),
    Row(
        "utils.tensor_fragment",
        "fragment_address",
        "dsrun.runtime.deepspeed.loss_scalers",
        2,
        "found by pickles of DeepSpeed's",
    ),
    # Memory and arithmetic.
    Row(
        "runtime.zero.stage3",
        "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_live "
        "estimate_zero3_model_states_mem_needs_all_cold",
        "dsrun.runtime.deepspeed.estimates.memory",
        2,
        "DeepSpeed's numbers; `dsrun plan` has dsrun's own, with activations",
    ),
    Row(
        "runtime.zero.stage_1_and_2",
        "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_live "
        "estimate_zero2_model_states_mem_needs_all_cold",
        "dsrun.runtime.deepspeed.estimates.memory",
        2,
        "DeepSpeed's numbers; `dsrun plan` has dsrun's own, with activations",
    ),
    Row(
        "runtime.zero.stage3", "model_to_params=total_and_largest_params", "dsrun.runtime.deepspeed.estimates.memory", 4
    ),
    Row("runtime.zero.stage_1_and_2", "model_to_params=total_params", "dsrun.runtime.deepspeed.estimates.memory", 4),
    Row(
        "profiling.flops_profiler.profiler profiling.flops_profiler",
        "get_model_profile",
        "dsrun.runtime.deepspeed.estimates.flops",
        2,
        "MACs as DeepSpeed counts them; flops are twice as many, without those of activations and norms",
    ),
    Row(
        "profiling.flops_profiler.profiler profiling.flops_profiler",
        "FlopsProfiler",
        "dsrun.runtime.deepspeed.estimates.flops",
        4,
        "MACs as DeepSpeed counts them; flops are twice as many, without those of activations and norms",
    ),
    Row(
        "profiling.flops_profiler.profiler profiling.flops_profiler",
        "number_to_string flops_to_string macs_to_string bytes_to_string params_to_string duration_to_string",
        "dsrun.runtime.deepspeed.estimates.flops",
        4,
    ),
    Row("runtime.utils", "see_memory_usage", "dsrun.runtime.deepspeed.memory", 2),
    Row("runtime.utils", "memory_status get_ma_status empty_cache", "dsrun.runtime.deepspeed.memory", 3),
    Row("runtime.utils", "move_to_device set_random_seed", "dsrun.runtime.deepspeed.tensors", 2),
    Row(
        "runtime.utils",
        "copy_to_device call_to_str ensure_directory_exists get_only_unique_item get_tensor_bytes noop_context "
        "noop_decorator",
        "dsrun.runtime.deepspeed.tensors",
        3,
    ),
    Row(
        "runtime.utils",
        "partition_uniform partition_balanced prefix_sum_inc PartitionedTensor",
        "dsrun.runtime.deepspeed.partition",
        3,
    ),
    Row(
        "runtime.utils",
        "CheckOverflow clip_grad_norm_ clip_tensors_by_global_norm get_flattened_grad_norm get_global_norm "
        "get_global_norm_of_tensors get_grad_zeros get_weight_norm has_inf_or_nan is_invalid_grad_norm "
        "is_model_parallel_parameter",
        "dsrun.runtime.deepspeed.gradients",
        3,
        "of an engine's parameters: the gradients that the engine keeps",
    ),
    # Checkpoints.
    Row("checkpoint.utils", "clone_tensors_for_torch_save", "dsrun.runtime.checkpoint.export.clones", 1),
    Row(
        "checkpoint.constants checkpoint",
        "BUFFER_NAMES DS_VERSION FP32_FLAT_GROUPS FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES OPTIMIZER_STATE_DICT "
        "PARAM_SHAPES PARTITION_COUNT SINGLE_PARTITION_OF_FP32_GROUPS ZERO_STAGE",
        "dsrun.runtime.checkpoint.convert.deepspeed_keys",
        2,
    ),
    Row(
        "checkpoint.constants checkpoint",
        "BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP BF16_ZERO_FILE_PREFIX CAT_DIM CHECKPOINT_PARALLEL_DIMS "
        "CHECKPOINT_PP_DEGREE CHECKPOINT_TP_DEGREE CLIP_GRAD FP16_ZERO_FILE_PREFIX FP32_GROUPS FP32_WEIGHT_KEY "
        "GROUP_PADDINGS LAYER_FILE_PREFIX LOSS_SCALER MODEL_FILE_PREFIX MODEL_FILE_SUFFIX OPTIM_FILE_SUFFIX "
        "ORIGINAL_VOCAB_SIZE PADDED_VOCAB_SIZE PARAM PARAMETER_TO_AVERAGE_PATTERNS "
        "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PARAMETER_WITH_SUB_PARAMS "
        "PARAM_ALIGNMENT_PADDINGS PARAM_GROUPS PARAM_N_SUB_PARAMS PARAM_SLICE_MAPPINGS "
        "PIPELINE_REPLICATED_PARAMETER_PATTERNS SUB_PARAMS_SHAPE SUB_PARAM_SHAPE SUB_PARAM_SHARD_WIDTHS "
        "TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO UNIVERSAL_CHECKPOINT_VERSION_KEY "
        "UNIVERSAL_CHECKPOINT_VERSION_VALUE VOCABULARY_PARAMETER_PATTERNS VOCAB_TENSOR ZERO_FILE_PREFIX",
        "dsrun.runtime.checkpoint.convert.deepspeed_keys",
        4,
    ),
    Row(
        "checkpoint.ds_to_universal",
        "main parse_arguments",
        "dsrun.as_deepspeed.commands.ds_to_universal",
        2,
        "also `python -m deepspeed.checkpoint.ds_to_universal`; see [checkpoints](../guides/checkpoints.md)",
    ),
    Row("checkpoint.ds_to_universal", "run", "dsrun.as_deepspeed.commands.ds_to_universal", 4, "dsrun's own"),
    Row(
        "utils.zero_to_fp32",
        "get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict "
        "load_state_dict_from_zero_checkpoint get_model_state_file get_model_state_files get_optim_files",
        "dsrun.runtime.checkpoint.convert.zero_to_fp32",
        2,
        "of dsrun's checkpoints and of DeepSpeed's folders",
    ),
    Row(
        "utils.zero_to_fp32",
        "convert_zero_checkpoint_to_state_dict get_checkpoint_files to_torch_tensor atoi natural_keys "
        "OUTPUT_DTYPE_NAMES",
        "dsrun.runtime.checkpoint.convert.zero_to_fp32",
        4,
    ),
    Row("utils.zero_to_fp32", "main", "dsrun.as_deepspeed.commands.zero_to_fp32", 4, "also `python -m`"),
    Row(
        "utils.zero_to_torch", "main=main_of_dtypes", "dsrun.as_deepspeed.commands.zero_to_fp32", 4, "also `python -m`"
    ),
    Row(
        "runtime.checkpoint_engine.torch_checkpoint_engine runtime.checkpoint_engine",
        "TorchCheckpointEngine",
        "dsrun.runtime.checkpoint.export.checkpoint_engine",
        2,
        "for scripts; dsrun's checkpoints are written without one",
    ),
    Row(
        "runtime.checkpoint_engine.checkpoint_engine runtime.checkpoint_engine.torch_checkpoint_engine",
        "CheckpointEngine",
        "dsrun.runtime.checkpoint.export.checkpoint_engine",
        4,
        "for scripts; dsrun's checkpoints are written without one",
    ),
    Row(
        "runtime.checkpoint_engine.checkpoint_engine runtime.checkpoint_engine "
        "runtime.checkpoint_engine.torch_checkpoint_engine",
        "CheckpointCommitInfo",
        "dsrun.runtime.checkpoint.export.checkpoint_engine",
        4,
    ),
    # Starting ranks.
    Row("launcher.runner", "DEEPSPEED_ENVIRONMENT_NAME", "dsrun.launcher.plan.env_file", 1),
    Row(
        "launcher.runner",
        "main EXPORT_ENVS",
        "dsrun.as_deepspeed.commands.runner",
        3,
        "the command `deepspeed`; ranks get the variables that a script has put into `EXPORT_ENVS`",
    ),
    Row("launcher.runner", "DLTS_HOSTFILE=HOSTFILE", "dsrun.as_deepspeed.commands.options", 3),
    Row(
        "launcher.runner",
        "fetch_hostfile parse_resource_filter parse_inclusion_exclusion encode_world_info",
        "dsrun.as_deepspeed.commands.resources",
        3,
    ),
    Row(
        "launcher.constants",
        "PDSH_LAUNCHER OPENMPI_LAUNCHER MPICH_LAUNCHER IMPI_LAUNCHER SLURM_LAUNCHER MVAPICH_LAUNCHER",
        "dsrun.as_deepspeed.constants",
        4,
    ),
    Row(
        "env_report",
        "main cli_main",
        "dsrun.as_deepspeed.commands.report",
        3,
        "the command `ds_report`; `hide_errors_and_warnings` has no effect",
    ),
    Row("constants .", "TORCH_DISTRIBUTED_DEFAULT_PORT=MASTER_PORT", "dsrun.as_deepspeed.commands.options", 4),
    Row("constants", "CROSS_RANK CROSS_SIZE LOCAL_RANK", "dsrun.as_deepspeed.constants", 4),
    Row("git_version_info", "installed_ops", "dsrun.as_deepspeed.version_names", 4, "empty: nothing is compiled"),
    # Small things.
    Row("utils.timer", "SynchronizedWallClockTimer ThroughputTimer NoopTimer", "dsrun.runtime.deepspeed.timers", 3),
    Row(
        "utils.timer",
        "CudaEventTimer trim_mean FORWARD_MICRO_TIMER FORWARD_GLOBAL_TIMER BACKWARD_MICRO_TIMER BACKWARD_GLOBAL_TIMER "
        "BACKWARD_INNER_MICRO_TIMER BACKWARD_INNER_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER "
        "BACKWARD_REDUCE_GLOBAL_TIMER STEP_MICRO_TIMER STEP_GLOBAL_TIMER TIME_EPSILON",
        "dsrun.runtime.deepspeed.timers",
        4,
    ),
    Row("utils.nvtx utils", "instrument_w_nvtx", "dsrun.runtime.deepspeed.timers", 4),
    Row(
        "moe.utils",
        "has_moe_layers is_moe_param is_moe_param_group split_params_into_shared_and_expert_params "
        "split_params_into_different_moe_groups_for_optimizer",
        "dsrun.runtime.deepspeed.experts",
        4,
        "parameters with DeepSpeed's mark of experts are refused, and no model has its layer",
    ),
    Row("compression.helper", "recursive_getattr recursive_setattr", "dsrun.as_deepspeed.attribute_paths", 4),
    Row("utils.numa", "parse_range parse_range_list", "dsrun.as_deepspeed.core_list", 4),
    Row(
        "module_inject.layers",
        "GatherReplacedLayerParams",
        "dsrun.runtime.deepspeed.layers",
        2,
        "does nothing: no layer is cut over ranks",
    ),
    Row("runtime.sequence_parallel.ulysses_sp", "TiledMLP", "dsrun.runtime.deepspeed.layers", 2, "", "*"),
    Row(
        "runtime.sequence_parallel.ulysses_sp",
        "UlyssesSPAttentionHF",
        "dsrun.runtime.deepspeed.layers",
        2,
        "`register_with_transformers` returns None for one rank a sequence, and refuses more",
        "*",
    ),
    Row(
        ". runtime",
        "zero",
        "deepspeed.runtime",
        1,
        "an attribute: not to be imported as `deepspeed.zero`, as in DeepSpeed",
    ),
    Row(
        ". runtime.activation_checkpointing",
        "checkpointing",
        "deepspeed.runtime.activation_checkpointing",
        3,
        "an attribute: not to be imported as `deepspeed.checkpointing`, as in DeepSpeed",
    ),
    # Pipeline stages.
    Row(
        ". runtime.pipe.engine",
        "PipelineModule",
        "dsrun",
        3,
        "layers of other stages are counted on the meta device; first values come from `base_seed` and the layer's "
        "number; all parameters of a tied layer are in common; `virtual_stages` and `placement` are dsrun's own",
    ),
    Row("pipe runtime.pipe runtime.pipe.module", "LayerSpec", "dsrun.pipe", 3),
    Row("pipe runtime.pipe runtime.pipe.module", "TiedLayerSpec", "dsrun.pipe", 3, "one class for each key"),
    Row("pipe runtime.pipe runtime.pipe.module", "PipelineModule", "dsrun.pipe", 3),
    Row("runtime.pipe.module runtime.pipe.engine", "PipelineError", "dsrun.runtime.parallel.pipeline.engine_class", 3),
    Row(
        "runtime.pipe.engine .",
        "PipelineEngine",
        "dsrun.runtime.parallel.pipeline.engine_class",
        3,
        "for `isinstance`: an engine whose model is in pipeline stages",
        "*",
    ),
    Row(
        "runtime.pipe.topology runtime.pipe",
        "ProcessTopology",
        "dsrun.runtime.parallel.pipeline.topology",
        3,
    ),
    Row(
        "runtime.pipe.topology",
        "PipeDataParallelTopology PipeModelDataParallelTopology",
        "dsrun.runtime.parallel.pipeline.topology",
        3,
    ),
    Row(
        "runtime.pipe.topology",
        "PipelineParallelGrid",
        "dsrun.runtime.parallel.pipeline.grid",
        3,
        "a group is made when it is first asked for: all its ranks must ask",
    ),
    Row(
        "runtime.pipe.schedule",
        "PipeSchedule TrainSchedule InferenceSchedule DataParallelSchedule PipeInstruction BufferOpInstruction "
        "LoadMicroBatch ForwardPass BackwardPass SendActivation RecvActivation SendGrad RecvGrad ReduceGrads "
        "ReduceTiedGrads OptimizerStep",
        "dsrun.runtime.parallel.pipeline.schedule",
        3,
        "to be read: the engine runs schedules of `pipeline.schedule`",
    ),
    # dsrun's own, which its modules list.
    Row("runtime.zero zero", "load_pretrained set_leaf_modules", "dsrun.zero", 4, "dsrun's own"),
    Row(
        "utils.z3_leaf_module utils",
        "unset_z3_leaf_modules_by_name unset_z3_leaf_modules_by_suffix",
        "dsrun.utils",
        4,
        "dsrun's own: `flag=False` in short",
    ),
    Row("runtime.zero zero", f"{_FULL} {_FULL_SET} {_LOCAL} {_LOCAL_SET}", "dsrun.zero", 4, "those of `utils`"),
)


def known() -> Iterator[Known]:
    """Yields every name of `ROWS` at each of its paths."""
    for row in ROWS:
        modules = ["" if module == "." else module for module in row.modules.split()]
        for entry in row.names.split():
            name, _, there = entry.partition("=")
            parameters = next((found for module in modules if (found := PARAMETERS.get(_path(module, name)))), ())
            taken = () if row.lacks == "*" else tuple(part for part in parameters if part not in row.lacks.split())
            for module in modules:
                yield Known(_path(module, name), f"{row.home}.{there or name}", taken, row.tier)


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _surface() -> Iterator[tuple[str, dict[str, tuple[str, ...]]]]:
    """Yields each line of the facts: what it is about, and its names with their parameters."""
    text = Path(__file__).with_name("deepspeed_surface.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        about, _, entries = line.partition(":")
        names = {}
        for entry in entries.split():
            name, _, parameters = entry.rstrip(")").partition("(")
            names[name] = tuple(part for part in parameters.split(",") if part and not part.startswith("*"))
        yield "" if about == "." else about, names


#: DeepSpeed's modules, and the public names of each; below `class`, methods.
SURFACE = dict(_surface())
#: Parameters of DeepSpeed's functions and classes, by their paths, where they have any.
PARAMETERS = {
    _path(module, name): parameters
    for module, names in SURFACE.items()
    for name, parameters in names.items()
    if parameters
}
#: All names that are there.
KNOWN = tuple(known())
#: Names of the tiers that are not there, each refused with its reason.
ABSENT = {
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter": 2,
    **dict.fromkeys(
        (
            *("DualPipeVModule", "runtime.pipe.p2p.send"),
            *("moe.layer.MoE", "sequence.layer.DistributedAttention"),
            "sequence.fpdt_layer.FPDT_Attention",
            "runtime.data_pipeline.curriculum_scheduler.CurriculumScheduler",
            "runtime.state_dict_factory.SDLoaderFactory",
            "checkpointing._CUDA_RNG_STATE_TRACKER",
            "checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME",
        ),
        3,
    ),
    **dict.fromkeys(
        (
            *("init_inference", "ops.op_builder.CPUAdamBuilder", "ops.aio.AsyncIOBuilder", "ops.__compatible_ops__"),
            *("compression.compress.init_compression", "comm.mpi_discovery", "zero.TiledLinear"),
        ),
        4,
    ),
}
