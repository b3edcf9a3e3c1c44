"""deepspeed.runtime.fp16.unfused_optimizer: a class to ask by isinstance."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.optimizer_types": ["FP16_UnfusedOptimizer"],
    },
)
