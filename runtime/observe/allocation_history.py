"""Torch's record of allocations on a GPU, and which stacks held memory at its peak. Decides not when to record."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dsrun.contract.environment import MEMORY_HISTORY_ENV, RUN_DIR_ENV
from dsrun.contract.job_paths import JobPaths
from dsrun.memory_use.stacks import StacksAtPeak, StackUse

from ..compat import memory_trace, start_memory_history, stop_memory_history

_MOST_STACKS, _MOST_FRAMES = 10, 3
_ALLOC, _FREE = "alloc", "free_completed"


class AllocationHistory:
    """Records between `start` and `finish`.

    Args:
        device: a GPU.
        snapshot: file to write for torch's viewer; None for none.
    """

    def __init__(self, device: torch.device, *, snapshot: Path | None) -> None:
        self._device = device
        self._snapshot = snapshot
        self._before_bytes = 0

    def start(self) -> None:
        """Begins to record: some microseconds an allocation from here on, for its Python stack."""
        self._before_bytes = torch.cuda.memory_allocated(self._device)
        start_memory_history(self._device)

    def finish(self) -> StacksAtPeak:
        """Ends the recording, and writes the snapshot if one is wanted."""
        events = memory_trace(self._device, snapshot=self._snapshot)
        stop_memory_history()
        path = None if self._snapshot is None else str(self._snapshot)
        return stacks_at_peak(events, before_bytes=self._before_bytes, snapshot=path)


def wanted_history(
    *, device: torch.device, rank: int, environ: Mapping[str, str] | None = None
) -> AllocationHistory | None:
    """Returns the history that `--memory-history` asks rank 0 for; says so where torch records none.

    Args:
        device: device that the model is on.
        rank: rank of this process.
        environ: variables; those of this process by default.
    """
    env = os.environ if environ is None else environ
    if rank != 0 or not env.get(MEMORY_HISTORY_ENV):
        return None
    if device.type != "cuda":
        print(
            f"dsrun: --memory-history: torch records allocations on GPUs only, and this model is on {device}; "
            "nothing is recorded. `dsrun memory` tells its memory by kind all the same",
            flush=True,
        )
        return None
    folder = env.get(RUN_DIR_ENV)
    return AllocationHistory(device, snapshot=JobPaths(Path(folder)).memory_history if folder else None)


def stacks_at_peak(
    events: Sequence[Mapping[str, Any]], *, before_bytes: int, snapshot: str | None = None
) -> StacksAtPeak:
    """Replays allocations up to the moment at which most bytes were in use.

    Args:
        events: torch's `TraceEntry`s of one device, in order of time; of them allocations and frees count.
        before_bytes: bytes in use when the first event was recorded.
        snapshot: path of the snapshot file, passed on to the result; None for none.
    """
    top = _peak_index(events, before_bytes)
    live: dict[int, Mapping[str, Any]] = {}
    before = before_bytes
    for event in events[:top]:
        if event["action"] == _ALLOC:
            live[event["addr"]] = event
        elif event["action"] == _FREE and live.pop(event["addr"], None) is None:
            before -= event["size"]
    held: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for event in live.values():
        held[_own_frames(event.get("frames", ()))].append(event["size"])
    uses = [StackUse(nbytes=sum(sizes), count=len(sizes), frames=frames) for frames, sizes in held.items()]
    uses.sort(key=lambda use: -use.nbytes)
    return StacksAtPeak(
        peak_bytes=before + sum(use.nbytes for use in uses),
        before_bytes=before,
        stacks=tuple(uses[:_MOST_STACKS]),
        snapshot=snapshot,
    )


def _peak_index(events: Sequence[Mapping[str, Any]], before_bytes: int) -> int:
    """Returns how many events had happened when most was in use for the first time."""
    most, now, top = before_bytes, before_bytes, 0
    for number, event in enumerate(events, start=1):
        if event["action"] == _ALLOC:
            now += event["size"]
        elif event["action"] == _FREE:
            now -= event["size"]
        if now > most:
            most, top = now, number
    return top


def _own_frames(frames: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the innermost frames outside of torch, for its own say little; its own where there are no others."""
    told = [(f["filename"], f"{f['filename']}:{f['line']} {f['name']}") for f in frames]
    own = [text for filename, text in told if "/torch/" not in filename]
    return tuple((own or [text for _, text in told])[:_MOST_FRAMES])
