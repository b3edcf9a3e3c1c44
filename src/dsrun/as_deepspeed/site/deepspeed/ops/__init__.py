"""deepspeed.ops: optimizers; none of them is compiled at run time."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__)
