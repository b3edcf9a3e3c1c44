"""Whether a GPU is in use by somebody else, or full: a rule over values, pure.

Who counts as a user stands in machine/gpus/users.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from dsrun.units import format_bytes

from ..verdict import Context

#: A CUDA context with NCCL's buffers takes about so much before the first tensor.
_LEAST_BYTES = 512 << 20
_FIX = (
    "take others with `gpus=` in the hostfile or `--include` (on its own machine `dsrun run` takes free ones by "
    "itself), or end what is there"
)


def use_remarks(
    used_by: Sequence[str], *, free_bytes: int | None, total_bytes: int | None, context: Context
) -> Iterator[tuple[Literal["red", "amber"], str, str, str]]:
    """Judges who is on a GPU that a job may take.

    Args:
        used_by: users of the GPU, in words, without those of the job itself.
        free_bytes: memory that nobody has there.
        total_bytes: all of it.
        context: the jobs; those that are sure to take this GPU fail on one that is full.

    Yields:
        a `Remark`.
    """
    full = is_full(free_bytes)
    if not used_by and not (full and context.needs_gpus):
        return
    text = f"used by {', '.join(used_by)}" if used_by else "full"
    if free_bytes is not None and total_bytes is not None:
        text += f", {format_bytes(free_bytes)} of {format_bytes(total_bytes)} free"
    fails = full and context.needs_gpus and not context.takes_free_gpus
    yield "red" if fails else "amber", text, _FIX, "state.processes"


def is_full(free_bytes: int | None) -> bool:
    """Whether a GPU has no room for one more rank; not where that is unknown."""
    return free_bytes is not None and free_bytes < _LEAST_BYTES
