"""Sends `agent/leftovers.py` to hosts whose agent was lost, and tells what it ended there.

A lost agent's ranks end by themselves, but for what they had started, if its spawner died with it; see there. A host
that cannot be reached is no news: it was lost, and its agent, if it lives, ends everything when its lease runs out.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from dsrun.errors import LaunchError

from ..hosts.spec import HostSpec
from ..transport.base import Channel, Transport

#: For a host to be reached and swept: asking takes 2 s, killing 10 s.
_PATIENCE_S = 20.0
#: For one that is out of touch to be reached at all; the job's end waits for it.
_REACH_PATIENCE_S = 3.0
#: For the program to exit once it has said everything.
_END_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class Swept:
    """What was found on a host.

    Attributes:
        host: its name.
        ended: processes that were ended there, as `name (pid)`.
        left: pids of those that outlived SIGKILL.
    """

    host: str
    ended: tuple[str, ...]
    left: tuple[int, ...]


def sweep_hosts(
    hosts: Sequence[HostSpec],
    command: Callable[[HostSpec], Sequence[str]],
    transport: Transport,
    *,
    out_of_touch: Collection[str] = (),
    reach_patience_s: float = _REACH_PATIENCE_S,
) -> list[Swept]:
    """Sweeps all hosts at once; returns what was found, of the hosts that answered in time.

    Args:
        hosts: hosts to sweep.
        command: function that returns the command to run on a host; see `sweep_command`.
        transport: way to reach the hosts.
        out_of_touch: names of hosts that fell silent or had their connection lost; they are tried for a moment only.
            One that answers is swept like the others.
        reach_patience_s: longest time in seconds for a host out of touch to be reached.
    """
    sweeps = [_Sweep(host, command(host), transport) for host in hosts]
    reach_by_s = time.monotonic() + reach_patience_s
    until_s = time.monotonic() + _PATIENCE_S
    for sweep in sweeps:
        if sweep.host.name in out_of_touch and not sweep.reached.wait(max(0.0, reach_by_s - time.monotonic())):
            continue
        sweep.thread.join(max(0.0, until_s - time.monotonic()))
    # In one look, for late ones may still come in.
    return sorted((swept for sweep in sweeps if (swept := sweep.swept) is not None), key=lambda swept: swept.host)


class _Sweep:
    """One host's sweep, on a thread of its own."""

    def __init__(self, host: HostSpec, argv: Sequence[str], transport: Transport) -> None:
        self.host = host
        #: The host answered, or it is known that it does not.
        self.reached = threading.Event()
        self.swept: Swept | None = None
        self.thread = threading.Thread(target=self._run, args=(argv, transport), daemon=True)
        self.thread.start()

    def _run(self, argv: Sequence[str], transport: Transport) -> None:
        try:
            channel = transport.start(self.host, argv)
        except LaunchError:
            return
        finally:
            self.reached.set()
        self.swept = _read_answer(self.host, channel)


def _read_answer(host: HostSpec, channel: Channel) -> Swept | None:
    killer = threading.Timer(_PATIENCE_S, channel.kill)
    killer.daemon = True
    killer.start()
    try:
        channel.end_input()
        text = b""
        while data := channel.read_stdout():
            text += data
        while channel.read_stderr():
            pass
        channel.wait(_END_PATIENCE_S)
        answer: dict[str, Any] = json.loads(text)
        ended = tuple(f"{process['name']} ({process['pid']})" for process in answer["ended"])
        return Swept(host.name, ended, tuple(answer["left"]))
    except (OSError, ValueError, KeyError, TypeError):
        # No answer, or none of ours: the host is as lost as before.
        return None
    finally:
        killer.cancel()
