"""deepspeed: dsrun under DeepSpeed's names, in a job that asked for it. Re-exports only, here and below."""

from dsrun.as_deepspeed.face import begin, face

begin()

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun": [
            *("DeepSpeedEngine", "OnDevice", "PipelineModule"),
            "add_config_arguments",
            "comm as dist",
            "init_distributed",
            "initialize",
            "tp_model_init",
        ],
        "dsrun.as_deepspeed.version_names": ["*"],
        "dsrun.log_on_ranks": ["log_dist", "logger"],
        "dsrun.runtime.accelerator": ["get_accelerator"],
        "deepspeed.constants": ["TORCH_DISTRIBUTED_DEFAULT_PORT"],
        "deepspeed.runtime.base_optimizer": ["DeepSpeedOptimizer"],
        "deepspeed.runtime.config": ["DeepSpeedConfig", "DeepSpeedConfigError", "MUON_OPTIMIZER"],
        "deepspeed.runtime.dataloader": ["DeepSpeedDataLoader"],
        "deepspeed.runtime.pipe.engine": ["PipelineEngine"],
        "deepspeed.runtime": ["zero"],
        "deepspeed.runtime.activation_checkpointing": ["checkpointing"],
    },
)
