"""deepspeed.runtime.constants: what scripts hand to the engine. Config keys are text."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.as_deepspeed.constants": ["ROUTE_EVAL", "ROUTE_PREDICT", "ROUTE_TRAIN"],
    },
)
