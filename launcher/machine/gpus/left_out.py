"""GPUs that no job can use while others of the machine are used: which, why, and the way out. Pure.

Launch, probe and preflight say of them what stands here; how bad it is, is a rule of machine/verdicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...number_ranges import number_ranges
from ..known_fields import known_fields

#: `lost`: the driver counts them and cannot reach them; `closed`: this process may not open them; `uncut`: in MIG mode
#: without slices; `unlisted`: the driver does not count them, for it could not start them.
Kind = Literal["lost", "closed", "uncut", "unlisted"]

_FIXES: Mapping[Kind, str] = {
    "lost": "`sudo nvidia-smi -r -i GPU_INDEX` or reboot; look at power, seat and `dmesg | grep -i nvrm`; "
    "exchange it if it comes back",
    "closed": "`ls -l /dev/nvidia*` shows who may open it",
    "uncut": "`sudo nvidia-smi mig -i GPU_INDEX -cgi 0 -C` makes one slice of all of it, "
    "`sudo nvidia-smi -i GPU_INDEX -mig 0` ends the mode",
    "unlisted": "`dmesg | grep NVRM` says why; reboot, and have it serviced if it comes back",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A GPU that the driver counts and does not give.

    Attributes:
        index: the driver's number.
        reason: its words.
        is_forbidden: whether this process may not open the GPU; False where the GPU cannot be reached at all.
    """

    index: int
    reason: str
    is_forbidden: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutGpus:
    """GPUs of which the same is to be said.

    Attributes:
        kind: reason why no job can use the GPUs.
        gpus: the driver's numbers; empty where it has none for them.
        count: number of the GPUs.
        text: sentence that names the GPUs and the reason.
        fix: the way out.
    """

    kind: Kind
    gpus: tuple[int, ...]
    count: int
    text: str
    fix: str

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LeftOutGpus:
        """Makes one of its JSON form."""
        known = known_fields(cls, value)
        known["gpus"] = tuple(value["gpus"])
        return cls(**known)


def left_out_gpus(left_out: Sequence[LeftOut], *, uncut: Sequence[int], unlisted: int) -> Iterator[LeftOutGpus]:
    """Says what is to be said of GPUs that no job can use, those alike together.

    Args:
        left_out: GPUs that the driver counts and does not give.
        uncut: numbers of GPUs in MIG mode without slices.
        unlisted: number of GPUs that this process was given and the driver does not count.
    """
    alike: dict[tuple[bool, str], list[int]] = {}
    for gpu in left_out:
        alike.setdefault((gpu.is_forbidden, gpu.reason), []).append(gpu.index)
    for (is_forbidden, reason), gpus in alike.items():
        them = "it" if len(gpus) == 1 else "them"
        if is_forbidden:
            yield _of("closed", gpus, f"this process may not open {them} ({reason})")
        else:
            yield _of("lost", gpus, f"the driver counts {them} and cannot reach {them} ({reason})")
    if uncut:
        yield _of(
            "uncut", uncut, f"in MIG mode without slices, CUDA sees nothing of {'it' if len(uncut) == 1 else 'them'}"
        )
    if unlisted:
        who, them = ("a GPU", "it") if unlisted == 1 else (f"{unlisted} GPUs", "them")
        text = f"{who} left out: the driver does not list {them}, for it could not start {them}"
        yield LeftOutGpus(kind="unlisted", gpus=(), count=unlisted, text=text, fix=_FIXES["unlisted"])


def gpus_in_words(indices: Sequence[int]) -> str:
    """Returns `GPU 3`, or `GPUs 0-7`.

    Args:
        indices: the driver's numbers, ascending.
    """
    return f"GPU{'' if len(indices) == 1 else 's'} {number_ranges(indices)}"


def _of(kind: Kind, gpus: Sequence[int], reason: str) -> LeftOutGpus:
    fix = _FIXES[kind].replace("GPU_INDEX", ",".join(map(str, gpus)))
    return LeftOutGpus(
        kind=kind, gpus=tuple(gpus), count=len(gpus), text=f"{gpus_in_words(gpus)} left out: {reason}", fix=fix
    )
