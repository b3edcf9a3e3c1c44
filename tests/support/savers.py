"""Savers over ranks that are threads of this process, with a state that says which save it is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.calls import FileCalls
from dsrun.runtime.checkpoint.format.load import read
from dsrun.runtime.checkpoint.format.policy import SavePolicy
from dsrun.runtime.checkpoint.save.request import SaveRequest
from dsrun.runtime.checkpoint.save.saver import Saver
from dsrun.runtime.mesh.host_memory.noticeboard import LocalNoticeboard
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.protocols import StateEntry
from support.entries import all_of, empty_like, entry_of

CPU = torch.device("cpu")
SHAPES = {"w": (7, 5), "b": (13,), "gain": ()}


def nothing() -> None:
    """Progress that nobody watches."""


def entries_of(value: float, *, rank: int, size: int, dtype: torch.dtype = torch.float32) -> list[StateEntry]:
    """Pieces of `SHAPES` cut over the ranks, and a buffer that all of them hold, all filled by `value` and a count."""
    entries: list[StateEntry] = []
    for name, shape in SHAPES.items():
        numel = int(torch.tensor(shape).prod())
        whole = value + torch.arange(numel, dtype=dtype)
        start, stop = numel * rank // size, numel * (rank + 1) // size
        entries.append(entry_of(name, whole[start:stop].clone(), shape=shape, start=start))
    mask = torch.full((3,), bool(int(value) % 2))
    return [*entries, entry_of("mask", mask, role="buffer", holders=all_of(size, rank))]


def wanted(value: float, *, rank: int, size: int, **changes: Any) -> SaveRequest:
    """What a save of that state wants."""
    members: dict[str, Any] = {
        "entries": entries_of(value, rank=rank, size=size),
        "values": {"value": value},
        "rank_values": {"rank": rank},
        "aliases": {"tied": "w"},
        "save_latest": True,
        "when_saved": lambda nbytes, seconds: None,
    }
    return SaveRequest(**{**members, **changes})


def with_savers(
    size: int, body: Callable[[Saver, int], Any], *, calls: FileCalls | None = None, **policy: Any
) -> list[Any]:
    """Runs `body(saver, rank)` once a rank and returns the results."""
    board = LocalNoticeboard()

    def run(collectives: LoopbackCollectives) -> Any:
        saver = Saver(collectives, board, device=CPU, policy=SavePolicy(**policy), calls=calls)
        try:
            return body(saver, collectives.rank)
        finally:
            saver.close(nothing)

    return LoopbackWorld(size).run(run)


def save_one(folder: Path, tag: str, value: float, *, size: int = 1, calls: FileCalls | None = None) -> None:
    """Saves one state from this process."""

    def body(saver: Saver, rank: int) -> None:
        saver.save(folder, tag, lambda: wanted(value, rank=rank, size=size), progress=nothing)

    with_savers(size, body, calls=calls, asynchronous=False)


def value_of(target: Path, *, sizes: Sequence[int] = (1, 3)) -> float:
    """Loads a tag on some numbers of ranks, checks that it is one state, and returns which."""
    index = read_index(target)
    value = index.values["value"]
    for size in sizes:
        for rank in range(size):
            expected = entries_of(value, rank=rank, size=size)
            found = [empty_like(entry) for entry in expected]
            read(index, target, found)
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(found, expected, strict=True))
    return value
