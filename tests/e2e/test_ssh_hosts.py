"""A job over two hosts, reached over ssh: ranks meet on the hosts' network, and what is cut off ends by itself."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Generator

import pytest

from dsrun.launcher.hosts.spec import Allocation
from dsrun.launcher.logs.job_output import JobOutput
from dsrun.launcher.plan.launch_plan import LaunchPlan, Program, make_plan
from dsrun.launcher.session.agents import Session
from dsrun.launcher.session.rank_table import Outcome
from dsrun.launcher.transport.base import Transport
from dsrun.launcher.transport.ssh.connection import SshTransport
from dsrun.launcher.transport.ssh.openssh import OpensshTransport
from support.channels import RememberingChannels
from support.jobs import RecordingSink
from support.namespaces import Rig, hosts, why_no_hosts
from support.processes import kill_left, wait_until_gone

_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(120)]

MakeTransport = Callable[[Rig, float], Transport]

#: A sum over all ranks by plain torch, and where each of them was.
SUM = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(socket.gethostname(), os.environ["MASTER_ADDR"], int(total), flush=True)
dist.destroy_process_group()
"""
#: Says that it runs, and goes on for ever.
STAY = "import threading; print('up', flush=True); threading.Event().wait()"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rig]:
    with hosts(2, tmp_path_factory.mktemp("rig")) as made:
        yield made


def by_fabric(rig: Rig, lease_s: float) -> Transport:
    return SshTransport(lease_s=lease_s, connect_timeout_s=4, config=rig.ssh_config)


def by_openssh(rig: Rig, lease_s: float) -> Transport:
    return OpensshTransport(lease_s=lease_s, connect_timeout_s=4, config=rig.ssh_config)


@pytest.fixture(
    params=[
        pytest.param(by_fabric, id="fabric", marks=pytest.mark.soak("the same over it: test_faults_hosts.py")),
        pytest.param(by_openssh, id="openssh"),
    ]
)
def make_transport(request: pytest.FixtureRequest) -> MakeTransport:
    return request.param


def plan_for(rig: Rig, name: str, source: str, *, lease_s: float = 15) -> LaunchPlan:
    """Two ranks on each host, meeting at the first host's address."""
    folder = rig.folder / name
    (folder / "run").mkdir(parents=True)
    script = folder / "train.py"
    script.write_text(source)
    plan = make_plan(
        Allocation(hosts=tuple(host.spec(slots=2) for host in rig.hosts)),
        Program(kind="script", target=str(script), args=(), python=sys.executable),
        job_id=f"test-{os.getpid()}-{name}",
        start="fork",
        cwd=str(folder),
        env={"OMP_NUM_THREADS": "1"},
        run_dir=str(folder / "run"),
        grace_s=2,
        nonce=f"nonce-{name}",
    )
    return dataclasses.replace(plan, master_addr=rig.hosts[0].address, lease_s=lease_s)


def run(plan: LaunchPlan, transport: Transport, sink: RecordingSink) -> Outcome:
    output = JobOutput(plan, sink)
    channels = RememberingChannels(transport)
    try:
        outcome = Session(plan, channels, output, python=sys.executable).run()
        assert wait_until_gone(plan.job_id, timeout_s=20) == []
        return outcome
    finally:
        output.close()
        kill_left(plan.job_id)
        channels.end_all()


def test_ranks_of_two_hosts_sum_up(rig: Rig, make_transport: MakeTransport, request: pytest.FixtureRequest) -> None:
    plan = plan_for(rig, request.node.callspec.id + "-sum", SUM)
    sink = RecordingSink()
    outcome = run(plan, make_transport(rig, plan.lease_s), sink)
    assert outcome.exit_code == 0, sink.notes
    first = rig.hosts[0].address
    assert [sink.texts(rank) for rank in range(4)] == [
        [f"n1 {first} 10"], [f"n1 {first} 10"], [f"n2 {first} 10"], [f"n2 {first} 10"],
    ]  # fmt: skip


def test_a_host_that_cannot_be_reached_ends_the_job_by_name(
    rig: Rig, make_transport: MakeTransport, request: pytest.FixtureRequest
) -> None:
    plan = plan_for(rig, request.node.callspec.id + "-refused", STAY)
    rig.hosts[1].sshd.stop()
    try:
        outcome = run(plan, make_transport(rig, plan.lease_s), sink := RecordingSink())
    finally:
        rig.hosts[1].sshd.start()
    assert outcome.exit_code != 0
    assert any("n2" in note and "connection refused" in note for note in sink.notes), sink.notes


def test_a_partition_ends_both_halves(rig: Rig, make_transport: MakeTransport, request: pytest.FixtureRequest) -> None:
    plan = plan_for(rig, request.node.callspec.id + "-partition", STAY, lease_s=3)
    up: set[int] = set()
    cut = threading.Event()

    def cut_off(rank: int, text: str) -> None:
        up.add(rank)
        if len(up) == 4 and not cut.is_set():
            cut.set()
            rig.partition(rig.front, rig.hosts[1])

    sink = RecordingSink(cut_off)
    try:
        outcome = run(plan, make_transport(rig, plan.lease_s), sink)
    finally:
        if cut.is_set():
            rig.heal(rig.front, rig.hosts[1])
    assert cut.is_set()
    assert outcome.exit_code != 0
    assert any("n2" in note for note in sink.notes), sink.notes
