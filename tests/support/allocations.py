"""What torch's CPU allocator hands out while a function runs. Call it in a process of its own: `run_ranks(1, body)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def allocations(run: Callable[[], object]) -> list[int]:
    """Returns the sizes in order, negative where memory is given back that was handed out under a profiler."""
    # What is under `torch.profiler`: that one makes a table of all operators too, which takes ten times as long.
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as seen:
        run()
    raw: Any = seen
    events = [event for event in raw.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak_of(sizes: list[int]) -> int:
    """Returns the most that is held at once."""
    held = most = 0
    for size in sizes:
        held += size
        most = max(most, held)
    return most
