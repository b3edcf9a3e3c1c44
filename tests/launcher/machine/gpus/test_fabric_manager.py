from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.launcher.machine.gpus.fabric_manager import FabricManager, read_fabric_manager
from support.topologies import write_tree

DPKG = """\
Package: nvidia-driver-550-server
Status: install ok installed
Version: 550.90.07-0ubuntu0.22.04.1

Package: nvidia-fabricmanager-550
Status: {status}
Priority: optional
Architecture: amd64
Version: {version}
Description: Fabric Manager for NVSwitch based systems.
"""


@pytest.mark.parametrize(
    ("files", "running"),
    [
        ({"proc/2/comm": "kthreadd\n", "proc/2345/comm": "nv-fabricmanage\n"}, True),
        ({"proc/2/comm": "kthreadd\n", "proc/2345/comm": "sshd\n"}, False),
        # A container has its own processes, and sees no others.
        ({"proc/1/comm": "bash\n", "proc/2/comm": "python\n"}, None),
        # hidepid
        ({}, None),
    ],
)
def test_it_runs_or_not_where_processes_of_the_machine_can_be_seen(
    tmp_path: Path, files: dict[str, str], running: bool | None
) -> None:
    write_tree(tmp_path, files)
    assert read_fabric_manager(tmp_path) == FabricManager(running=running, version=None)


@pytest.mark.parametrize(
    ("status", "version", "found"),
    [
        ("install ok installed", "550.90.07-1", "550.90.07"),
        ("install ok installed", "1:550.90.07-0ubuntu0.22.04.1", "550.90.07"),
        ("deinstall ok config-files", "550.90.07-1", None),
    ],
)
def test_its_version_is_that_of_the_installed_package(
    tmp_path: Path, status: str, version: str, found: str | None
) -> None:
    write_tree(tmp_path, {"var/lib/dpkg/status": DPKG.format(status=status, version=version)})
    assert read_fabric_manager(tmp_path).version == found
