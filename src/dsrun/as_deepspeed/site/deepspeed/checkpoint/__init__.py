"""deepspeed.checkpoint: keys and names of checkpoints' files, and what scripts do with state before they save it."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.runtime.checkpoint.convert.deepspeed_keys": ["*"]})
