"""deepspeed.comm.torch: torch.distributed as an object."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.comm": ["TorchBackend"]})
