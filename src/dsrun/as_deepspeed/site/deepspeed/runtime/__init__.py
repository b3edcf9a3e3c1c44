"""deepspeed.runtime: the engine and what belongs to it."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__)
