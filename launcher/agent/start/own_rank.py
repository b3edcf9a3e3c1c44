"""Variables by which another launcher told dsrun which of its ranks dsrun is: they must not reach the ranks of dsrun.

A batch script, a shell of `srun --pty` and a rank of `mpirun -n 1` have them. Which rank they make of a process stands
in `dsrun.contract.foreign_ranks`.
"""

from __future__ import annotations

from collections.abc import Mapping

#: What Slurm tells one task of a step of itself and its step.
_OF_SLURM = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID", "SLURM_TASKS_PER_NODE"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST"),
    *("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_LAUNCHER_PORT"),
    *("SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_DISTRIBUTION"),
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE", "SRUN_DEBUG"),
    *("SLURM_PTY_PORT", "SLURM_PTY_WIN_COL", "SLURM_PTY_WIN_ROW", "SLURM_MPI_TYPE"),
    *("SLURM_PMI2_PROC_MAPPING", "SLURM_PMI2_SRUN_PORT", "SLURM_PMI2_STEP_NODES"),
    *("SLURM_PMIX_MAPPING_SERV", "SLURM_PMIXP_ABORT_AGENT_PORT"),
)
#: What the others tell a rank. A library for MPI would take the rank for this one, and call a server that has no place
#: for it. Settings of the same libraries (`OMPI_MCA_btl`, `PMIX_MCA_...`) are none of these.
_OF_OTHERS = (
    *("PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT", "PMI_ID", "PMI_JOBID", "PMI_SPAWNED", "PMI_LOCAL_RANK"),
    *("PMI_LOCAL_SIZE", "PMI_UNIVERSE_SIZE", "PMI_CONTROL_PORT", "PMI_SHARED_SECRET", "PMI_APPNUM"),
    *("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "HYDI_CONTROL_FD"),
    *("PALS_APID", "PALS_APINFO", "PALS_FD", "PALS_NODEID", "PALS_RANKID", "PALS_SIZE", "PALS_SPOOL_DIR"),
    *("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    *("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES"),
    *("PMIX_BFROP_BUFFER_TYPE", "PMIX_GDS_MODULE", "PMIX_HOSTNAME", "PMIX_ID", "PMIX_NAMESPACE", "PMIX_RANK"),
    *("PMIX_SECURITY_MODE", "PMIX_SYSTEM_TMPDIR", "PMIX_VERSION"),
    *("OMPI_APP_CTX_NUM_PROCS", "OMPI_ARGV", "OMPI_COMMAND", "OMPI_FILE_LOCATION", "OMPI_FIRST_RANKS"),
    *("OMPI_NUM_APP_CTX", "OMPI_UNIVERSE_SIZE", "OMPI_MCA_ess", "OMPI_MCA_orte_app_num", "OMPI_MCA_orte_hnp_uri"),
    *("OMPI_MCA_orte_launch", "OMPI_MCA_orte_local_daemon_uri", "OMPI_MCA_orte_num_nodes", "OMPI_MCA_pmix"),
    *("OMPI_MCA_orte_bound_at_launch", "OMPI_MCA_orte_jobfam_session_dir", "OMPI_MCA_orte_top_session_dir"),
    *("OMPI_MCA_orte_precondition_transports", "OMPI_MCA_initial_wdir", "OMPI_MCA_shmem_RUNTIME_QUERY_hint"),
)
_OF_A_RANK = frozenset((*_OF_SLURM, *_OF_OTHERS))
#: A step's own in a step. Elsewhere it says what the job was asked for, and Open MPI's mpirun does not start without.
_OF_A_STEP = "SLURM_TASKS_PER_NODE"
_OF_A_RANK_PREFIXES = (
    *("OMPI_COMM_WORLD_", "OMPI_MCA_ess_base_", "OMPI_MCA_orte_ess_", "MV2_COMM_WORLD_", "JSM_NAMESPACE_"),
    *("PMIX_SERVER_", "PMIX_DSTORE_"),
)


def without_own_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns variables without those by which another launcher told one process which rank it is.

    Args:
        environ: variables of a process that starts ranks: true of itself, and of none of them.
    """
    taken = _OF_A_RANK if "SLURM_STEP_ID" in environ else _OF_A_RANK - {_OF_A_STEP}
    return {
        name: value for name, value in environ.items() if name not in taken and not name.startswith(_OF_A_RANK_PREFIXES)
    }
