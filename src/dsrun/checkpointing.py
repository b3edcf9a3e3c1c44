"""dsrun.checkpointing: recompute activations call by call, with the functions of `deepspeed.checkpointing`.

A face like `dsrun` itself, loaded on first use: importing it imports no torch. A model whose blocks dsrun finds needs
none of this: the config's section `activation_checkpointing` is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsrun.runtime.activation.configured import checkpoint as checkpoint
    from dsrun.runtime.activation.configured import configure as configure
    from dsrun.runtime.activation.configured import get_cuda_rng_tracker as get_cuda_rng_tracker
    from dsrun.runtime.activation.configured import is_configured as is_configured
    from dsrun.runtime.activation.configured import model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed
    from dsrun.runtime.activation.configured import non_reentrant_checkpoint as non_reentrant_checkpoint
    from dsrun.runtime.activation.configured import (
        partition_activations_in_checkpoint as partition_activations_in_checkpoint,
    )
    from dsrun.runtime.activation.configured import profile_table as profile_table
    from dsrun.runtime.activation.configured import reset as reset
    from dsrun.runtime.activation.recompute.reversible import Reversible as Reversible
    from dsrun.runtime.activation.recompute.reversible import ReversibleStack as ReversibleStack
else:
    from dsrun.faces import lazy_face

    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "dsrun.runtime.activation.configured": (
                "checkpoint",
                "configure",
                "get_cuda_rng_tracker",
                "is_configured",
                "model_parallel_cuda_manual_seed",
                "non_reentrant_checkpoint",
                "partition_activations_in_checkpoint",
                "profile_table",
                "reset",
            ),
            "dsrun.runtime.activation.recompute.reversible": ("Reversible", "ReversibleStack"),
        },
    )
