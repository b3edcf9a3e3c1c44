"""The hosts that other tests stand on: private where they must be, and gone without a trace."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from support.namespaces import hosts, why_no_hosts

_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(60)]


def test_hosts_are_private_and_leave_nothing(tmp_path: Path) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with hosts(2, tmp_path) as rig:
        n1, n2 = rig.hosts
        assert [host.run("hostname").strip() for host in rig.hosts] == ["n1", "n2"]
        for folder in ("/dev/shm", "/tmp", "/run"):
            n1.run("touch", f"{folder}/mine-{tmp_path.name}")
            assert f"mine-{tmp_path.name}" not in n2.run("ls", folder)
            assert not Path(folder, f"mine-{tmp_path.name}").exists()
        n1.run("touch", str(tmp_path / "shared"))
        assert "shared" in n2.run("ls", str(tmp_path))
        assert "eth0" in n1.run("ls", "/sys/class/net")
        assert n2.address in n1.run("getent", "hosts", "n2")
        device = rig.front.device
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    assert subprocess.run(["ip", "link", "show", device], capture_output=True).returncode != 0


def test_a_partition_parts_two_hosts_and_heals(tmp_path: Path) -> None:
    def reaches(here: str, there: str) -> bool:
        enter = next(host.enter for host in rig.hosts if host.name == here)
        probe = f"exec 3<>/dev/tcp/{there}/22"
        return subprocess.run([*enter, "timeout", "1", "bash", "-c", probe], capture_output=True).returncode == 0

    with hosts(3, tmp_path) as rig:
        n1, n2, _ = rig.hosts
        rig.partition(n1, n2)
        assert not reaches("n1", "n2")
        assert not reaches("n2", "n1")
        assert reaches("n1", "n3")
        rig.heal(n1, n2)
        assert reaches("n1", "n2")
        assert reaches("n2", "n1")
