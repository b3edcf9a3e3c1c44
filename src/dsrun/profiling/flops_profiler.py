"""dsrun.profiling.flops_profiler: FLOPs, parameters and time of a model's forward, module by module.

A face like `dsrun` itself, loaded on first use: importing it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsrun.runtime.deepspeed.estimates.flops import FlopsProfiler as FlopsProfiler
    from dsrun.runtime.deepspeed.estimates.flops import bytes_to_string as bytes_to_string
    from dsrun.runtime.deepspeed.estimates.flops import duration_to_string as duration_to_string
    from dsrun.runtime.deepspeed.estimates.flops import flops_to_string as flops_to_string
    from dsrun.runtime.deepspeed.estimates.flops import get_model_profile as get_model_profile
    from dsrun.runtime.deepspeed.estimates.flops import macs_to_string as macs_to_string
    from dsrun.runtime.deepspeed.estimates.flops import number_to_string as number_to_string
    from dsrun.runtime.deepspeed.estimates.flops import params_to_string as params_to_string
else:
    from dsrun.faces import lazy_face

    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "dsrun.runtime.deepspeed.estimates.flops": (
                "FlopsProfiler",
                "bytes_to_string",
                "duration_to_string",
                "flops_to_string",
                "get_model_profile",
                "macs_to_string",
                "number_to_string",
                "params_to_string",
            ),
        },
    )
