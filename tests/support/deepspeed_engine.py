"""What scripts call on an engine by DeepSpeed's names, and what differs. The package's names: `deepspeed_names.py`."""

from __future__ import annotations

from typing import NamedTuple


class EngineRow(NamedTuple):
    """Names of the engine that belong together.

    Attributes:
        names: The names.
        differs: Remark for the page, empty where nothing differs.
        lacks: Parameters of DeepSpeed's that ours do not take.
    """

    names: str
    differs: str = ""
    lacks: str = ""


ROWS = (
    EngineRow("forward"),
    EngineRow(
        "backward step is_gradient_accumulation_boundary set_gradient_accumulation_boundary",
        "`backward` reduces at every stage",
    ),
    EngineRow("scale", "what a backward of the script's own wants under fp16"),
    EngineRow("no_sync", "valid at every stage; `step` inside is refused"),
    EngineRow(
        "zero_grad",
        "forgets what micro steps have added up; `module.zero_grad()` and `optimizer.zero_grad()` do not",
    ),
    EngineRow("train eval module device config mpu training_dataloader"),
    EngineRow(
        "optimizer lr_scheduler",
        "`lr_scheduler` may be set, and is stepped, saved and loaded then; `optimizer` to None alone, which leaves an "
        "engine that evaluates",
    ),
    EngineRow("global_rank local_rank world_size dp_world_size"),
    EngineRow("global_steps global_samples micro_steps skipped_steps was_step_applied"),
    EngineRow("train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"),
    EngineRow("set_train_batch_size set_train_micro_batch_size"),
    EngineRow("get_global_grad_norm", "a float, before clipping, at every stage"),
    EngineRow("monitor", "has `enabled` and `write_events`, which records figures as `engine.log` does"),
    EngineRow("get_lr get_mom gradient_clipping steps_per_print"),
    EngineRow(
        "zero_optimization zero_optimization_stage zero_optimization_partition_gradients "
        "zero_optimization_partition_weights"
    ),
    EngineRow("bfloat16_enabled fp16_enabled zero_gather_16bit_weights_on_model_save"),
    EngineRow(
        "optimizer_name optimizer_params scheduler_name scheduler_params managed_gradient_accumulation loss_scale "
        "dynamic_loss_scale initial_dynamic_scale dynamic_loss_scale_args fp16_auto_cast "
        "fp16_master_weights_and_gradients bf16_master_weights_and_gradients bf16_optimizer_states "
        "torch_autocast_enabled torch_autocast_dtype communication_data_type gradient_predivide_factor "
        "dataloader_drop_last checkpoint_tag_validation_enabled checkpoint_tag_validation_fail "
        "load_universal_checkpoint",
        "what holds here: a value that the config leaves out is dsrun's default",
    ),
    EngineRow(
        "zero_offload_optimizer zero_offload_param zero_cpu_offload zero_use_cpu_optimizer zero_nvme_offload_optimizer "
        "zero_partial_offload",
        "sections are None where nothing leaves the device",
    ),
    EngineRow(
        "get_data_parallel_rank data_parallel_group get_tensor_parallel_rank get_model_parallel_rank mp_world_size "
        "seq_dp_world_size seq_data_parallel_group sequence_parallel_size",
        "as the engine's own axes have it; groups are those that the engine has made",
    ),
    EngineRow("autotp_size tensor_parallel_config"),
    EngineRow("tput_timer", "counts a script's epochs; seconds and samples are in records.jsonl"),
    EngineRow(
        "save_checkpoint load_checkpoint",
        "a checkpoint is written while training goes on (`checkpoint.asynchronous`; `engine.wait_for_checkpoint()` "
        "waits); it loads at any stage and on any number of ranks; one that is missing is an error, unless "
        "`missing_ok=True`; random numbers go on too, unless `load_random_state=False`",
        lacks="custom_load_fn",
    ),
    EngineRow(
        "module_state_dict load_module_state_dict save_16bit_model save_fp16_model",
        "always the whole weights; `load_module_state_dict` takes the state dict itself, and not one below `module`",
        lacks="destination prefix keep_vars checkpoint custom_load_fn fetch_z3_params z3_params_to_fetch "
        "allowed_missing_keys",
    ),
    EngineRow(
        "offload_states reload_states",
        "at every stage; parameters stay, so the model generates meanwhile; returns the bytes that are free",
    ),
    EngineRow("_zero3_consolidated_16bit_state_dict _consolidated_16bit_state_dict"),
    EngineRow("compile is_compiled empty_partition_cache"),
    EngineRow(
        "deepspeed_io",
        'every rank gives the whole dataset; `route` "eval" or "predict" looks at each sample once, in the dataset\'s '
        "order",
    ),
    EngineRow(
        "train_batch eval_batch",
        "on every engine; one with pipeline stages raises `PipelineError` on `forward`, `backward` and `step`",
    ),
    EngineRow("set_dataloader set_dataiterator set_batch_fn get_additional_losses"),
    EngineRow("is_first_stage is_last_stage get_pipeline_parallel_rank grid micro_batches num_stages stage_id"),
    EngineRow("reset_activation_shape set_has_attention_mask", "without effect: every message says its shapes"),
    EngineRow(
        "destroy",
        "leaves a process group that the script made or joined by `init_distributed`, or that another engine is on",
    ),
)
