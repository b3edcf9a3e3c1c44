"""deepspeed.comm.reduce_op: what a collective does with numbers."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"torch.distributed": ["ReduceOp"]})
