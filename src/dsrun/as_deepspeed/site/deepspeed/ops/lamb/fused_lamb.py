"""deepspeed.ops.lamb.fused_lamb: dsrun.ops.lamb."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.ops.lamb": ["FusedLamb"]})
