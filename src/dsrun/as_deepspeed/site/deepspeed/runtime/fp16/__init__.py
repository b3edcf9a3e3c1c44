"""deepspeed.runtime.fp16: loss scales, and classes of optimizers."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__)
