"""Sends `sweep` to hosts whose agent was lost, over the transport that started it, and tells what it ended there.

A lost agent's ranks end by themselves, but for what they had started, if its spawner died with it; see `sweep`. A host
that cannot be reached is no news: it was lost, and its agent, if it lives, ends everything when its lease runs out.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsrun.errors import LaunchError

from .hosts import HostSpec
from .transport.base import Transport

#: For a host to be reached and swept: asking takes 2 s, killing 10 s.
_PATIENCE_S = 20.0
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


def sweep_hosts(hosts: Sequence[HostSpec], argv: Sequence[str], transport: Transport) -> list[Swept]:
    """Sweeps all hosts at once; returns what was found, of the hosts that answered in time.

    Args:
        hosts: where.
        argv: see `sweep_command`.
        transport: how to reach them.
    """
    found: list[Swept] = []

    def work(host: HostSpec) -> None:
        swept = _sweep(host, argv, transport)
        if swept is not None:
            found.append(swept)

    threads = [threading.Thread(target=work, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + _PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return sorted(found, key=lambda swept: swept.host)


def _sweep(host: HostSpec, argv: Sequence[str], transport: Transport) -> Swept | None:
    try:
        channel = transport.start(host, argv)
    except LaunchError:
        return None
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
