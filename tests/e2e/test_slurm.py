"""Jobs under a real Slurm of two nodes: its allocation is read, its daemons start agents, its signals end the job."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.logs.job_output import JobOutput
from dsrun.launcher.plan.launch_plan import Program, make_plan
from dsrun.launcher.scheduler.slurm import read_allocation
from dsrun.launcher.session.agents import Session
from dsrun.launcher.transport.srun import SrunTransport
from support.channels import RememberingChannels
from support.cli import Result, clean_environment, run_dsrun
from support.jobs import RecordingSink
from support.processes import kill_left, wait_until_gone
from support.slurm import NODES, Cluster, cluster, why_no_slurm

_WHY_NOT = why_no_slurm()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(120)]

_DEADLINE_S = 100.0

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


def test_a_step_sees_the_gpus_of_its_own_node_where_tasks_are_spread_unevenly(slurm: Cluster) -> None:
    with slurm.allocation("--gpus-per-task=1", "--ntasks=3") as environ:
        asked = {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}
        hosts = read_allocation(environ | asked)
        assert hosts is not None
        assert [(host.name, host.slots) for host in hosts] == [("n1", 2), ("n2", 1)]
        channels = RememberingChannels(SrunTransport(environ=environ | asked))
        try:
            for host, gpus in zip(hosts, ("0,1", "0"), strict=True):
                channel = channels.start(host, ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"])
                assert b"".join(iter(channel.read_stdout, b"")) == f"{gpus}\n".encode()
                assert channel.wait(20) == 0
        finally:
            channels.end_all()


@pytest.mark.parametrize("plugin", ["none", "pmi2", "cray_shasta"])
def test_tasks_of_srun_find_their_ranks_in_what_slurm_tells_them(slurm: Cluster, tmp_path: Path, plugin: str) -> None:
    (tmp_path / "who.py").write_text(
        "import sys\nfrom dataclasses import astuple\nfrom dsrun.contract.environment import RankInfo\n"
        "sys.stdout.write(f'{astuple(RankInfo.from_env())}\\n')\n"
    )
    with slurm.allocation("--ntasks-per-node=2") as environ:
        words = [
            "srun",
            "--quiet",
            "--overlap",
            "--ntasks=4",
            "--ntasks-per-node=2",
            f"--mpi={plugin}",
            sys.executable,
            tmp_path / "who.py",
        ]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=_DEADLINE_S)
    found = sorted(ast.literal_eval(line) for line in done.stdout.splitlines())
    ports = {info[7] for info in found}
    assert [info[:7] for info in found] == [
        (0, 4, 0, 2, 0, 2, "n1"),
        (1, 4, 1, 2, 0, 2, "n1"),
        (2, 4, 0, 2, 1, 2, "n1"),
        (3, 4, 1, 2, 1, 2, "n1"),
    ], done.stderr
    assert len(ports) == 1


def test_what_slurm_refuses_is_said_in_its_words(slurm: Cluster) -> None:
    with slurm.allocation() as environ, pytest.raises(LaunchError) as caught:
        SrunTransport(environ=environ).start(HostSpec(name="n3", slots=1, source="test"), ["true"])
    assert "host n3: srun has started nothing there: Unable to create step" in str(caught.value)


#: Trains at stage 2 on its share of each global batch.
TRAIN = """
import torch, dsrun
from torch import nn
torch.manual_seed(7)
engine, *_ = dsrun.initialize(model=nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
rank = engine.global_rank
for step in range(4):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 + step))[rank * 2 : rank * 2 + 2]
    engine.backward((engine(x) - x.sum(1, keepdim=True)).square().mean())
    engine.step()
engine.destroy()
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
    "zero_optimization": {"stage": 2},
}
#: One fails; the other would go on for ever.
FAIL = """
import os, threading
print("up", flush=True)
threading.Event().wait(None if os.environ["RANK"] == "0" else 0)
raise SystemExit(7)
"""
#: Says what signal comes, and goes on; ends in its own time when it is asked to end.
CATCH = """
import signal, threading
asked = threading.Event()
def catch(signum, frame):
    print("caught", signal.Signals(signum).name, flush=True)
    if signum == signal.SIGTERM:
        asked.set()
for signum in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(signum, catch)
print("up", flush=True)
asked.wait()
threading.Event().wait(0.5)
print("saved", flush=True)
"""


def submit(slurm: Cluster, folder: Path, source: str, *options: str) -> str:
    """Submits a job of one rank on each node; returns its id."""
    (folder / "train.py").write_text(source)
    words = ["--env", "OMP_NUM_THREADS=1", "--log-dir", "logs", "--backend", "gloo", *options, "train.py"]
    done = run_dsrun("slurm", *words, "--", "--nodes=2", cwd=folder, env=environment(slurm, folder))
    assert done.exit_code == 0, done.stderr
    return done.stdout.strip()


