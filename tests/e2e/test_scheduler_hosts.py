"""dsrun in a job of PBS: its hosts are reached over ssh without a hostfile, and the first line says whose they are."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from support.cli import run_dsrun
from support.many_hosts import environment
from support.namespaces import Rig, hosts, why_no_hosts

_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(120)]

WHO = "import os, socket; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], socket.gethostname(), flush=True)"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rig]:
    with hosts(2, tmp_path_factory.mktemp("rig")) as made:
        yield made


def test_ranks_start_on_the_hosts_of_a_pbs_job(rig: Rig) -> None:
    (rig.folder / "who.py").write_text(WHO)
    nodes = rig.folder / "123.pbs"
    nodes.write_text("".join(f"{host.address}\n" * 2 for host in rig.hosts))
    done = run_dsrun(
        *("--ssh-config", str(rig.ssh_config), "--no-preflight", "--start", "exec", "who.py"),
        cwd=rig.folder,
        env=environment(rig, PBS_JOBID="123.pbs", PBS_NODEFILE=str(nodes), OMP_NUM_THREADS="1"),
        timeout_s=90,
    )
    assert done.exit_code == 0, done.stderr
    said = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    names = [host.name for host in rig.hosts for _ in range(2)]
    assert said == [f"{rank} of 4 {name}" for rank, name in enumerate(names)]
    addresses = ", ".join(host.address for host in rig.hosts)
    assert f"4 ranks on 2 hosts of PBS job 123.pbs ({addresses})" in done.stderr
    assert (
        "warning: PBS job 123.pbs: this machine has the name of none of its hosts: all are reached over ssh"
        in done.stderr
    )
