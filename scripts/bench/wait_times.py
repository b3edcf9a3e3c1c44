"""What it costs the host to count a wait: the heartbeat alone, a wait of a thread, a wait of a stream.

    python scripts/bench/wait_times.py [--waits 2000] [--rounds 15]

A wait of a stream takes two events and a read of both. They are CUDA's own where torch sees a GPU; elsewhere they are
objects that do nothing, so that the figure is that of Python alone. One process; the kinds take turns, and a figure is
the median over rounds of microseconds a wait, with the least and the most.

Caveats: waits are of 100 names, as in a step of 50 units; the table of heartbeats is real memory that nobody reads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from dsrun.contract.heartbeats import HeartbeatTable, HeartbeatWriter
from dsrun.runtime.mesh.collectives import WaitKind
from dsrun.runtime.mesh.wait_times import WaitTimes

_NAMES = [f"reduce_scatter of unit {number} `transformer.h.{number}`" for number in range(100)]


class Nothing:
    """An event that does nothing; see `TimingEvent`."""

    def record(self) -> None:
        """See `TimingEvent`."""

    def query(self) -> bool:
        """See `TimingEvent`."""
        return True

    def elapsed_time(self, end_event: object) -> float:
        """See `TimingEvent`."""
        del end_event
        return 1.0


def heartbeat_alone(heartbeat: HeartbeatWriter, waits: int) -> None:
    """Tells the heartbeat, and counts nothing."""
    for number in range(waits):
        heartbeat.enter(_NAMES[number % 100])
        heartbeat.leave(0.001)


def counted(times: WaitTimes, waits: int, kind: WaitKind) -> None:
    """Counts waits of a kind, with a read behind each 100, as in a step."""
    for number in range(waits):
        times.enter(_NAMES[number % 100], kind)
        times.leave(0.001)
        if number % 100 == 99:
            times.enter("results of gradient norm", WaitKind.READ)
            times.leave(0.001)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waits", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    table = HeartbeatTable(1)
    heartbeat = HeartbeatWriter(table.path)
    has_gpu = torch.cuda.is_available()
    times = WaitTimes(heartbeat) if has_gpu else WaitTimes(heartbeat, make_event=Nothing, is_capturing=lambda: False)
    kinds: dict[str, Callable[[], None]] = {
        "heartbeat alone": lambda: heartbeat_alone(heartbeat, options.waits),
        "a wait of a thread": lambda: counted(times, options.waits, WaitKind.THREAD),
        f"a wait of a stream, {'CUDA events' if has_gpu else 'events that do nothing'}": lambda: counted(
            times, options.waits, WaitKind.STREAM
        ),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for round_ in range(options.rounds + 1):
        for name, run in kinds.items():
            begun_s = time.perf_counter()
            run()
            if round_:
                found[name].append((time.perf_counter() - begun_s) / options.waits * 1e6)
    for name, each in found.items():
        print(f"{name:<48} {statistics.median(each):6.2f} us a wait ({min(each):.2f} to {max(each):.2f})")


if __name__ == "__main__":
    main()
