"""Compares hosts once, as before a job, in a process that has reached none before; JSON: seconds by part. See hosts.py.

python scripts/bench/preflight_once.py WAY HOSTS HOSTFILE SSH_CONFIG
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dsrun.launcher.hosts.hostfile import read_hostfile
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.plan.launch_plan import DEFAULT_LEASE_S
from dsrun.launcher.preflight.findings import Requirements
from dsrun.launcher.preflight.run import check_hosts
from dsrun.launcher.survey.client import ANSWER_PATIENCE_S, Answer, Arguments, Survey
from dsrun.launcher.transport.base import Transport
from dsrun.launcher.transport.choice import TRANSPORTS, ReachSettings, TransportName, make_transport


class TimedSurvey(Survey):
    """A survey that knows how long each question took, until the last host had answered."""

    def __init__(self, hosts: Sequence[HostSpec], transport: Transport, *, python: str) -> None:
        super().__init__(hosts, transport, python=python)
        #: Seconds by question, in the order they were first asked; of all times it was asked together.
        self.took_s: dict[str, float] = {}

    def ask(
        self,
        question: str,
        arguments: Arguments | Callable[[HostSpec], Arguments],
        *,
        host_names: Sequence[str] | None = None,
        patience_s: float = ANSWER_PATIENCE_S,
    ) -> dict[str, Answer]:
        """See `Survey`."""
        began_s = time.perf_counter()
        answers = super().ask(question, arguments, host_names=host_names, patience_s=patience_s)
        self.took_s[question] = self.took_s.get(question, 0.0) + time.perf_counter() - began_s
        return answers


def measure(way: TransportName, count: int, listed: Path, ssh_config: Path) -> dict[str, float]:
    """Compares the first hosts of a hostfile.

    Args:
        way: name of the transport that reaches the hosts.
        count: number of hosts, taken from the beginning of the hostfile.
        listed: the hostfile, in a folder that all of them see.
        ssh_config: path of the ssh_config file, which names the key and the known hosts.

    Returns:
        seconds by part, in order; the whole ends before the survey does, which no job waits for.
    """
    hosts = read_hostfile(listed)[:count]
    transport = make_transport(way, ReachSettings(lease_s=DEFAULT_LEASE_S, ssh_config=ssh_config))
    wants = Requirements(folder=str(listed.parent), script=str(listed), on_gpus=False)
    began_s = time.perf_counter()
    survey = TimedSurvey(hosts, transport, python=sys.executable)
    with survey:
        reached_s = time.perf_counter() - began_s
        found = check_hosts(survey, hosts, wants)
        whole_s = time.perf_counter() - began_s
    assert not found.is_red, found.error().render()
    questions = {f"question `{name}`": seconds for name, seconds in survey.took_s.items()}
    return {"reaching all": reached_s, **questions, "whole": whole_s}


def main() -> None:
    """Reads the words, and prints the figures."""
    way, count, listed, ssh_config = sys.argv[1:]
    ways: dict[str, TransportName] = {name: name for name in TRANSPORTS}
    print(json.dumps(measure(ways[way], int(count), Path(listed), Path(ssh_config))))


if __name__ == "__main__":
    main()
