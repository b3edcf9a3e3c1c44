"""deepspeed.moe: which parameters are experts; there is no layer of them."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__)
