from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.contract.environment import RankInfo
from dsrun.errors import InputError
from dsrun.launcher.launch.checked_launch import Request
from dsrun.launcher.launch.resolve import resolve
from dsrun.launcher.launch.under_other_launcher import launcher_of
from support.cli import clean_environment, run_dsrun
from support.environments import environment_of

TORCHRUN = RankInfo(rank=1, world_size=2, local_rank=1, local_world_size=2, master_port=1).to_env()
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({}, None),
        (OPEN_MPI, "Open MPI"),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
        (TORCHRUN, "another launcher"),
        # torchrun inside a rank of mpirun: its own word is nearer.
        (OPEN_MPI | TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
        (RankInfo().to_env(), None),
        # Left over in a shell, or set for a pod of several ranks.
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        (TORCHRUN | {"LOCAL_RANK": ""}, None),
    ],
)
def test_a_process_that_another_launcher_started_knows_by_whom(environ: dict[str, str], launcher: str | None) -> None:
    assert launcher_of(environ) == launcher


@pytest.mark.parametrize("environ", [TORCHRUN, OPEN_MPI])
def test_a_rank_of_dsrun_starts_jobs_of_its_own_wherever_dsrun_runs(environ: dict[str, str]) -> None:
    assert launcher_of(environ | {"DSRUN_JOB_ID": "20261121-0733-x7k2"}) is None


def test_a_rank_of_another_launcher_sees_no_gpu_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "who.py").write_text(
        "import os; print([os.environ['CUDA_VISIBLE_DEVICES'], os.environ['DSRUN_BACKEND']])"
    )
    env = clean_environment(**TORCHRUN, CUDA_VISIBLE_DEVICES="1")
    done = run_dsrun("--no-gpu", "who.py", cwd=tmp_path, env=env)
    assert (done.stdout, done.exit_code) == ("['', 'gloo']\n", 0), done.stderr
    refused = run_dsrun("--no-gpu", "--backend", "nccl", "who.py", cwd=tmp_path, env=env)
    assert (refused.exit_code, refused.stderr.partition("\n")[0]) == (
        2,
        "error: `--no-gpu` and `--backend nccl` cannot be used together: NCCL moves tensors of GPUs",
    )


def test_a_place_that_makes_no_sense_is_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match="RANK is 2; expected at least 0 and at most 1"):
        launcher_of(TORCHRUN | {"RANK": "2"})


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("slurm_batch", 2),
        ("slurm_batch_from_step", 4),
        ("slurm_interactive_step", 4),
        ("slurm_pty_pmi2", 2),
        ("slurm_pty_cray_shasta", 2),
        ("slurm_pty_pmix", 2),
        ("flux_one_task", 1),
        ("flux_batch", 1),
        ("open_mpi_one_rank", 1),
    ],
)
def test_dsrun_starts_ranks_in_scripts_shells_and_steps_of_one_task(tmp_path: Path, name: str, ranks: int) -> None:
    script = tmp_path / "train.py"
    script.touch()
    environ = environment_of(name) | {"CUDA_VISIBLE_DEVICES": ""}
    assert launcher_of(environ) is None
    assert resolve(Request(words=(str(script),)), environ=environ, verbs=()).placement.world_size == ranks


@pytest.mark.parametrize("name", ["slurm_pmi2", "slurm_cray_shasta", "slurm_cray_shasta_later", "slurm_pmix"])
def test_a_task_of_srun_is_slurms_whatever_plugin_for_mpi_it_has(name: str) -> None:
    assert launcher_of(environment_of(name)) == "Slurm"
