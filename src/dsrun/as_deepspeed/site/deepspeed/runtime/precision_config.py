"""deepspeed.runtime.precision_config: the sections fp16 and bf16 of a config."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.config_views": ["DeepSpeedBF16Config", "DeepSpeedFP16Config"],
    },
)
