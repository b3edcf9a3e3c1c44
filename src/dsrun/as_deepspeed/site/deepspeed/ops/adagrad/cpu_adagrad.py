"""deepspeed.ops.adagrad.cpu_adagrad: dsrun.ops.adagrad."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.ops.adagrad": ["DeepSpeedCPUAdagrad"]})
