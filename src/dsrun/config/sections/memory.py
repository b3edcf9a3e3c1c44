"""Schema of `aio`: reading and writing NVMe."""

from typing import Annotated, ClassVar

from dsrun.config.knob import Section, Status, knob
from dsrun.config.values import Flag, Positive


class Aio(Section):
    """Reading and writing NVMe. Acts only where something is offloaded to NVMe."""

    renamed: ClassVar = {"thread_count": "intra_op_parallelism"}

    block_size: Annotated[
        Positive,
        knob(
            "Unit in which the depth is counted; rounded up to 4 KiB. `dsrun nvme bench` finds good values.",
            effect="block_size * queue_depth * intra_op_parallelism bytes are on their way at once, in each direction",
            unit="bytes",
            users=(2, 1),
        ),
    ] = 1_048_576
    queue_depth: Annotated[
        Positive, knob("Blocks on their way at once, for each thread.", unit="blocks", users=(2, 1))
    ] = 8
    intra_op_parallelism: Annotated[
        Positive, knob("Threads that read one tensor; as many write.", unit="threads", users=(2, 1))
    ] = 1
    single_submit: Annotated[
        Flag,
        knob(
            "Give the disk one block a call, and not half the depth.",
            effect="as many bytes on their way, in smaller calls: more of the processor, rarely faster",
            users=(2, 1),
        ),
    ] = False
    overlap_events: Annotated[
        Flag,
        knob(
            "Give the disk a call before the last has ended: two of half the depth, and not one of the whole. Blocks "
            "that are given one by one (`single_submit`) overlap in any case.",
            users=(2, 1),
        ),
    ] = True
    use_gds: Annotated[
        Flag,
        knob(
            "Move data between NVMe and GPU without host memory.",
            status=Status.PLANNED,
            reason="read a drive into GPU memory: states on NVMe are stepped by the CPU, in host memory, and "
            "parameters come over the bus from there; it would need CUDA, NVIDIA's GDS driver (nvidia-fs) and "
            "torch.cuda.gds",
        ),
    ] = False
    verify: Annotated[
        Flag,
        knob(
            "Checksum what is written, and compare when it is read; a difference is an error.",
            effect="one pass over the bytes each way, at about 20 GB/s a thread",
            differs="no such key",
        ),
    ] = False
