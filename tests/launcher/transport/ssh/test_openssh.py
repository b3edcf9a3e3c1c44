"""What the system's client is made to do that needs no server; the rest stands in test_ssh_transports."""

from __future__ import annotations

import threading
from pathlib import Path

from dsrun.errors import LaunchError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.transport.ssh.openssh import OpensshTransport
from support.processes import wait_for_end

HOST = HostSpec(name="n1", slots=1, source="test")


def test_closing_ends_a_client_that_still_waits_for_its_host(tmp_path: Path) -> None:
    # A login that never comes to the command: the client would stay as long as the other side does.
    client, started = tmp_path / "ssh", tmp_path / "pids"
    started.touch()
    client.write_text(f"#!/bin/sh\necho $$ >>'{started}'\nexec sleep 1000\n")
    client.chmod(0o755)
    transport = OpensshTransport(lease_s=15, program=str(client))
    faults: list[LaunchError] = []

    def start() -> None:
        try:
            transport.start(HOST, ["true"])
        except LaunchError as fault:
            faults.append(fault)

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    while not started.read_text().endswith("\n"):
        starting.join(0.01)
        assert starting.is_alive()
    transport.close()
    starting.join(20)
    assert len(faults) == 1
    # Nor is another one started.
    (pid,) = map(int, started.read_text().split())
    assert wait_for_end(pid, timeout_s=20)
