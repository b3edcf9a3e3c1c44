"""deepspeed.runtime.zero.offload_config: what lives off the GPU, and where."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.config_views": [
            "DeepSpeedZeroOffloadOptimizerConfig",
            "DeepSpeedZeroOffloadParamConfig",
        ],
        "dsrun.runtime.deepspeed.offload_names": ["OffloadDeviceEnum", "OffloadStateTypeEnum"],
    },
)
