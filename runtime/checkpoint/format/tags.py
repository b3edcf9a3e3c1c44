"""One tag for all ranks: what each of them was given is compared before anything is saved under it."""

from __future__ import annotations

import hashlib
import os
from typing import Literal

import torch

from dsrun.errors import CheckpointError

from ...mesh.agree.same import largest
from ...mesh.collectives import Collectives

#: A tag may have 200 letters; of a longer one, which is refused later, so much is told.
_TOLD_BYTES = 208
_HINT = "give save_checkpoint the same tag on every rank"


def tag_text(tag: object) -> str:
    """Returns the name that a script means by a tag: a text, a number, or any `os.PathLike`."""
    return os.fsdecode(tag) if isinstance(tag, os.PathLike) else str(tag)  # pyright: ignore[reportUnknownArgumentType]


def one_tag(
    mine: str, collectives: Collectives, *, device: torch.device, where_they_differ: Literal["Ignore", "Warn", "Fail"]
) -> str:
    """Returns the tag that all ranks save under, rank 0's; one all-reduce, and where they differ an all-gather.

    Args:
        mine: tag that this rank was given.
        collectives: all ranks; every one must call.
        device: device of the tensors that the collectives use.
        where_they_differ: Warn: rank 0 prints which ranks were given which others; Fail: all raise that.

    Raises:
        CheckpointError: on every rank, where they differ and that is to fail.
    """
    number = float(int.from_bytes(hashlib.sha256(mine.encode()).digest()[:6], "big"))
    most, least = largest([number, -number], collectives, device=device, label="checkpoint tag")
    if most == -least:
        return mine
    told = _gather(mine, collectives, device=device)
    others = ", ".join(f"rank {rank}'s is {tag!r}" for rank, tag in enumerate(told) if tag != told[0])
    message = f"save_checkpoint: rank 0's tag is {told[0]!r}, {others}"
    if where_they_differ == "Fail":
        raise CheckpointError(message, hint=_HINT)
    if where_they_differ == "Warn" and collectives.rank == 0:
        print(f"{message}; rank 0's is taken, {_HINT}", flush=True)
    return told[0]


def first_ranks_text(mine: str, collectives: Collectives, *, device: torch.device) -> str:
    """Returns rank 0's text; one all-gather.

    Args:
        mine: text of this rank, up to 208 bytes of UTF-8.
        collectives: all ranks; every one must call.
        device: device of the tensors that the collective uses.
    """
    return _gather(mine, collectives, device=device)[0]


def _gather(mine: str, collectives: Collectives, *, device: torch.device) -> list[str]:
    text = mine.encode("utf-8", "replace")[:_TOLD_BYTES].ljust(_TOLD_BYTES, b"\0")
    shard = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    everyone = torch.empty(_TOLD_BYTES * collectives.size, dtype=torch.uint8, device=device)
    collectives.all_gather(everyone, shard, label="checkpoint tags").wait()
    with collectives.reading("checkpoint tags"):
        rows = everyone.view(collectives.size, _TOLD_BYTES).tolist()
    return [bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in rows]
