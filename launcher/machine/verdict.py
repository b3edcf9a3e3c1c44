"""What a rule says of a host, and what it must know of the jobs there. Values only: the rules stand in verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: `red`: jobs fail; `amber`: they run, but worse or not at scale; `note`: worth knowing, and may be as wanted.
Level = Literal["red", "amber", "note"]


#: Something of one GPU: level, what is said of it after its name (so without a verb), way out (`GPU_INDEX` for its
#: number), path below `gpus.N`.
Remark = tuple[Level, str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeVerdict:
    """Something that is not as it should be.

    Attributes:
        level: level of the problem: `red`, `amber` or `note`.
        text: sentence about what is wrong, which begins with the thing's name.
        fix: the way out.
        path: dotted path of the value that shows it; the first where several do.
    """

    level: Level
    text: str
    fix: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The jobs that a host is judged for.

    Attributes:
        trains: whether they are sure to train, so that torch must be there.
        writes: whether they are sure to write to the folders that were named.
        needs_gpus: whether each of their ranks is to take a GPU.
        counts_gpus: whether it is known, and judged elsewhere, how many GPUs their ranks take: one that is missing
            stops no job then whose ranks have others.
        crosses_hosts: whether they have several hosts, whose ranks talk over NCCL.
        takes_free_gpus: whether ranks are given free GPUs, of which there are enough: none must take one that is full.
        takes_rdma: whether their ranks talk over RDMA.
        is_here: whether they are started on the host itself, so that limits of the shell there are theirs.
        torch: version that the other hosts of a job have; None where there are none, or no usual one.
    """

    trains: bool = False
    writes: bool = False
    needs_gpus: bool = False
    counts_gpus: bool = False
    crosses_hosts: bool = False
    takes_free_gpus: bool = False
    takes_rdma: bool = False
    is_here: bool = False
    torch: str | None = None
