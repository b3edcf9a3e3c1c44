"""Schema of `activation_checkpointing` and `aio`: memory that is traded for compute or for NVMe traffic."""

from typing import Annotated, ClassVar

from dsrun.config.knob import Section, Status, knob
from dsrun.config.values import Flag, Positive


class ActivationCheckpointing(Section):
    """Recompute activations in backward in place of keeping them."""

    default_status = Status.PLANNED
    default_why = "recompute activations"
    renamed: ClassVar = {"partitioned_activations": "partition_activations"}

    partition_activations: Annotated[
        Flag,
        knob("Cut kept activations over the tensor-parallel ranks.", users=(1, 1)),
    ] = False
    cpu_checkpointing: Annotated[
        Flag, knob("Move kept activations to the CPU.", why="recompute activations or move them", users=(1, 1))
    ] = False
    contiguous_memory_optimization: Annotated[Flag, knob("Keep activations in one buffer.", users=(1, 1))] = False
    synchronize_checkpoint_boundary: Annotated[Flag, knob("Wait for the GPU at every block.", users=(1, 1))] = False
    profile: Annotated[Flag, knob("Time forward and backward of every block.", users=(1, 1))] = False
    number_checkpoints: Annotated[Positive | None, knob("Blocks whose activations are kept.", unit="blocks")] = None


class Aio(Section):
    """Reading and writing NVMe. Acts only where something is offloaded to NVMe."""

    default_status = Status.PLANNED
    default_why = "offload to NVMe"
    renamed: ClassVar = {"thread_count": "intra_op_parallelism"}

    block_size: Annotated[Positive, knob("Size of one read or write.", unit="bytes", harmless=True, users=(2, 1))] = (
        1_048_576
    )
    queue_depth: Annotated[
        Positive, knob("Requests in flight per thread.", unit="requests", harmless=True, users=(2, 1))
    ] = 8
    intra_op_parallelism: Annotated[
        Positive, knob("Threads that read or write one tensor.", unit="threads", harmless=True, users=(2, 1))
    ] = 1
    single_submit: Annotated[Flag, knob("Submit requests one by one.", harmless=True, users=(2, 1))] = False
    overlap_events: Annotated[Flag, knob("Submit while others complete.", harmless=True, users=(2, 1))] = True
    use_gds: Annotated[Flag, knob("Move data between NVMe and GPU without host memory.")] = False
