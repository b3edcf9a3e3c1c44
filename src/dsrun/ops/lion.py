"""dsrun.ops.lion: Lion, loaded on first use: importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsrun.runtime.optim.algorithms.deepspeed_classes import DeepSpeedCPULion as DeepSpeedCPULion
    from dsrun.runtime.optim.algorithms.deepspeed_classes import FusedLion as FusedLion
else:
    from dsrun.faces import lazy_face

    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "dsrun.runtime.optim.algorithms.deepspeed_classes": ("DeepSpeedCPULion", "FusedLion"),
        },
    )
