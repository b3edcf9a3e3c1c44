"""deepspeed.profiling.flops_profiler.profiler: deepspeed.profiling.flops_profiler."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"deepspeed.profiling.flops_profiler": ["*"]})
