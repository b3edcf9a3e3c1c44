"""deepspeed.checkpoint.constants: keys and file names of checkpoints."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.runtime.checkpoint.convert.deepspeed_keys": ["*"]})
