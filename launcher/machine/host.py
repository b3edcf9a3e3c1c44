"""The host: what it is called, what runs on it, and as whom this process runs. Asks no name server."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .limits import LimitsReport, read_process_limits, umask_of, user_name
from .network.interfaces import hosts_rows
from .proc_files import container_of, machine_of, parse_os_release, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """The host. `container` and `machine` are None where nothing tells of one.

    Attributes:
        name: host name, as the host itself gives it.
        fqdn: the same with its domain, as the name itself or /etc/hosts has it.
        boot_id: id of the machine's boot, which changes with every boot; None where it cannot be read.
        uptime_s: seconds since then.
        core_pattern: kernel setting (`core_pattern`) that says where core files are written; None where it cannot be
            read.
        user: name of the user that this process runs as.
        umask: rights its files do not get, `0022`.
        limits: resource limits of this process; None where /proc does not tell them.
    """

    name: str
    os: str | None
    kernel: str
    arch: str
    container: str | None
    machine: str | None
    virtual: bool | None
    fqdn: str | None
    boot_id: str | None
    uptime_s: float | None
    core_pattern: str | None
    user: str
    umask: str | None
    limits: LimitsReport | None


def read_host(root: Path, environ: Mapping[str, str], *, virtual: bool | None) -> HostReport:
    """Reads the host.

    Args:
        root: `/`, or a made-up tree with proc, sys and etc.
        environ: environment variables of this process.
        virtual: whether the processor says that it runs under a hypervisor.
    """
    uname = os.uname()
    name = socket.gethostname()
    uptime = (read_text(root / "proc/uptime") or "").split()
    return HostReport(
        name=name,
        os=parse_os_release(read_text(root / "etc/os-release") or ""),
        kernel=uname.release,
        arch=uname.machine,
        container=container_of(root, environ),
        machine=machine_of(root),
        virtual=virtual,
        fqdn=full_name(name, read_text(root / "etc/hosts") or ""),
        boot_id=(read_text(root / "proc/sys/kernel/random/boot_id") or "").strip() or None,
        uptime_s=float(uptime[0]) if uptime and uptime[0].replace(".", "", 1).isdecimal() else None,
        core_pattern=(read_text(root / "proc/sys/kernel/core_pattern") or "").strip() or None,
        user=user_name(),
        umask=umask_of(read_text(root / "proc/self/status") or ""),
        limits=read_process_limits(root),
    )


def full_name(name: str, hosts: str) -> str | None:
    """Finds a host's name with its domain.

    Args:
        name: host name, as the host itself gives it.
        hosts: text of /etc/hosts.
    """
    if "." in name:
        return name
    rows = (words[1:] for words in hosts_rows(hosts) if name in words[1:])
    return next((alias for names in rows for alias in names if alias.startswith(f"{name}.")), None)
