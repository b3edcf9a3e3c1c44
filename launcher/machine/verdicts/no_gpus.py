"""Whether jobs would go without GPUs that they were given, or that are there: rules over values, pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..devices.unusable import UnusableGpus
from ..verdict import Context, ProbeVerdict


def no_gpu_verdicts(
    unusable: UnusableGpus | None, idle: str | None = None, *, context: Context
) -> Iterator[ProbeVerdict]:
    """Judges a host none of whose GPUs serves.

    Args:
        unusable: reason why no GPU can be used where there should be some, with a fix; None where that is not so.
        idle: sentence about GPUs that this process was not given; None without any.
        context: the jobs; those that train go without GPUs that nobody gave them.
    """
    if unusable is not None:
        yield ProbeVerdict(level="red", text=unusable.text, fix=unusable.fix, path="gpus_unusable.text")
    elif idle is not None:
        text = f"{idle}: jobs train on the CPU"
        fix = "if that is meant, `--no-gpu` says so"
        yield ProbeVerdict(level="amber" if context.trains else "note", text=text, fix=fix, path="gpus_idle")


def hidden_gpu_verdicts(
    *, gpus: int, usable: int, variables: Collection[str], unusable: UnusableGpus | None
) -> Iterator[ProbeVerdict]:
    """Judges GPUs that a variable hides from jobs; what else keeps jobs from GPUs says so itself.

    Args:
        gpus: number of GPUs that the machine has.
        usable: number of the machine's GPUs that a job sees.
        variables: names of the environment variables that are set.
        unusable: reason why no GPU can be used where there should be some, with a fix; None where that is not so.
    """
    if gpus and not usable and unusable is None and "CUDA_VISIBLE_DEVICES" in variables:
        text = "CUDA_VISIBLE_DEVICES hides every GPU from jobs"
        yield ProbeVerdict(level="amber", text=text, fix="`unset CUDA_VISIBLE_DEVICES`", path="gpus_usable")
