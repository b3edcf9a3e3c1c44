"""dsrun.ops: DeepSpeed's optimizer classes where scripts import them from; see docs/guides/optimizers.md.

A face like `dsrun` itself: importing it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsrun.ops import adagrad as adagrad
    from dsrun.ops import adam as adam
    from dsrun.ops import lamb as lamb
    from dsrun.ops import lion as lion
else:
    from dsrun.faces import lazy_face

    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "dsrun.ops": ("adagrad", "adam", "lamb", "lion"),
        },
    )
