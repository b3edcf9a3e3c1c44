"""deepspeed.accelerator.abstract_accelerator: the class of accelerators."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.runtime.accelerator": ["Accelerator as DeepSpeedAccelerator"]})
