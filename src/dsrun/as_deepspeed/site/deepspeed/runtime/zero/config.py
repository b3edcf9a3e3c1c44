"""deepspeed.runtime.zero.config: the section zero_optimization of a config."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.config_views": ["DeepSpeedZeroConfig", "get_zero_config"],
        "dsrun.runtime.deepspeed.offload_names": ["ZeroStageEnum"],
    },
)
