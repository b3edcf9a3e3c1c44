"""deepspeed.runtime.activation_checkpointing: recomputed activations."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__)
