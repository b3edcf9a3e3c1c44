"""Attention's kernels in a plan: a line each for people, 80 columns, and plain values for programs."""

from __future__ import annotations

import textwrap
from typing import Any

from dsrun.choices.attention_kernels import KERNELS
from dsrun.estimate.model.attention import AttentionEstimate

_WIDTH = 80
_LABEL = 26
_COLUMN = 11
_MIB = 1 << 20


def describe_attention(attention: AttentionEstimate) -> list[str]:
    """Returns a table of the kernels, and why one of them is taken."""
    columns = "".join(f"{name:>{_COLUMN}}" for name in ("kept", "forward", "backward"))
    lines = [f"{'attention of a block':<{_LABEL}}{columns}  MiB"]
    for kernel in KERNELS:
        obstacle = attention.choice.obstacles.get(kernel)
        if obstacle is not None:
            lines += _wrapped(f"  {kernel:<{_LABEL - 2}}", f"cannot: {obstacle}")
            continue
        held = attention.held[kernel]
        sizes = "".join(f"{size / _MIB:>{_COLUMN},.1f}" for size in (held.kept, held.forward, held.backward))
        lines.append(f"  {kernel:<{_LABEL - 2}}{sizes}{'  <- taken' if kernel == attention.choice.kernel else ''}")
    return [*lines, *_wrapped("  ", f"{attention.choice.kernel} is taken: {attention.choice.reason}")]


def attention_json(attention: AttentionEstimate | None) -> dict[str, Any] | None:
    """Returns the same as plain JSON values, bytes as numbers; None where the layers are not known."""
    if attention is None:
        return None
    return {
        "kernel": attention.choice.kernel,
        "reason": attention.choice.reason,
        "kernels": [
            {
                "name": kernel,
                "obstacle": attention.choice.obstacles.get(kernel),
                "kept_bytes": attention.held[kernel].kept,
                "forward_bytes": attention.held[kernel].forward,
                "backward_bytes": attention.held[kernel].backward,
            }
            for kernel in KERNELS
        ],
    }


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)
