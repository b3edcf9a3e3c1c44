"""deepspeed.launcher: names for those who start ranks; `dsrun` starts them."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__)
