"""How many bytes a job of several hosts puts on its channels: what `hosts.py` measures in its section `bytes`.

Counted at two places at the same moments. *Channel*: what passes `Channel.send`, `read_stdout` and `read_stderr` of the
transport, dsrun's own words, which are the same by every way. *Wire*: the counters of this machine's interface to the
hosts, headers of Ethernet, IP and TCP, acknowledgements and all of ssh included; nothing else uses that network.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from scale import Silence

from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.logs.job_output import JobOutput
from dsrun.launcher.plan.launch_plan import LaunchPlan, Program, make_plan
from dsrun.launcher.preflight.findings import Requirements
from dsrun.launcher.preflight.run import check_hosts
from dsrun.launcher.protocol import Output
from dsrun.launcher.session.job_run import JobRun, Policies
from dsrun.launcher.session.keepalive import BEATS_PER_LEASE
from dsrun.launcher.survey.client import Survey
from dsrun.launcher.transport.base import Channel, Transport

BLOCK_BYTES = 1_000_000
LINES = 200
LINE_BYTES = 100
_UP = b"up\n"
#: Each gate is opened for all ranks together, and only once all of them have come through the one before.
_GATES = ("block", "lines", "end")
#: A rank: a word, then nothing; a block; lines that come one by one, as those of a training do; its end.
_RANK = f"""
import os, sys, time
def wait(gate):
    os.read(os.open(os.path.join(sys.argv[1], gate), os.O_RDWR), 1)
def write(data):
    while data:
        data = data[os.write(1, data):]
