from __future__ import annotations

import os
from dataclasses import astuple

import pytest

from dsrun.contract.environment import RankInfo
from dsrun.contract.foreign_ranks import FIRST_PORT, PLAIN_PORT, PORTS, find_foreign_rank, first_node, tasks_of_node
from dsrun.errors import InputError
from support.environments import NAMES as RECORDED
from support.environments import environment_of

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "2853765121",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
PALS = {"PALS_RANKID": "3", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PMI_RANK": "3"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "w[08-09]",
    "SLURM_JOB_NODELIST": "w[07-09]",
}
ALL = [OPEN_MPI, MPICH, MVAPICH, PALS, SRUN]
NAMES = ["Open MPI", "MPICH", "MVAPICH", "PALS", "srun"]


@pytest.mark.parametrize("environ", ALL, ids=NAMES)
def test_a_rank_of_another_launcher_finds_its_place(environ: dict[str, str]) -> None:
    info = RankInfo.from_env(environ | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert info == RankInfo(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        node_count=2,
        master_addr="10.0.0.1",
        master_port=1234,
    )


@pytest.mark.parametrize("environ", ALL, ids=NAMES)
def test_ranks_of_dsrun_and_torchrun_go_by_rank_wherever_their_launcher_runs(environ: dict[str, str]) -> None:
    inner = RankInfo(rank=0, world_size=2, local_world_size=2, master_port=5, agent_store=True)
    assert RankInfo.from_env(environ | inner.to_env()) == inner


def test_ranks_of_one_host_meet_on_it_at_a_port_made_of_the_jobs_id() -> None:
    one_host = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    info = RankInfo.from_env(one_host)
    assert info.master_addr == "127.0.0.1"
    assert FIRST_PORT <= info.master_port < FIRST_PORT + PORTS
    first = RankInfo.from_env(one_host | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert first.master_port == info.master_port
    assert RankInfo.from_env(one_host | {"PMIX_NAMESPACE": "2853765122"}).master_port != info.master_port


def test_two_steps_of_one_slurm_job_meet_at_different_ports() -> None:
    ports = {RankInfo.from_env(SRUN | {"SLURM_STEP_ID": step}).master_port for step in "01"}
    assert len(ports) == 2


def test_without_an_id_of_the_job_the_port_is_torchruns() -> None:
    assert RankInfo.from_env(MPICH | {"MASTER_ADDR": "a"}).master_port == PLAIN_PORT


def test_ranks_of_srun_meet_on_the_first_node_of_their_step() -> None:
    assert RankInfo.from_env(SRUN).master_addr == "w08"


def test_ranks_of_mpirun_inside_a_slurm_job_meet_on_its_first_node() -> None:
    assert RankInfo.from_env(OPEN_MPI | {"SLURM_JOB_NODELIST": "w[07-09]"}).master_addr == "w07"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (OPEN_MPI, "mpirun -x MASTER_ADDR=HOST ..."),
        (MPICH, "MASTER_ADDR=HOST mpiexec ..."),
        (MVAPICH, "MASTER_ADDR=HOST mpiexec ..."),
        (PALS, "MASTER_ADDR=HOST mpiexec ..."),
        (environment_of("jsrun"), "jsrun -E MASTER_ADDR=HOST ..."),
        (environment_of("flux_task"), "flux run --env=MASTER_ADDR=HOST ..."),
    ],
)
def test_ranks_on_several_hosts_that_nothing_names_are_told_which_variable_to_set(
    environ: dict[str, str], words: str
) -> None:
    with pytest.raises(InputError) as caught:
        RankInfo.from_env(environ)
    assert "MASTER_ADDR" in str(caught.value)
    assert caught.value.hint == f"name the host of rank 0: `{words}`"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # A batch script knows the tasks of its job, and is none of them.
        {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        OPEN_MPI | dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "1")
        | dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "0"),
    ],
)  # fmt: skip
def test_a_process_that_is_not_one_of_several_is_alone(environ: dict[str, str]) -> None:
    assert find_foreign_rank(environ) is None
    assert RankInfo.from_env(environ) == RankInfo()


