from __future__ import annotations

import pytest

from dsrun.contract.foreign_ranks import find_foreign_rank
from dsrun.launcher.agent.start.own_rank import without_own_rank
from support.environments import NAMES as RECORDED
from support.environments import environment_of


@pytest.mark.parametrize("name", RECORDED)
def test_nothing_of_a_launchers_rank_is_left_for_other_ranks(name: str) -> None:
    own = environment_of(name)
    left = without_own_rank(own)
    assert left.items() <= own.items()
    told = ("PMI_", "PALS_", "PMIX_", "JSM_", "OMPI_COMM", "OMPI_MCA_orte_ess", "SLURM_STEP_NUM", "SLURM_PROCID")
    told += ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "FLUX_TASK")
    kept = [variable for variable in left if variable.startswith(told)]
    # A setting, which mpirun passes on as it found it.
    assert [variable for variable in kept if not variable.startswith("PMIX_MCA_")] == []
    assert find_foreign_rank(left) is None


def test_what_is_the_jobs_and_what_users_set_stays() -> None:
    kept = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_NODELIST": "n1", "FLUX_JOB_ID": "f", "A": ""}
    kept |= {"OMPI_MCA_btl": "self", "PMIX_MCA_gds": "hash", "MPICH_GPU_SUPPORT_ENABLED": "1", "PBS_JOBID": "3"}
    own = {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "SLURM_PROCID": "0", "PMI_FD": "11", "PALS_APID": "7.0"}
    assert without_own_rank(kept | own) == kept


def test_what_a_slurm_job_was_asked_for_stays_as_mpirun_needs_it_and_what_a_step_has_does_not() -> None:
    script = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "4"}
    assert without_own_rank(script | {"SLURM_PROCID": "0"}) == script
    step = script | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "1"}
    assert "SLURM_TASKS_PER_NODE" not in without_own_rank(step)
