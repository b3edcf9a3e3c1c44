"""deepspeed.compression: attributes by their paths; weights are trained as they are."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__)
