"""Names of DeepSpeed's engine that are not here, each with what to use instead. Its package: `deepspeed_missing.py`.

A name that is absent raises AttributeError, so `hasattr`, by which clients ask, tells the truth.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Reason as it ends a sentence, and the names that it is given for.
REASONS: Mapping[str, str] = {
    "records.jsonl in the job's folder has every step's seconds; the module `logging` writes lines of a script's own": (
        "log_for_device tput_log"
    ),
    "there is no sequence or expert parallelism": "get_sequence_parallel_group load_moe_state_dict",
    "engine.backward reduces gradients as they come": (
        "all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_gradients allreduce_no_retain "
        "buffered_allreduce_fallback sparse_all_gather sparse_allreduce sparse_allreduce_bucket "
        "sparse_allreduce_no_retain"
    ),
    "engine.backward reduces a unit at a time; engine.no_sync() puts reductions off": "coalesce_grad_reduction",
    "engine.step clips by `gradient_clipping`": "clip_fp32_gradients",
    "ask train_batch_size(), train_micro_batch_size_per_gpu() and gradient_accumulation_steps()": "get_batch_info",
    "samples, batches and tokens are not chosen by a schedule: choose them in the dataset or its sampler": (
        "curriculum_learning_config curriculum_learning_enabled data_efficiency_config data_efficiency_enabled "
        "data_sampling_config data_sampling_enabled random_ltd_config random_ltd_enabled random_ltd_initialize "
        "set_custom_curriculum_learning_schedule set_data_post_process_func"
    ),
    "isinstance(dataset, torch.utils.data.IterableDataset) says it": "is_iterable_style_dataset is_map_style_dataset",
    "engine.compile() compiles the model; DeepSpeed's passes over its graph are not here": (
        "compile_autosp compile_autotp compile_zero_optimization_stage get_autosp_backend get_autotp_backend "
        "get_compile_time get_deepcompile_backend get_deepspeed_compile_backend is_deepcompile_active "
        "is_deepcompile_enabled register_compile_pass uses_parallelization_pass_only"
    ),
    "`dsrun plan --fit` prints the config that fits and is predicted to be the fastest": (
        "autotuning_enabled autotuning_end_profile_step autotuning_metric autotuning_metric_path "
        "autotuning_model_info_path autotuning_profile_model_info autotuning_start_profile_step"
    ),
    "every step's seconds, tokens and flops are a line of records.jsonl in the job's folder": (
        "flops_profiler flops_profiler_detailed flops_profiler_enabled flops_profiler_module_depth "
        "flops_profiler_output_file flops_profiler_profile_step flops_profiler_recompute_fwd_factor "
        "flops_profiler_top_modules get_wall_clock_timers memory_breakdown print_forward_breakdown timers "
        "wall_clock_breakdown"
    ),
    "the optimizer's groups have it: engine.optimizer.param_groups": "get_optimizer_configuration get_type",
    "Python's garbage collector is the script's: `gc.disable()`, `gc.collect()`": "collect_python_gc",
    "dsrun's ZeRO has other parts inside; what is set stands in engine.config, and what it comes to in "
    "`dsrun config show FILE`": (
        "aio_config checkpoint_serialization_enabled checkpoint_writer_enabled cpuadam_cores_perc dump_state "
        "get_data_types is_first_weights_partition_group is_sanity_checks_enabled log_level optimizer_legacy_fusion "
        "postscale_gradients super_offload swap_tensor_config use_node_local_storage zenflow_config "
        "zero_allgather_bucket_size zero_allgather_partitions zero_allgather_sequential zero_allow_untested_optimizer "
        "zero_compute_grad_norm zero_contiguous_gradients zero_elastic_checkpoint zero_force_ds_cpu_optimizer "
        "zero_hpz_partition_size zero_ignore_unused_parameters zero_legacy_stage1 zero_load_from_fp32_weights "
        "zero_log_trace_cache_warnings zero_max_live_parameters zero_max_reuse_distance "
        "zero_model_persistence_threshold zero_module_granularity_threshold zero_multi_rank_bucket_allreduce "
        "zero_overlap_comm zero_param_persistence_threshold zero_parameter_alignment zero_prefetch_bucket_size "
        "zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights zero_reduce_bucket_size "
        "zero_reduce_scatter zero_round_robin_gradients zero_save_muon_momentum_buffer_in_memory zero_sub_group_size "
        "torch_autocast_lower_precision_safe_modules"
    ),
}

#: The same by name.
ENGINE: Mapping[str, str] = {name: reason for reason, names in REASONS.items() for name in names.split()}