def environment(slurm: Cluster, folder: Path) -> dict[str, str]:
    own = {name: slurm.environ[name] for name in ("PATH", "SLURM_CONF")}
    return {**clean_environment(XDG_STATE_HOME=str(folder / "state"), CUDA_VISIBLE_DEVICES=""), **own}


def losses(folder: Path) -> list[float]:
    (records,) = folder.glob("*/records.jsonl")
    steps = [json.loads(line) for line in records.read_text().splitlines()]
    return [record["loss"] for record in steps if record["event"] == "step"]


def wait_for_output(folder: Path, job: str, text: str, count: int) -> None:
    """Waits until the job has said something so often."""
    output = folder / f"slurm-{job}.out"
    deadline_s = time.monotonic() + _DEADLINE_S
    while not output.exists() or output.read_text().count(text) < count:
        assert time.monotonic() < deadline_s, output.read_text() if output.exists() else "no output"
        time.sleep(0.05)  # a file tells nobody


def job_of_dsrun(folder: Path) -> str:
    (run_dir,) = (folder / "logs").iterdir()
    return run_dir.name


def test_a_job_submitted_with_dsrun_slurm_trains_as_on_one_host(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    job = submit(slurm, tmp_path, TRAIN, "--config", "ds.json")
    ended = slurm.wait_for(job, timeout_s=_DEADLINE_S)
    output = (tmp_path / f"slurm-{job}.out").read_text()
    assert (ended.state, ended.exit_code) == ("COMPLETED", 0), output
    assert "2 ranks on 2 hosts" in output
    here = run_dsrun(
        *("-n", "2", "-q", "--config", "ds.json", "--env", "OMP_NUM_THREADS=1", "--backend", "gloo"),
        *("--log-dir", "here", "train.py"),
        cwd=tmp_path,
        env=environment(slurm, tmp_path),
        timeout_s=_DEADLINE_S,
    )
    assert here.exit_code == 0, here.stderr
    assert len(losses(tmp_path / "logs")) == 4
    assert losses(tmp_path / "logs") == losses(tmp_path / "here")


def test_the_failing_ranks_exit_code_is_the_jobs(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, FAIL, "--no-preflight", "--start", "exec")
    ended = slurm.wait_for(job, timeout_s=_DEADLINE_S)
    output = (tmp_path / f"slurm-{job}.out").read_text()
    assert (ended.state, ended.exit_code) == ("FAILED", 7), output
    assert "error: rank 1 on n2" in output
    assert wait_until_gone(job_of_dsrun(tmp_path), timeout_s=20) == []


def test_signals_for_all_reach_ranks_and_scancel_leaves_them_their_grace_and_nothing_behind(
    slurm: Cluster, tmp_path: Path
) -> None:
    job = submit(slurm, tmp_path, CATCH, "--no-preflight", "--start", "exec")
    wait_for_output(tmp_path, job, "] up\n", 2)
    slurm.run("scancel", "--signal=USR1", job)
    wait_for_output(tmp_path, job, "] caught SIGUSR1\n", 2)
    # As `sbatch --signal=B:USR1@60` sends it: to the batch script alone, which is dsrun.
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    wait_for_output(tmp_path, job, "] caught SIGUSR1\n", 4)
    slurm.run("scancel", job)
    ended = slurm.wait_for(job, timeout_s=_DEADLINE_S)
    output = (tmp_path / f"slurm-{job}.out").read_text()
    assert (ended.state, ended.exit_code) == ("CANCELLED", 143), output
    assert "dsrun: SIGTERM from Slurm (scancel, time limit or preemption): " in output
    assert output.count("] saved\n") == 2, output
    assert "error: rank" not in output
    assert wait_until_gone(job_of_dsrun(tmp_path), timeout_s=20) == []


def test_words_for_sbatch_arrive_as_they_are(slurm: Cluster, tmp_path: Path) -> None:
    comment = """it's 1 # "first" \\ $HOME"""
    (tmp_path / "train.py").touch()
    words = ["--hold", "--comment", comment, "--time", "90m", "--job-name=a b"]
    done: Result = run_dsrun(
        "slurm", "--json", "train.py", "--", *words, cwd=tmp_path, env=environment(slurm, tmp_path)
    )
    assert done.exit_code == 0, done.stderr
    job = json.loads(done.stdout)["slurm_job_id"]
    shown = slurm.run("scontrol", "show", "job", job)
    slurm.run("scancel", job)
    assert f"Comment={comment}" in shown
    assert "TimeLimit=01:30:00" in shown
    assert "JobName=a b\n" in shown


def test_what_sbatch_refuses_is_said_in_its_words(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ["slurm", "train.py", "--", "--partition", "none"]
    done = run_dsrun(*words, cwd=tmp_path, env=environment(slurm, tmp_path))
    assert done.exit_code == 1
    assert "error: Slurm refuses the job: " in done.stderr
    assert "invalid partition" in done.stderr
