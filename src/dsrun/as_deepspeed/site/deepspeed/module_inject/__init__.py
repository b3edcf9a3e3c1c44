"""deepspeed.module_inject: layers that DeepSpeed replaces; here none is."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__)
