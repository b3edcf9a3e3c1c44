"""dsrun.checkpointing: recompute activations call by call, with the functions of `deepspeed.checkpointing`.

A face like `dsrun` itself, loaded on first use: importing it imports no torch. A model whose blocks dsrun finds needs
none of this: the config's section `activation_checkpointing` is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsrun.runtime.activation.configured import (
        checkpoint,
        configure,
        get_cuda_rng_tracker,
        is_configured,
        model_parallel_cuda_manual_seed,
        non_reentrant_checkpoint,
        partition_activations_in_checkpoint,
        profile_table,
        reset,
    )
    from dsrun.runtime.activation.recompute.reversible import Reversible, ReversibleStack

__all__ = [
    "Reversible",
    "ReversibleStack",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "profile_table",
    "reset",
]

_HOME = dict.fromkeys(__all__, "dsrun.runtime.activation.configured") | {
    "Reversible": "dsrun.runtime.activation.recompute.reversible",
    "ReversibleStack": "dsrun.runtime.activation.recompute.reversible",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dsrun.checkpointing' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
