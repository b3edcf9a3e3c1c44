"""deepspeed.profiling.flops_profiler.profiler: deepspeed.profiling.flops_profiler."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.estimates.flops": [
            "FlopsProfiler",
            "bytes_to_string",
            "duration_to_string",
            "flops_to_string",
            "get_model_profile",
            "macs_to_string",
            "number_to_string",
            "params_to_string",
        ],
    },
)
