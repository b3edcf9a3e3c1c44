"""deepspeed.launcher.constants: what `deepspeed --launcher` may be told."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.as_deepspeed.constants": [
            "IMPI_LAUNCHER",
            "MPICH_LAUNCHER",
            "MVAPICH_LAUNCHER",
            "OPENMPI_LAUNCHER",
            "PDSH_LAUNCHER",
            "SLURM_LAUNCHER",
        ],
    },
)
