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
from .findings import Preflight, Requirements
from .run import check_hosts

#: Longest silence of a host; a survey is over long before a job's own lease would matter.
_LEASE_S = 15.0


def examine_hosts(
    request: HostRequest,
    wants: Requirements,
    *,
    environ: Mapping[str, str],
    ssh_config: Path | None = None,
    connect_timeout_s: float | None = None,
    start_timeout_s: float | None = None,
    announce: Callable[[str], None] | None = None,
) -> Preflight:
    """Reaches hosts and compares them.

    Args:
        request: hosts that the user asked for.
        wants: needs that a job would have of the hosts.
        environ: environment variables, which show a scheduler's job around this process.
        ssh_config: ssh_config file to read in place of the user's and the system's; None reads those.
        connect_timeout_s: longest wait for a server; None means the transport's own.
        start_timeout_s: longest wait in seconds for dsrun to start on a host once its server is there; None means the
            transport's own.
        announce: callback that gets a line about each host key that was accepted as new, on the threads that connect;
            None refuses them.

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
