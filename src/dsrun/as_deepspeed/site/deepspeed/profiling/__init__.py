"""deepspeed.profiling: what a model computes."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__)
