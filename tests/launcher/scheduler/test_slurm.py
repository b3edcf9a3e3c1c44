from __future__ import annotations

import signal

import pytest

from dsrun.errors import HostfileError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.scheduler.registry import find_job
from dsrun.launcher.scheduler.slurm import read_allocation, signal_names, step_gpus
from support.environments import environment_of

JOB = {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "w[00-02]"}


def found(**changes: str) -> list[tuple[str, int]]:
    hosts = read_allocation(JOB | changes)
    assert hosts is not None
    assert {host.source for host in hosts} == {"Slurm job 123"}
    return [(host.name, host.slots) for host in hosts]


def test_outside_a_job_there_are_no_hosts() -> None:
    assert read_allocation({}) is None
    # Left by `salloc` in a shell that has outlived its job.
    assert read_allocation({"SLURM_JOB_NODELIST": "w[00-02]"}) is None


@pytest.mark.parametrize(
    ("node_list", "names"),
    [
        ("w1", ["w1"]),
        ("w[00-02,20],gpu3", ["w00", "w01", "w02", "w20", "gpu3"]),
        ("w[8-10]", ["w8", "w9", "w10"]),
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        ("b2,a1", ["b2", "a1"]),
    ],
)
def test_hosts_come_in_the_order_of_the_list_as_slurm_abbreviates_it(node_list: str, names: list[str]) -> None:
    assert found(SLURM_JOB_NODELIST=node_list) == [(name, 1) for name in names]


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_GPUS_ON_NODE": "4"},
        {"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS": "12"},
        {"SLURM_JOB_GPUS": "0,1,2,5"},
        {"SLURM_STEP_GPUS": "4,5,6,7"},
        {"SLURM_GPUS_PER_NODE": "4"},
        {"SLURM_GPUS_PER_NODE": "a100:4"},
        {"SLURM_GPUS_PER_NODE": "a100:3,v100:1"},
        # GPUs count more than tasks, of which a script that calls dsrun needs one only.
        {"SLURM_GPUS_ON_NODE": "4", "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "1(x3)"},
    ],
)
def test_a_host_has_a_slot_for_each_gpu_that_the_job_has_there(variables: dict[str, str]) -> None:
    assert found(**variables) == [("w00", 4), ("w01", 4), ("w02", 4)]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_GPUS": "8", "SLURM_GPUS_ON_NODE": "4"}, "Slurm job 123 has 8 GPUs on 3 hosts, 4 of them here"),
        # In the shell of `salloc --gpus=9` on a login node: they may be spread anyhow.
        ({"SLURM_GPUS": "9"}, "Slurm job 123 has 9 GPUs on 3 hosts: dsrun cannot tell"),
        ({"SLURM_GPUS": "a100:9"}, "Slurm job 123 has 9 GPUs on 3 hosts: dsrun cannot tell"),
    ],
)
def test_gpus_that_are_spread_unevenly_are_refused_with_what_to_ask_for(variables: dict[str, str], said: str) -> None:
    with pytest.raises(HostfileError) as caught:
        found(**variables)
    assert str(caught.value).startswith(said)
    assert caught.value.hint is not None
    assert "--gpus-per-node=N" in caught.value.hint


def test_gpus_of_tasks_are_where_the_tasks_are() -> None:
    # `-N3 -n5 --gpus-per-task=2`: more on the first hosts than on the last.
    tasks = {"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_GPUS_PER_TASK": "2"}
    spread = [("w00", 4), ("w01", 4), ("w02", 2)]
    assert found(**tasks) == spread
    assert found(**tasks, SLURM_GPUS_ON_NODE="4", SLURM_NODEID="0") == spread
    assert found(**tasks | {"SLURM_GPUS_PER_TASK": "a100:2"}, SLURM_GPUS_ON_NODE="2", SLURM_NODEID="2") == spread
    # What Slurm counts here is not what the tasks make: the job was changed.
    assert found(**tasks, SLURM_GPUS_ON_NODE="8", SLURM_NODEID="0") == [("w00", 8), ("w01", 8), ("w02", 8)]


def test_all_gpus_of_a_job_on_one_host_are_its_hosts() -> None:
    assert found(SLURM_JOB_NODELIST="w00", SLURM_GPUS="4") == [("w00", 4)]


@pytest.mark.parametrize(
    ("variables", "slots", "option"),
    [
        ({}, 1, None),
        ({"SLURM_GPUS_ON_NODE": "4"}, 1, "--gres=gpu:4"),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 1, "--gres=gpu:4"),
        ({"SLURM_GPUS_PER_NODE": "a100:1,v100:2", "SLURM_GPUS_ON_NODE": "3"}, 3, "--gres=gpu:a100:1,gpu:v100:2"),
        ({"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_GPUS_PER_TASK": "2"}, 1, "--gpus=2"),
        ({"SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_GPUS_PER_TASK": "2"}, 1, "--gres=gpu:4"),
        ({"SLURM_GPUS": "8", "SLURM_GPUS_ON_NODE": "4"}, 2, "--gpus=2"),
    ],
)
def test_a_step_asks_for_the_gpus_that_the_job_has_on_its_host(
    variables: dict[str, str], slots: int, option: str | None
) -> None:
    assert step_gpus(JOB | variables, HostSpec(name="w02", slots=slots, source="test")) == option


