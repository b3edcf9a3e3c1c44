"""dsrun.long_sequence: what lets a long sequence fit, see docs/guides/long-sequences.md.

A face like `dsrun` itself, loaded on first use: importing it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsrun.runtime.long_sequence.attention import attention as attention
    from dsrun.runtime.long_sequence.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from dsrun.runtime.long_sequence.tiling import TiledMLP as TiledMLP
    from dsrun.runtime.long_sequence.tiling import tiled as tiled
else:
    from dsrun.faces import lazy_face

    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "dsrun.runtime.long_sequence.attention": ("attention",),
            "dsrun.runtime.long_sequence.cross_entropy": ("linear_cross_entropy",),
            "dsrun.runtime.long_sequence.tiling": ("TiledMLP", "tiled"),
        },
    )
