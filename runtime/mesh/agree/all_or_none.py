"""Work that succeeds on every rank or on none: a failure of one rank is raised on all of them, with its cause.

A rank that raised alone would leave the others waiting for it, or training on without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from dsrun.errors import CheckpointError, DsrunError

from ..collectives import Collectives

#: Of a message, and of its hint, so much is told to other ranks.
_TOLD_BYTES = 1024

T = TypeVar("T")


def all_or_none(work: Callable[[], T], collectives: Collectives, *, device: torch.device, label: str, where: str) -> T:
    """Runs each rank's part and returns what it gave, if all ranks have done theirs.

    Enters one all-reduce of two numbers, and where a rank failed one broadcast of 2 KiB.

    Args:
        work: function that does this rank's part; it enters no collective.
        collectives: the axis; every rank must call.
        device: device of the collectives' tensors.
        label: name of the work that is attempted, shown to observers while a rank waits for the others' parts.
        where: thing that is worked on, which begins messages.

    Raises:
        CheckpointError: on every rank, where one failed: on ranks that failed their own error, on the others that of
            the first rank that did.
        DsrunError: the rank's own, where each rank has one.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:  # whatever it is: the other ranks wait, and it is raised below
        error = raised
    size, rank = collectives.size, collectives.rank
    told = torch.tensor([0, 1] if error is None else [size - rank, 0], dtype=torch.int64, device=device)
    collectives.all_reduce(told, op="max", label=f"{label} outcome").wait()
    with collectives.reading(f"{label} outcome"):
        place, any_done = told.tolist()
    if not place:
        return result  # pyright: ignore[reportReturnType]  (`work` has returned it)
    first = size - place
    message, hint = tell_error(error, first, collectives, device=device, label=label) if size > 1 else ("", "")
    if error is None:
        raise CheckpointError(f"{where}: rank {first}: {message}", hint=hint or None)
    if isinstance(error, CheckpointError) or (isinstance(error, DsrunError) and not any_done):
        raise error
    raise CheckpointError(f"{where}: {_words(error)}", hint=_hint(error) or None) from error


def tell_error(
    error: Exception | None, first: int, collectives: Collectives, *, device: torch.device, label: str
) -> tuple[str, str]:
    """Returns the message and the hint of one rank's error on every rank; one broadcast of 2 KiB.

    Args:
        error: this rank's error; None where it has none.
        first: the rank whose error is meant.
        collectives: the axis; every rank must call.
        device: device of the collectives' tensors.
        label: name of the work that was attempted, shown to observers while a rank waits.
    """
    texts = [_words(error), _hint(error)] if collectives.rank == first and error is not None else ["", ""]
    told = b"".join(text.encode("utf-8", "replace")[:_TOLD_BYTES].ljust(_TOLD_BYTES, b"\0") for text in texts)
    row = torch.tensor(list(told), dtype=torch.uint8, device=device)
    collectives.broadcast(row, source=first, label=f"{label} error").wait()
    with collectives.reading(f"{label} error"):
        text = bytes(row.tolist())
    message, hint = (part.rstrip(b"\0").decode("utf-8", "replace") for part in (text[:_TOLD_BYTES], text[_TOLD_BYTES:]))
    return message, hint


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, DsrunError | OSError) else f"{type(error).__name__}: {error}"


def _hint(error: Exception | None) -> str:
    return (error.hint or "") if isinstance(error, DsrunError) else ""
