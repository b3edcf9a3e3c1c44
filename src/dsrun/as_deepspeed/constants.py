"""Constants that scripts import from DeepSpeed's modules and hand to what is here. Config keys are not among them."""

from __future__ import annotations

#: Variables by which a launcher of DeepSpeed's tells a rank its node, and a node's first rank the number of nodes.
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
LOCAL_RANK = "LOCAL_RANK"

#: What `deepspeed --launcher` may be told.
PDSH_LAUNCHER = "pdsh"
OPENMPI_LAUNCHER = "openmpi"
MPICH_LAUNCHER = "mpich"
IMPI_LAUNCHER = "impi"
MVAPICH_LAUNCHER = "mvapich"
SLURM_LAUNCHER = "slurm"

#: Routes of `engine.deepspeed_io`.
ROUTE_TRAIN = "train"
ROUTE_EVAL = "eval"
ROUTE_PREDICT = "predict"
