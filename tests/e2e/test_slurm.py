"""Jobs under a real Slurm of two nodes: its allocation is read, its daemons start agents, its signals end the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.hosts import Allocation, HostSpec
from dsrun.launcher.job_output import JobOutput
from dsrun.launcher.plan import Program, make_plan
from dsrun.launcher.scheduler.slurm import read_allocation
from dsrun.launcher.session import Session
from dsrun.launcher.transport.srun import SrunTransport
from support.channels import RememberingChannels
from support.jobs import RecordingSink
from support.processes import kill_left, wait_until_gone
from support.slurm import NODES, Cluster, cluster, why_no_slurm

_WHY_NOT = why_no_slurm()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(120)]

#: A sum over all ranks by plain torch, on which node each was, and what it sees of Slurm's step.
SUM = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(os.environ["SLURMD_NODENAME"], int(total), os.environ.get("SLURM_PROCID"), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster]:
    with cluster(tmp_path_factory.mktemp("s")) as made:
        yield made


def test_ranks_on_the_nodes_of_an_allocation_sum_up(slurm: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SUM)
    (tmp_path / "run").mkdir()
    with slurm.allocation("--ntasks=4") as environ:
        hosts = read_allocation(environ | {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"})
        assert hosts is not None
        plan = make_plan(
            Allocation(hosts=hosts),
            Program(kind="script", target=str(script), args=(), python=sys.executable),
            job_id=f"test-{os.getpid()}-slurm",
            start="fork",
            cwd=str(tmp_path),
            env={"OMP_NUM_THREADS": "1"},
            run_dir=str(tmp_path / "run"),
            grace_s=2,
            nonce="nonce-slurm",
        )
        sink = RecordingSink()
        output = JobOutput(plan, sink)
        channels = RememberingChannels(SrunTransport(environ=environ))
        try:
            outcome = Session(plan, channels, output, python=sys.executable).run()
            assert outcome.exit_code == 0, sink.notes
            assert wait_until_gone(plan.job_id, timeout_s=20) == []
        finally:
            output.close()
            kill_left(plan.job_id)
            channels.end_all()
    texts = [sink.texts(rank) for rank in range(4)]
    assert texts == [["n1 10 None"], ["n1 10 None"], ["n2 10 None"], ["n2 10 None"]]
    assert sink.notes == []


def test_a_step_sees_all_gpus_that_the_job_has_on_its_node(slurm: Cluster) -> None:
    with slurm.allocation("--gpus-per-task=1", "--ntasks=4", "--mem-per-cpu=100") as environ:
        asked = {"SLURM_GPUS_ON_NODE": "2", "SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS": "4", "SLURM_MEM_PER_CPU": "100"}
        channels = RememberingChannels(SrunTransport(environ=environ | asked))
        try:
            for node in NODES:
                host = HostSpec(name=node, slots=2, source="test")
                channel = channels.start(host, ["sh", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"])
                assert b"".join(iter(channel.read_stdout, b"")) == f"{node} 0,1\n".encode()
                assert channel.wait(20) == 0
        finally:
            channels.end_all()


def test_what_slurm_refuses_is_said_in_its_words(slurm: Cluster) -> None:
    with slurm.allocation() as environ, pytest.raises(LaunchError) as caught:
        SrunTransport(environ=environ).start(HostSpec(name="n3", slots=1, source="test"), ["true"])
    assert "host n3: srun has started nothing there: Unable to create step" in str(caught.value)
