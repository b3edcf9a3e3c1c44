"""dsrun.profiling: what a forward takes, by the names of DeepSpeed's package; see docs/internals/flops.md.

A face like `dsrun` itself: importing it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsrun.profiling import flops_profiler as flops_profiler
else:
    from dsrun.faces import lazy_face

    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "dsrun.profiling": ("flops_profiler",),
        },
    )
