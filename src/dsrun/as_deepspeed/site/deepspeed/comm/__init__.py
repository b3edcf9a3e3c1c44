"""deepspeed.comm: dsrun.comm, which is torch.distributed and a few names more."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.comm": ["*"]}, beyond="dsrun.comm")
