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
        level: how bad it is.
        text: what is wrong, with the thing's name first.
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
        needs_gpus: whether each of their ranks is to take a GPU.
        takes_rdma: whether their ranks talk over RDMA.
        torch: version that the other hosts of a job have; None where there are none, or no usual one.
    """

    trains: bool = False
    needs_gpus: bool = False
    takes_rdma: bool = False
    torch: str | None = None