#: By name of a recorded environment: launcher, rank, ranks, local rank, ranks of the host, host and hosts; None for a
#: process that is none of several ranks.
PLACES = {
    "flux_batch": None,
    "flux_one_task": None,
    "flux_task": ("Flux", 5, 8, 1, 4, 1, 2),
    "jsrun": ("jsrun", 7, 12, 1, 6, 1, 2),
    "open_mpi_one_rank": None,
    "slurm_batch": None,
    "slurm_batch_from_step": None,
    "slurm_cray_shasta": ("Slurm", 1, 4, 1, 3, 0, 2),
    "slurm_cray_shasta_later": ("Slurm", 1, 4, 1, 3, 0, 2),
    "slurm_interactive_step": None,
    "slurm_pmi2": ("Slurm", 1, 4, 1, 3, 0, 2),
    "slurm_pmix": ("Slurm", 1, 4, 1, 3, 0, 2),
    "slurm_pty_cray_shasta": None,
    "slurm_pty_of_many": None,
    "slurm_pty_pmi2": None,
    "slurm_pty_pmix": None,
    "slurm_task_from_pty": ("Slurm", 0, 4, 0, 3, 0, 2),
}
#: Environments of shells that people type into.
SHELLS = {name for name in RECORDED if "pty" in name or "interactive" in name} - {"slurm_task_from_pty"}


@pytest.mark.parametrize("name", RECORDED)
def test_a_process_finds_its_place_in_whatever_a_launcher_or_scheduler_has_set(name: str) -> None:
    found = find_foreign_rank(environment_of(name), in_terminal=lambda: name in SHELLS)
    assert (None if found is None else astuple(found)) == PLACES.get(name)


@pytest.mark.parametrize("size", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"])
def test_one_rank_is_alone_however_little_else_is_said(size: str) -> None:
    assert find_foreign_rank({size: "1", size.replace("SIZE", "RANK"): "0"}) is None


def test_a_task_of_srun_pty_itself_is_a_rank_in_its_terminal() -> None:
    own = environment_of("slurm_pty_of_many") | {"SLURM_TASK_PID": str(os.getpid())}
    found = find_foreign_rank(own, in_terminal=lambda: True)
    assert found is not None
    assert found.world_size == 4


def test_tasks_of_an_srun_that_kept_the_jobs_variables_are_ranks() -> None:
    # `srun --preserve-env`: SLURM_TASKS_PER_NODE stays the job's.
    kept = environment_of("slurm_pmi2") | {"SLURM_PROCID": "0", "SLURM_GTIDS": "0,1,2", "SLURM_TASKS_PER_NODE": "4(x2)"}
    found = find_foreign_rank(kept)
    assert found is not None
    assert (found.rank, found.world_size) == (0, 4)


def test_a_batch_script_of_the_shape_of_the_step_that_it_was_submitted_from_is_no_task_of_it() -> None:
    # `sbatch -N1 -n2` below `srun -N1 -n2`: a task of two on a node would have both their numbers in SLURM_GTIDS.
    script = environment_of("slurm_batch_from_step") | {"SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "n1"}
    assert find_foreign_rank(script, in_terminal=lambda: False) is None
    task = find_foreign_rank(script | {"SLURM_GTIDS": "0,1"}, in_terminal=lambda: False)
    assert task is not None
    assert (task.rank, task.world_size) == (0, 2)


def test_ranks_of_mpiexec_in_a_step_of_one_task_are_mpiexecs() -> None:
    shell = environment_of("slurm_pty_pmi2") | {"MASTER_ADDR": "n1"}
    assert find_foreign_rank(shell | MPICH, in_terminal=lambda: True) == find_foreign_rank(MPICH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"FLUX_JOB_SIZE": "7"}, "Flux has 7 tasks on 2 hosts, and does not say how many each host has"),
        ({"FLUX_TASK_LOCAL_ID": "2"}, "ranks do not fill one host after the other"),
    ],
)
def test_tasks_of_flux_that_cannot_be_told_apart_by_host_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        find_foreign_rank(environment_of("flux_task") | changes)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK is 4; expected at least 0 and at most 3"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE is 'x'; expected a whole number"),
        (OPEN_MPI | {"MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT is 0; expected at least 1"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_LOCAL_SIZE is not set"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK is 1, and no variable says how many ranks there are"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2"}, "tasks per node are '2'"),
    ],
)
def test_an_incomplete_or_impossible_place_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        RankInfo.from_env(environ)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("node_list", "first"),
    [("w1", "w1"), ("w1,w2", "w1"), ("w[08-10,20],x", "w08"), ("r[1-2]n[03-04]", "r1n03"), ("a,w[1-2]", "a")],
)
def test_the_first_node_of_a_list_is_found(node_list: str, first: str) -> None:
    assert first_node(node_list) == first


def test_tasks_per_node_are_read_as_slurm_repeats_them() -> None:
    assert [tasks_of_node("2(x3),1,4", node) for node in range(5)] == [2, 2, 2, 1, 4]
