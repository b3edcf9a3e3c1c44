"""deepspeed.utils.groups: which ranks share what."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.runtime.deepspeed.groups": ["*"]})
