"""A rank gets torchrun's environment, and our own modules cannot be shadowed by the user's files."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from dsrun.as_deepspeed.search_path import SITE
from dsrun.as_deepspeed.version import STANDARD
from dsrun.launcher.agent.start.worker import exec_command, node_environment, worker_environment
from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.plan.launch_plan import LaunchPlan, Program, make_plan
from support.environments import environment_of


def two_hosts(**per_host: dict[str, str]) -> LaunchPlan:
    hosts = tuple(HostSpec(name=name, slots=2, source="test") for name in ("a", "b"))
    return make_plan(
        Allocation(hosts=hosts),
        Program(kind="script", target="train.py", args=("--x", ""), python="/usr/bin/python3"),
        job_id="j1",
        start="fork",
        cwd="/work",
        env={"SHARED": "plan"},
        run_dir="/run/j1",
        grace_s=5,
        nonce="test-nonce",
        worker_env=per_host,
    )


def test_a_rank_sees_torchruns_variables_and_its_own_place() -> None:
    plan = two_hosts(b={"OMP_NUM_THREADS": "3"})
    node = plan.nodes[1]
    env = worker_environment({"PATH": "/bin", "SHARED": "base"}, plan, node, node.workers[0], address="h", port=5)
    expected = {
        "PATH": "/bin",
        "SHARED": "plan",
        "OMP_NUM_THREADS": "3",
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "5",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "j1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_ERROR_FILE": "/run/j1/rank2.error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/run/j1/nccl_trace_rank_",
        "PYTHONUNBUFFERED": "1",
        "DSRUN_JOB_ID": "j1",
        "DSRUN_RUN_DIR": "/run/j1",
        "DSRUN_NONCE": "test-nonce",
        "DSRUN_STACKS": "/run/j1/rank2.stacks.txt",
    }
    assert {name: env.get(name) for name in expected} == expected


def test_a_host_finds_the_folder_of_its_own_dsrun_for_scripts_written_for_deepspeed() -> None:
    plan = two_hosts()
    node = plan.nodes[1]
    base = {"PYTHONPATH": "/elsewhere/dsrun/as_deepspeed/site:/mine", "DSRUN_AS_DEEPSPEED_SAID": "1"}
    asked = replace(plan, env={"DSRUN_AS_DEEPSPEED": STANDARD})
    env = worker_environment(base, asked, node, node.workers[0], address="h", port=5)
    assert env["PYTHONPATH"] == f"{SITE}:/mine"
    assert env["DSRUN_AS_DEEPSPEED"] == STANDARD
    assert "DSRUN_AS_DEEPSPEED_SAID" not in env
    plain = worker_environment({"PYTHONPATH": "/mine"}, plan, node, node.workers[0], address="h", port=5)
    assert plain["PYTHONPATH"] == "/mine"
    assert "DSRUN_AS_DEEPSPEED" not in plain


def test_a_job_that_is_started_again_says_how_often_and_where_to_go_on() -> None:
    plan = replace(two_hosts(), attempt=2, max_restarts=3, resume="/save/step40")
    node = plan.nodes[0]
    env = worker_environment({}, plan, node, node.workers[0], address="h", port=5)
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "DSRUN_RESUME")
    assert [env[name] for name in names] == ["2", "3", "/save/step40"]


def test_what_dsrun_found_fills_in_only_what_nobody_has_set() -> None:
    found: dict[str, str] = dict.fromkeys(("NOBODY", "SHELL", "SHARED", "HOST", "RANKS"), "found")
    plan = two_hosts(a={"RANKS": "ranks"}).at("10.0.0.1", {"a": found})
    host = replace(plan.nodes[0].host, env={"HOST": "host", "SHARED": "host", "RANKS": "host"})
    node = replace(plan.nodes[0], host=host)
    env = worker_environment({"SHELL": "shell"}, plan, node, node.workers[0], address="h", port=5)
    assert {name: env[name] for name in found} == {
        "NOBODY": "found",
        "SHELL": "shell",
        "SHARED": "host",
        "HOST": "host",
        "RANKS": "ranks",
    }
    other = plan.nodes[1]
    assert "NOBODY" not in worker_environment({}, plan, other, other.workers[0], address="h", port=5)


@pytest.mark.parametrize("name", ["slurm_batch", "slurm_pty_pmi2", "flux_one_task", "open_mpi_one_rank"])
def test_ranks_do_not_see_the_place_that_dsrun_itself_has_with_another_launcher(name: str) -> None:
    plan = two_hosts()
    env = node_environment(environment_of(name) | {"OMPI_MCA_btl": "self"}, plan, plan.nodes[0])
    told = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_STEP_ID", "PMI_", "PMIX_RANK")
    told += ("OMPI_COMM_WORLD", "OMPI_MCA_ess", "FLUX_TASK")
    assert [variable for variable in env if variable.startswith(told)] == []
    assert env["OMPI_MCA_btl"] == "self"
    assert env.get("SLURM_JOB_ID") == environment_of(name).get("SLURM_JOB_ID")


def test_ranks_see_what_the_user_sets_whatever_it_is_called() -> None:
    plan = replace(two_hosts(), env={"SLURM_PROCID": "5"})
    assert node_environment({"SLURM_PROCID": "0"}, plan, plan.nodes[0])["SLURM_PROCID"] == "5"


@pytest.mark.parametrize("name", ["DSRUN_RESUME", "DSRUN_PLANNED_AXES"])
def test_a_job_inside_a_job_does_not_take_over_its_checkpoint_or_sizes(name: str) -> None:
    assert name not in node_environment({name: "outer"}, two_hosts(), two_hosts().nodes[0])


def test_the_place_in_the_job_cannot_be_overridden_but_torch_settings_can() -> None:
    plan = two_hosts(a={"RANK": "9", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    node = plan.nodes[0]
    env = worker_environment({}, plan, node, node.workers[1], address="h", port=5)
    assert (env["RANK"], env["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("1", "0")


def test_the_spawner_runs_in_what_all_ranks_of_the_host_have_in_common() -> None:
    plan = two_hosts(a={"OMP_NUM_THREADS": "3"})
    node = plan.nodes[0]
    node.workers[1].env["CUDA_VISIBLE_DEVICES"] = "1"
    env = node_environment({"PATH": "/bin"}, plan, node)
    assert env["OMP_NUM_THREADS"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert "RANK" not in env


def test_a_command_runs_as_it_stands() -> None:
    program = Program(kind="command", target="echo", args=("a b", "$X"), python="python3")
    assert exec_command(program) == ["echo", "a b", "$X"]


def test_the_agent_imports_neither_torch_nor_anything_but_psutil() -> None:
    # A site may have put modules into every interpreter: `sitecustomize`, and what `.pth` files import.
    code = (
        "import sys\n"
        "given = set(sys.modules)\n"
        "import dsrun.launcher.agent.main\n"
        "foreign = {n.partition('.')[0] for n in set(sys.modules) - given} - set(sys.stdlib_module_names)\n"
        "print(sorted(n for n in foreign if not n.startswith(('_', '__editable__'))))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert run.stdout.strip() == "['dsrun', 'psutil']"


def test_cuda_counts_gpus_by_their_address_unless_somebody_wants_it_otherwise() -> None:
    plan = two_hosts()
    node = plan.nodes[0]
    given = worker_environment({}, plan, node, node.workers[0], address="h", port=5)
    wanted = worker_environment(
        {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, plan, node, node.workers[0], address="h", port=5
    )
    assert (given["CUDA_DEVICE_ORDER"], wanted["CUDA_DEVICE_ORDER"]) == ("PCI_BUS_ID", "FASTEST_FIRST")
