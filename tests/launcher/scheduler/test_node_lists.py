"""Lists of hosts as PBS, LSF, Grid Engine, Cobalt and OAR leave them, and which of the hosts a job of dsrun takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.errors import HostfileError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.launch.checked_launch import Request
from dsrun.launcher.launch.host_placement import HostRequest, Placement, place
from dsrun.launcher.launch.resolve import resolve
from dsrun.launcher.scheduler.registry import find_job
from support.environments import environment_of

#: This machine in all of these jobs.
NAMES = frozenset({"n1", "n1.lab"})
#: What a scheduler sets, with FILE for the path of a list, and the list.
JOBS: dict[str, tuple[dict[str, str], str]] = {
    # `-l select=2:ncpus=32:mpiprocs=4:ngpus=4`
    "PBS": (
        {"PBS_JOBID": "7", "PBS_NODEFILE": "FILE", "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "NCPUS": "32"},
        "n1.lab\n" * 4 + "n2.lab\n" * 4,
    ),
    "LSF": (
        {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "FILE", "LSB_MCPU_HOSTS": "n1 4 n2 4"},
        "n1\n" * 4 + "n2\n" * 4,
    ),
    "LSF words": ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1 4 n2 4"}, ""),
    "Grid Engine": (
        {"JOB_ID": "7", "PE_HOSTFILE": "FILE", "NSLOTS": "8"},
        "n1.lab 3 gpu.q@n1.lab UNDEFINED\nn2.lab 4 gpu.q@n2.lab UNDEFINED\nn1.lab 1 all.q@n1.lab UNDEFINED\n",
    ),
    "Cobalt": ({"COBALT_JOBID": "7", "COBALT_NODEFILE": "FILE"}, "n1\nn1\nn1\nn1\nn2\nn2\nn2\nn2\n"),
    "OAR": ({"OAR_JOB_ID": "7", "OAR_NODE_FILE": "FILE"}, "n1.lab\n" * 4 + "n2.lab\n" * 4),
}


def job(folder: Path, name: str, *, text: str | None = None, **changes: str) -> dict[str, str]:
    """Variables of a job, whose list is written down."""
    variables, usual = JOBS[name]
    path = folder / "list"
    path.write_text(usual if text is None else text)
    return {key: str(path) if value == "FILE" else value for key, value in variables.items()} | changes


def placed(environ: dict[str, str], *, gpus: int = 0, **request: object) -> Placement:
    asked = HostRequest(**request)  # type: ignore[arg-type]
    return place(asked, environ=environ, local_names=NAMES, device_count=lambda: gpus)


def shape(placement: Placement) -> list[tuple[str, int]]:
    return [(host.name.partition(".")[0], host.slots) for host in placement.allocation.hosts]


@pytest.mark.parametrize("name", JOBS)
def test_all_hosts_of_a_job_are_taken_and_the_others_reached_over_ssh(tmp_path: Path, name: str) -> None:
    found = placed(job(tmp_path, name))
    assert shape(found) == [("n1", 4), ("n2", 4)]
    assert {host.partition(".")[0] for host in found.local_hosts} == {"n1"}
    assert (found.transport, found.remarks) == ("ssh", ())
    assert found.source == f"{name.removesuffix(' words')} job 7"
    assert {host.source for host in found.allocation.hosts} == {found.source}


def test_a_host_has_a_rank_for_each_gpu_that_the_job_has_here(tmp_path: Path) -> None:
    # A line a host is what `select=2:ncpus=32:ngpus=4` leaves.
    environ = job(tmp_path, "PBS", text="n1\nn2\n")
    assert shape(placed(environ)) == [("n1", 1), ("n2", 1)]
    assert shape(placed(environ, gpus=4)) == [("n1", 4), ("n2", 4)]
    assert shape(placed(job(tmp_path, "LSF"), gpus=2)) == [("n1", 2), ("n2", 2)]


def test_what_the_user_says_counts_more(tmp_path: Path) -> None:
    environ = job(tmp_path, "PBS")
    assert shape(placed(environ, gpus=4, ranks_per_host=2)) == [("n1", 2), ("n2", 2)]
    assert placed(environ, gpus=4, nodes=1).transport == "local"
    assert shape(placed(environ, gpus=4, nodes=1)) == [("n1", 4)]
    assert shape(placed(environ, include="n2.lab:0,1")) == [("n2", 2)]
    assert placed(environ, transport="openssh").transport == "openssh"
    other = tmp_path / "hosts"
    other.write_text("n9 slots=1\n")
    assert shape(placed(environ, hostfile=str(other))) == [("n9", 1)]


def test_the_list_of_pbs_is_a_hostfile_too(tmp_path: Path) -> None:
    environ = job(tmp_path, "PBS")
    assert shape(placed({}, hostfile=environ["PBS_NODEFILE"])) == [("n1", 4), ("n2", 4)]


@pytest.mark.parametrize("visible", ["GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77,GPU-x", "2,3"])
def test_gpus_that_a_scheduler_chose_here_are_said_to_be_unknown_elsewhere(tmp_path: Path, visible: str) -> None:
    (remark,) = placed(job(tmp_path, "PBS", CUDA_VISIBLE_DEVICES=visible), gpus=2).remarks
    assert remark.startswith(f"PBS job 7 names its GPUs on this host alone (CUDA_VISIBLE_DEVICES={visible})")
    assert "take the first 2 that they see there" in remark
    assert placed(job(tmp_path, "PBS", CUDA_VISIBLE_DEVICES="0,1"), gpus=2).remarks == ()


@pytest.mark.parametrize("name", JOBS)
def test_a_job_of_this_machine_alone_is_as_without_a_scheduler(tmp_path: Path, name: str) -> None:
    variables = {"LSB_MCPU_HOSTS": "n1 8"} if name == "LSF words" else {}
    environ = job(tmp_path, name, text="n1.lab 8 q x\n" if name == "Grid Engine" else "n1.lab\n" * 8, **variables)
    assert find_job(environ, local_names=NAMES) is None
    assert shape(placed(environ)) == [("localhost", 1)]


@pytest.mark.parametrize("name", ["PBS", "LSF", "Grid Engine", "OAR"])
def test_a_job_of_one_host_runs_here_and_says_so_where_the_scheduler_calls_it_otherwise(
    tmp_path: Path, name: str
) -> None:
    # Grid Engine's host_aliases, a container with a name of its own: the job's script runs on its first host.
    found = placed(job(tmp_path, name, text="ib1.lab 8 q x\n" if name == "Grid Engine" else "ib1.lab\n" * 8))
    assert (found.transport, shape(found)) == ("local", [("localhost", 1)])
    (remark,) = found.remarks
    assert remark.startswith(f"{name} job 7: its host is called ib1.lab, and this machine is not: ranks run on this")


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        # `pbsdsh`, and `blaunch` on the second host.
        ("PBS", {"PBS_TASKNUM": "3"}),
        ("PBS", {"PBS_NODENUM": "1"}),
        ("LSF", {"LSF_PM_TASKID": "2"}),
    ],
)
def test_one_of_several_tasks_in_a_job_takes_its_own_machine_and_says_so(
    tmp_path: Path, name: str, variables: dict[str, str]
) -> None:
    found = placed(job(tmp_path, name, **variables), gpus=4)
    assert shape(found) == [("localhost", 4)]
    (remark,) = found.remarks
    assert remark.startswith(f"{name} job 7: it has 2 hosts, and dsrun was not started by its script: ranks run on")


def test_on_another_host_than_the_first_dsrun_takes_its_own_machine(tmp_path: Path) -> None:
    found = placed(job(tmp_path, "Grid Engine", text="n0 4 q x\nn1 4 q x\n"))
    assert shape(found) == [("localhost", 1)]
    assert "dsrun was not started by its script" in found.remarks[0]
    assert "`dsrun -H FILE ...` names the hosts" in found.remarks[0]


def test_a_launch_host_of_lsf_gets_no_rank(tmp_path: Path) -> None:
    text = "n1\n" + "a01\n" * 42 + "a02\n" * 42
    found = placed(job(tmp_path, "LSF", text=text, CSM_ALLOCATION_ID="123"), ranks_per_host=6)
    assert shape(found) == [("a01", 6), ("a02", 6)]
    assert found.remarks == ("LSF job 7: this machine has the name of none of its hosts: all are reached over ssh",)
    slots = placed(job(tmp_path, "LSF", text=text, CSM_ALLOCATION_ID="123"))
    assert shape(slots) == [("a01", 42), ("a02", 42)]
    assert "does not say how many GPUs a host has" in slots.remarks[1]


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("PBS", {"PBS_NODEFILE": "/nowhere/list"}, "PBS_NODEFILE cannot be read: /nowhere/list: no such file"),
        ("PBS", {"PBS_NODEFILE": ""}, "PBS_NODEFILE is not set"),
        ("OAR", {"OAR_NODE_FILE": ""}, "OAR_NODEFILE and OAR_NODE_FILE and OAR_FILE_NODES are not set"),
        ("LSF", {"LSB_DJOB_HOSTFILE": "", "LSB_MCPU_HOSTS": ""}, "LSB_DJOB_HOSTFILE and LSB_MCPU_HOSTS are not set"),
    ],
)
def test_hosts_that_cannot_be_known_are_said_to_be_left_out(
    tmp_path: Path, name: str, changes: dict[str, str], reason: str
) -> None:
    found = placed(job(tmp_path, name, **changes))
    assert shape(found) == [("localhost", 1)]
    (remark,) = found.remarks
    assert remark.startswith(f"{name} job 7: {reason}")
    assert "ranks run on this machine alone; `dsrun -H FILE ...`" in remark


def test_what_is_left_out_is_a_warning_of_the_launch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    environ = job(tmp_path, "PBS", PBS_NODEFILE="/nowhere/list", CUDA_VISIBLE_DEVICES="")
    launch = resolve(Request(words=(str(script),)), environ=environ, verbs=())
    assert [line for line in launch.warnings if line.startswith("warning: PBS job 7: PBS_NODEFILE cannot be read")]


def test_an_empty_list_is_said_to_be_left_out(tmp_path: Path) -> None:
    assert "names no host: ranks run on this machine alone" in placed(job(tmp_path, "PBS", text="\n")).remarks[0]


def test_in_flux_it_is_said_that_its_hosts_have_to_be_asked_for() -> None:
    found = placed(environment_of("flux_batch"))
    assert shape(found) == [("localhost", 1)]
    assert "`flux hostlist -e -d '\\n' local | dsrun -H - -n N ...` takes all of them" in found.remarks[0]
    assert placed(environment_of("flux_one_task")).remarks == ()


@pytest.mark.parametrize(
    ("name", "text", "variables", "message"),
    [
        ("PBS", "n1\n-oProxyCommand=x\n", {}, "line 2: `-oProxyCommand=x` is no host name"),
        ("Grid Engine", "n1 0 q x\n", {}, "line 1: host `n1` has no number of slots"),
        ("Grid Engine", "n1\n", {}, "line 1: host `n1` has no number of slots"),
        ("LSF words", "", {"LSB_MCPU_HOSTS": "n1 4 n2"}, "LSB_MCPU_HOSTS is `n1 4 n2`; expected hosts and slots"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused_by_the_jobs_name(
    tmp_path: Path, name: str, text: str, variables: dict[str, str], message: str
) -> None:
    with pytest.raises(HostfileError) as caught:
        placed(job(tmp_path, name, text=text, **variables))
    assert "job 7: " in str(caught.value)
    assert message in str(caught.value)
    assert caught.value.hint


def test_a_rank_of_dsrun_has_its_own_machine_whatever_job_it_is_in(tmp_path: Path) -> None:
    assert find_job(job(tmp_path, "PBS", DSRUN_JOB_ID="x"), local_names=NAMES) is None


def test_slurm_counts_before_what_else_is_there(tmp_path: Path) -> None:
    environ = job(tmp_path, "PBS") | {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "s1,s2"}
    found = placed(environ)
    assert found.allocation.hosts[0] == HostSpec(name="s1", slots=1, source="Slurm job 5")
    assert (found.transport, found.source) == ("srun", "Slurm job 5")
