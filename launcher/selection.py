"""Which hosts a job takes, and how many ranks each: hostfile and counts -> `Allocation`.

Pure: what this machine is called and how many GPUs it has are arguments. This version starts ranks on this machine
only; a hostfile that names another host is refused here, never silently narrowed.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsrun.errors import HostfileError, Problem

from .hosts import Allocation, HostSpec

_LOOPBACK = frozenset({"localhost", "localhost.localdomain", "127.0.0.1", "::1", "[::1]"})


def select_local(*, ranks_per_host: int | None, device_count: int) -> Allocation:
    """Returns this machine as the only host.

    Args:
        ranks_per_host: ranks asked for; None means one for each GPU, or one where there is no GPU.
        device_count: GPUs the job may use.
    """
    slots = ranks_per_host if ranks_per_host is not None else max(1, device_count)
    return Allocation(hosts=(HostSpec(name="localhost", slots=slots, source="this machine"),))


def select_hosts(hosts: Sequence[HostSpec], *, ranks_per_host: int | None, local_names: frozenset[str]) -> Allocation:
    """Chooses from the hosts of a hostfile.

    Args:
        hosts: what the hostfile names, in its order; not empty.
        ranks_per_host: ranks to take on each host, at most its slots; None takes all slots.
        local_names: what this machine is called beside `localhost` and its kin, in lower case.

    Raises:
        HostfileError: a host is not this machine, is named twice, or has fewer slots than asked for.
    """
    problems: list[Problem] = []
    first_local: HostSpec | None = None
    for host in hosts:
        if not is_local(host.name, local_names=local_names):
            problems.append(
                Problem(
                    f"{host.source}: host `{host.name}` is not this machine; this version starts ranks here only",
                    "remote hosts come in a later version; until then name `localhost`",
                )
            )
            continue
        if first_local is not None:
            problems.append(
                Problem(
                    f"{host.source}: `{host.name}` is this machine, as is `{first_local.name}` ({first_local.source})",
                    "give each host one line and add up the slots",
                )
            )
            continue
        first_local = host
        if ranks_per_host is not None and ranks_per_host > host.slots:
            problems.append(
                Problem(
                    f"{host.source}: {ranks_per_host} ranks are asked for, host `{host.name}` has {host.slots} slots",
                    f"use `-n {host.slots}` or raise `slots`",
                )
            )
    if problems:
        raise HostfileError.of(problems)
    return Allocation(
        hosts=tuple(HostSpec(name=host.name, slots=ranks_per_host or host.slots, source=host.source) for host in hosts)
    )


def is_local(name: str, *, local_names: frozenset[str]) -> bool:
    """Tells whether a host of a hostfile is this machine, by name alone (nothing is resolved)."""
    return name.lower() in _LOOPBACK or name.lower() in local_names
