"""deepspeed.comm.comm: dsrun.comm, as deepspeed.comm."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.comm": ["*"]}, beyond="dsrun.comm")
