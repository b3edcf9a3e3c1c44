"""Preflight without a job: the hosts a user names are reached and compared as they would be before one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from ..launch.host_placement import HostRequest, place
from ..machine.proc_files import host_names
from ..survey.client import Survey
from ..transport.choice import ReachSettings, make_transport
from .findings import Preflight, Wants
from .run import check_hosts

#: Longest silence of a host; a survey is over long before a job's own lease would matter.
_LEASE_S = 15.0


def examine_hosts(
    request: HostRequest,
    wants: Wants,
    *,
    environ: Mapping[str, str],
    ssh_config: Path | None = None,
    connect_timeout_s: float | None = None,
    start_timeout_s: float | None = None,
    announce: Callable[[str], None] | None = None,
) -> Preflight:
    """Reaches hosts and compares them.

    Args:
        request: which.
        wants: what a job would need of them.
        environ: where a Slurm job shows.
        ssh_config: to read in place of the user's.
        connect_timeout_s: longest wait for a server; None means the transport's own.
        start_timeout_s: longest wait for dsrun to start there after that; None likewise.
        announce: told, by the threads that connect, of each host key that was accepted as new; None refuses them.

    Raises:
        InputError: the hosts cannot be told from what was asked for.
    """
    placement = place(request, environ=environ, local_names=host_names(), device_count=lambda: 0)
    reach = ReachSettings(
        lease_s=_LEASE_S,
        connect_timeout_s=connect_timeout_s,
        start_timeout_s=start_timeout_s,
        ssh_config=ssh_config,
        announce=announce,
    )
    transport = make_transport(placement.transport, reach, local_hosts=placement.local_hosts)
    hosts = placement.allocation.hosts
    with (
        closing(transport),
        Survey(hosts, transport, python=sys.executable, first_word_s=reach.first_word_s) as survey,
    ):
        return check_hosts(survey, hosts, wants)