def test_without_gpus_a_host_has_a_slot_for_each_task_that_was_asked_for() -> None:
    assert found(SLURM_NTASKS="5", SLURM_TASKS_PER_NODE="2(x2),1") == [("w00", 2), ("w01", 2), ("w02", 1)]
    assert found(SLURM_NTASKS_PER_NODE="2") == [("w00", 2), ("w01", 2), ("w02", 2)]


def test_tasks_that_nobody_asked_for_do_not_count() -> None:
    # What a job with `--exclusive` and no `-n` has: a task for each core.
    assert found(SLURM_TASKS_PER_NODE="64(x3)") == [("w00", 1), ("w01", 1), ("w02", 1)]


def test_an_interactive_shell_in_a_job_has_the_whole_job() -> None:
    one = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_TASKS_PER_NODE": "1"}
    assert found(**one, SLURM_NTASKS="1") == [("w00", 1), ("w01", 1), ("w02", 1)]


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("slurm_batch", [("n1", 2)]),
        ("slurm_batch_from_step", [("n1", 2), ("n2", 2)]),
        ("slurm_interactive_step", [("n1", 2), ("n2", 2)]),
        ("slurm_pty_pmi2", [("n1", 2)]),
        ("slurm_pty_cray_shasta", [("n1", 2)]),
        ("slurm_pty_pmix", [("n1", 2)]),
    ],
)
def test_scripts_and_shells_in_a_job_have_its_hosts_and_gpus(name: str, hosts: list[tuple[str, int]]) -> None:
    specs = read_allocation(environment_of(name))
    assert specs is not None
    assert [(host.name, host.slots) for host in specs] == hosts


def test_the_shell_that_salloc_opens_on_a_node_keeps_the_tasks_that_were_asked_for() -> None:
    own = {name: value for name, value in environment_of("slurm_interactive_step").items() if "GPU" not in name}
    specs = read_allocation(own)
    assert specs is not None
    assert [(host.name, host.slots) for host in specs] == [("n1", 3), ("n2", 1)]


def test_one_of_several_tasks_of_srun_is_a_rank_and_has_no_hosts() -> None:
    assert read_allocation(JOB | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}) is None


def test_a_rank_of_dsrun_in_a_job_has_its_own_host_only() -> None:
    rank = JOB | {"DSRUN_JOB_ID": "20261121-0733-x7k2"}
    assert read_allocation(rank) is None
    assert find_job(rank, local_names=()) is None
    # A step that it starts there is no further job either.
    step = rank | {"SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert find_job(step, local_names=()) is None


def test_a_batch_script_that_a_rank_of_dsrun_has_submitted_has_all_hosts_of_its_job() -> None:
    # `sbatch next.sh` in a training script: sbatch hands on what names the rank, and Slurm what names the script.
    job = find_job(JOB | {"DSRUN_JOB_ID": "20261121-0733-x7k2", "SLURM_PROCID": "0"}, local_names=())
    assert job is not None
    assert [host.name for host in job.hosts] == ["w00", "w01", "w02"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_JOB_NODELIST": "w[1-"}, "its list of nodes `w[1-` is not understood"),
        ({"SLURM_JOB_NODELIST": ""}, "its list of nodes `` is not understood: a host has no name"),
        ({"SLURM_JOB_NODELIST": "-oProxyCommand=x"}, "begins like an option"),
        ({"SLURM_HET_SIZE": "2"}, "has components that differ"),
        ({"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "many"}, "tasks per node are 'many'"),
        ({"SLURM_GPUS_ON_NODE": "all"}, "SLURM_GPUS_ON_NODE is 'all'"),
    ],
)
def test_what_makes_no_sense_is_refused_by_the_jobs_name(variables: dict[str, str], message: str) -> None:
    with pytest.raises(HostfileError) as caught:
        found(**variables)
    assert "Slurm job 123" in str(caught.value)
    assert message in str(caught.value)
    assert caught.value.hint


def test_only_a_batch_script_takes_sigterm_for_slurms() -> None:
    script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
    assert "scancel" in signal_names(script)[signal.SIGTERM]
    # Submitted from within another job's step, whose variables are left over.
    assert "scancel" in signal_names(environment_of("slurm_batch_from_step"))[signal.SIGTERM]
    # A shell in a job, where people end what they started; and no job.
    assert signal_names(script | {"SLURM_STEP_ID": "0"}) == {}
    assert signal_names({"SLURM_JOB_ID": "7"}) == {}
    assert signal_names({}) == {}
