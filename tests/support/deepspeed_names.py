"""Names by which programs written for DeepSpeed reach it: where each is of dsrun, and which parameters are used.

The table of those without which transformers, accelerate, trl or peft do not work; `Known` is one row.
"""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """A name below `deepspeed`.

    Attributes:
        path: its path there.
        home: path of the same object in dsrun; empty where it is a module of the face's own.
        parameters: parameters that programs pass by name.
    """

    path: str
    home: str = ""
    parameters: tuple[str, ...] = ()


_INITIALIZE = (
    *("args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "distributed_port", "mpu"),
    *("dist_init_required", "collate_fn", "config", "mesh_param", "config_params"),
)
_JOIN = ("dist_backend", "auto_mpi_discovery", "distributed_port", "verbose", "timeout", "init_method", "rank")
_GATHER = ("params", "modifier_rank", "fwd_module", "enabled")
_INIT = ("module", "data_parallel_group", "remote_device", "pin_memory", "config_dict_or_path", "enabled", "dtype")
_ADAM = ("model_params", "lr", "betas", "eps", "weight_decay", "adamw_mode")
_ENGINE = "dsrun.runtime.engine.engine.Engine"
_ZERO = "dsrun.zero"
_SCHEDULES = "dsrun.runtime.optim.schedules"
_ACCELERATOR = "dsrun.runtime.accelerator.get_accelerator"

FIRST_TIER = (
    Known("initialize", "dsrun.initialize", _INITIALIZE),
    Known("add_config_arguments", "dsrun.add_config_arguments", ("parser",)),
    Known("__version__", "dsrun.as_deepspeed.version_names.__version__"),
    Known("version", "dsrun.as_deepspeed.version_names.__version__"),
    Known("git_version_info.version", "dsrun.as_deepspeed.version_names.__version__"),
    Known("DeepSpeedEngine", _ENGINE),
    Known("runtime.engine.DeepSpeedEngine", _ENGINE),
    *(
        Known(f"{module}.{name}", f"{_ZERO}.{name}", parameters)
        for module in ("zero", "runtime.zero", "runtime.zero.partition_parameters")
        for name, parameters in (
            ("GatheredParameters", _GATHER),
            ("Init", _INIT),
            ("ZeroParamStatus", ()),
            ("register_external_parameter", ("module", "parameter")),
        )
    ),
    Known("runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor", "", ("fn", "target_fp_dtype")),
    Known("runtime.zero.partition_parameters._orig_torch_arange", "torch.arange"),
    *(
        Known(f"{module}get_accelerator", _ACCELERATOR)
        for module in ("", "accelerator.", "accelerator.real_accelerator.", "runtime.zero.partition_parameters.")
    ),
    *(Known(f"{module}init_distributed", "dsrun.init_distributed", _JOIN) for module in ("", "comm.", "comm.comm.")),
    *(
        Known(f"{module}.{name}", home)
        for module in ("comm", "comm.comm")
        for name, home in (
            ("get_rank", "torch.distributed.get_rank"),
            ("get_world_size", "torch.distributed.get_world_size"),
            ("get_local_rank", "dsrun.comm.get_local_rank"),
            ("barrier", "torch.distributed.barrier"),
            ("all_reduce", "torch.distributed.all_reduce"),
            ("is_initialized", "torch.distributed.is_initialized"),
            ("ReduceOp", "torch.distributed.ReduceOp"),
            ("inference_all_reduce", "dsrun.comm.inference_all_reduce"),
            ("TorchBackend", "dsrun.comm.TorchBackend"),
        )
    ),
    Known("comm.torch.TorchBackend", "dsrun.comm.TorchBackend"),
    Known("runtime.lr_schedules.VALID_LR_SCHEDULES", f"{_SCHEDULES}.registry.VALID_LR_SCHEDULES"),
    Known("runtime.lr_schedules.WarmupLR", f"{_SCHEDULES}.warm_up.WarmupLR", ("optimizer", "warmup_num_steps")),
    Known("runtime.lr_schedules.WarmupDecayLR", f"{_SCHEDULES}.warm_up.WarmupDecayLR", ("optimizer",)),
    Known("runtime.lr_schedules.WarmupCosineLR", f"{_SCHEDULES}.warm_up.WarmupCosineLR", ("optimizer",)),
    Known("runtime.lr_schedules.OneCycle", f"{_SCHEDULES}.cycle.OneCycle", ("optimizer",)),
    Known("runtime.lr_schedules.LRRangeTest", f"{_SCHEDULES}.cycle.LRRangeTest", ("optimizer",)),
    Known("ops.adam.DeepSpeedCPUAdam", "dsrun.ops.adam.DeepSpeedCPUAdam", _ADAM),
    Known("ops.adam.cpu_adam.DeepSpeedCPUAdam", "dsrun.ops.adam.DeepSpeedCPUAdam", _ADAM),
    Known("ops.adam.FusedAdam", "dsrun.ops.adam.FusedAdam", ("params", "lr", "adam_w_mode", "weight_decay")),
    Known("ops.lion.DeepSpeedCPULion", "dsrun.ops.lion.DeepSpeedCPULion", ("lr", "weight_decay")),
    Known("ops.adagrad.DeepSpeedCPUAdagrad", "dsrun.ops.adagrad.DeepSpeedCPUAdagrad", ("lr", "weight_decay")),
    Known("checkpoint.utils.clone_tensors_for_torch_save", "", ("item", "device")),
    Known("utils.set_z3_leaf_modules", "dsrun.utils.set_z3_leaf_modules", ("model", "leaf_module_classes")),
    *(
        Known(f"utils.safe_{verb}_{part}_{what}", f"dsrun.utils.safe_{verb}_{part}_{what}", arguments)
        for verb, arguments in (("get", ("param",)), ("set", ("param", "value")))
        for part in ("full", "local")
        for what in ("fp32_param", "grad", "optimizer_state")
    ),
    *(
        Known(f"{module}.{name}", f"dsrun.log_on_ranks.{name}")
        for module in ("utils", "utils.logging")
        for name in ("logger", "log_dist")
    ),
    Known("launcher.runner.DEEPSPEED_ENVIRONMENT_NAME"),
    Known("checkpointing.checkpoint", "dsrun.checkpointing.checkpoint"),
    Known("runtime.activation_checkpointing.checkpointing.configure", "dsrun.checkpointing.configure"),
)
