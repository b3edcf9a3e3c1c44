"""deepspeed.runtime.base_optimizer: classes to ask by isinstance what an engine has made of an optimizer."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.optimizer_types": ["DeepSpeedOptimizer", "ZeROOptimizer"],
    },
)
