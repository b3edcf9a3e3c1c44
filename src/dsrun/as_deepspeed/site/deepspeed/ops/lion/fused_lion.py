"""deepspeed.ops.lion.fused_lion: dsrun.ops.lion."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.ops.lion": ["FusedLion"]})
