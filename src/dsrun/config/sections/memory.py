"""Schema of `aio`: reading and writing NVMe."""

from typing import Annotated, ClassVar

from dsrun.config.knob import Section, Status, knob
from dsrun.config.values import Flag, Positive


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