line = b"x" * {LINE_BYTES - 1} + b"\\n"
write({_UP!r})
wait("block")
write(line * {BLOCK_BYTES // LINE_BYTES})
wait("lines")
for _ in range({LINES}):
    write(line)
    time.sleep(0.01)
wait("end")
"""
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes; what passed between two moments is the difference.

    Attributes:
        down: bytes sent to the hosts, counted on the channels.
        up: bytes received from the hosts, counted on the channels.
        wire_down: bytes sent to the hosts, counted on the wire.
        wire_up: bytes received from the hosts, counted on the wire.
    """

    down: float
    up: float
    wire_down: float
    wire_up: float

    def since(self, before: Traffic, *, parts: float) -> Traffic:
        """Returns what has passed since another moment, divided by `parts`."""
        return Traffic(
            (self.down - before.down) / parts,
            (self.up - before.up) / parts,
            (self.wire_down - before.wire_down) / parts,
            (self.wire_up - before.wire_up) / parts,
        )


class CountingTransport:
    """Another transport, whose bytes are counted.

    Args:
        inner: the transport.
        device: the interface that leads to the hosts, and to nobody else.
    """

    def __init__(self, inner: Transport, device: str) -> None:
        self._inner = inner
        self._counters = [Path(f"/sys/class/net/{device}/statistics/{name}_bytes") for name in ("tx", "rx")]
        self._lock = threading.Lock()
        self._down = self._up = 0

    def start(self, host: HostSpec, argv: Sequence[str]) -> Channel:
        """See `Transport`."""
        return _CountingChannel(self._inner.start(host, argv), self)

    def count(self, *, down: int = 0, up: int = 0) -> None:
        """Notes bytes, from any thread."""
        with self._lock:
            self._down += down
            self._up += up

    def so_far(self) -> Traffic:
        """Returns what has passed until now."""
        wire_down, wire_up = (int(counter.read_text()) for counter in self._counters)
        with self._lock:
            return Traffic(self._down, self._up, wire_down, wire_up)


class _CountingChannel:
    """A channel of a `CountingTransport`."""

    def __init__(self, inner: Channel, counter: CountingTransport) -> None:
        self._inner = inner
        self._counter = counter

    def send(self, data: bytes) -> None:
        self._inner.send(data)
        self._counter.count(down=len(data))

    def end_input(self) -> None:
        self._inner.end_input()

    def read_stdout(self) -> bytes:
        data = self._inner.read_stdout()
        self._counter.count(up=len(data))
        return data

    def read_stderr(self) -> bytes:
        data = self._inner.read_stderr()
        self._counter.count(up=len(data))
        return data

    def wait(self, timeout_s: float) -> int | None:
        return self._inner.wait(timeout_s)

    def kill(self) -> None:
        self._inner.kill()


class _WatchedOutput(JobOutput):
    """A job's output, on whose bytes another thread waits."""

    def __init__(self, plan: LaunchPlan) -> None:
        super().__init__(plan, Silence())
        self._changed = threading.Condition()
        self._bytes = 0
        self._is_over = False

    def take(self, frame: Output) -> None:
        """See `Sink`."""
        super().take(frame)
        with self._changed:
            self._bytes += len(frame.text)
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing comes any more; nobody needs to wait for it."""
        super().close()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        """Waits until the ranks have written so many bytes in all."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes >= count or self._is_over, timeout=_LIMIT_S)
            assert self._bytes >= count, f"{self._bytes} of {count} bytes came within {_LIMIT_S:g} s"


def measure(hosts: Sequence[HostSpec], transport: Transport, *, device: str, folder: Path) -> dict[str, Traffic]:
    """Runs a job with one rank on each host, from the first knock to its end.

    Args:
        hosts: hosts of the job, in rank order.
        transport: the way to them.
        device: the interface of this machine that leads to them.
        folder: empty, and seen by all hosts under this path.

    Returns:
        by phase, in order: bytes by host; at rest, by host and second; of lines that come one by one, by line.
    """
    counted = CountingTransport(transport, device)
    moments = [counted.so_far()]
    with Survey(hosts, counted, python=sys.executable) as survey:
        found = check_hosts(survey, hosts, Requirements(folder=str(folder), is_python=False))
    assert found.meeting is not None, "\n".join(finding.text for finding in found.findings)
    moments.append(counted.so_far())

    gates: dict[str, int] = {}
    for gate in _GATES:
        os.mkfifo(folder / gate)
        # For reading too, so that neither end waits for the other to come.
        gates[gate] = os.open(folder / gate, os.O_RDWR)
    plan = make_plan(
        Allocation(hosts=tuple(hosts)),
        Program(kind="command", target=sys.executable, args=("-S", "-c", _RANK, str(folder)), python=sys.executable),
        job_id=f"bytes-{os.getpid()}-{time.monotonic_ns()}",
        start="exec",
        cwd=str(folder),
        env={},
        run_dir=str(folder),
        grace_s=10.0,
        nonce="nonce",
    ).at(found.meeting.address, {})
    rest_s = 2 * plan.lease_s / BEATS_PER_LEASE
    output = _WatchedOutput(plan)
    job = JobRun(plan, counted, output, python=sys.executable, policies=Policies())
    failed: list[BaseException] = []

    def conduct() -> None:
        """Leads the ranks from phase to phase, beside the thread that runs the job."""
        try:
            there = len(hosts) * len(_UP)
            output.wait_for(there)
            moments.append(counted.so_far())
            time.sleep(rest_s)
            for gate, written in zip(_GATES, (BLOCK_BYTES, LINES * LINE_BYTES, 0), strict=True):
                moments.append(counted.so_far())
                os.write(gates[gate], b"." * len(hosts))
                there += len(hosts) * written
                output.wait_for(there)
        except BaseException as error:
            failed.append(error)
            job.requests.kill_now(signal.SIGTERM)

    conductor = threading.Thread(target=conduct)
    conductor.start()
    outcome = job.run()
    output.close()
    conductor.join()
    for descriptor in gates.values():
        os.close(descriptor)
    assert outcome.report is None, "\n".join(outcome.report.render())
    if failed:
        raise failed[0]
    moments.append(counted.so_far())

    count = len(hosts)
    parts: dict[str, float] = {
        "before the job: survey, preflight, meeting": count,
        "start: plan, hello, first word of the rank": count,
        f"at rest for {rest_s:g} s: leases, pulses; by second": count * rest_s,
        f"{BLOCK_BYTES // 1_000_000} MB of output, lines of {LINE_BYTES} bytes": count,
        f"a line of {LINE_BYTES} bytes that comes alone": count * LINES,
        "end": count,
    }
    steps = zip(pairwise(moments), parts.items(), strict=True)
    return {name: after.since(before, parts=by) for (before, after), (name, by) in steps}
