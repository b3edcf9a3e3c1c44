"""Recomputing all of a block but what chosen operations gave, by torch's own contexts for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from dsrun.errors import ModelError

from .options import Contexts

#: Matrix products and fused attention: nearly all of a transformer's operations by time, about half by bytes.
MATMULS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)


def contexts_for(operations: Sequence[str] = ()) -> Contexts:
    """Returns what makes the contexts of a call's two runs.

    Args:
        operations: names of operations in `torch.ops.aten` with results to keep; empty for `MATMULS`.

    Raises:
        ModelError: a name is no operation of this torch.
    """
    kept = [overload for name in operations or _known(MATMULS) for overload in _overloads(name)]
    return partial(_contexts, kept)


def _contexts(kept: list[Any]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(kept)  # pyright: ignore[reportUnknownVariableType]


def _known(names: Sequence[str]) -> list[str]:
    """Those that this torch has: attention kernels come and go."""
    return [name for name in names if hasattr(torch.ops.aten, name)]


def _overloads(name: str) -> list[Any]:
    packet: Any = getattr(torch.ops.aten, name.removeprefix("aten."), None)
    if packet is None:
        raise ModelError(
            f"`activation_checkpointing.keep_operations` has {name!r}, which torch {torch.__version__} does not know",
            hint=f"names are those of torch.ops.aten, e.g. {', '.join(MATMULS[:3])}",
        )
    return [getattr(packet, overload) for overload in packet.overloads()]
