"""dsrun.data: training data that a resumed run goes on with, for scripts that have a DataLoader of their own.

A face like `dsrun` itself, loaded on first use: importing it imports no torch. `dsrun.initialize(training_data=...)`
makes a loader of these parts by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsrun.runtime.data.loader import LoaderOptions as LoaderOptions
    from dsrun.runtime.data.loader import TrainingLoader as TrainingLoader
    from dsrun.runtime.data.repeating import RepeatingLoader as RepeatingLoader
    from dsrun.runtime.data.sampler import ShardedSampler as ShardedSampler
    from dsrun.runtime.data.worker_process import leave_signals_to_rank as leave_signals_to_rank
else:
    from dsrun.faces import lazy_face

    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "dsrun.runtime.data.loader": ("LoaderOptions", "TrainingLoader"),
            "dsrun.runtime.data.repeating": ("RepeatingLoader",),
            "dsrun.runtime.data.sampler": ("ShardedSampler",),
            "dsrun.runtime.data.worker_process": ("leave_signals_to_rank",),
        },
    )
