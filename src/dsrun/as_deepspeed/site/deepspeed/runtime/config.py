"""deepspeed.runtime.config: a config as an object, with its batch sizes for the ranks that there are."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.config_views": [
            "ADAGRAD_OPTIMIZER",
            "ADAMW_OPTIMIZER",
            "ADAM_OPTIMIZER",
            "DEEPSPEED_OPTIMIZERS",
            "DeepSpeedActivationCheckpointingConfig",
            "DeepSpeedConfig",
            "LAMB_OPTIMIZER",
            "LION_OPTIMIZER",
            "MUADAMW_OPTIMIZER",
            "MUADAM_OPTIMIZER",
            "MUON_OPTIMIZER",
            "MUSGD_OPTIMIZER",
            "get_zero_config",
        ],
        "dsrun.errors": ["ConfigError as DeepSpeedConfigError"],
        "dsrun.runtime.deepspeed.offload_names": ["ZeroStageEnum"],
    },
)
