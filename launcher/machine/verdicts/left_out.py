"""How bad it is that some GPUs of a machine cannot be used: a rule over values, pure.

What is said of them, and the way out, stands in machine/gpus/left_out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..gpus.left_out import Kind, LeftOutGpus
from ..verdict import Context, ProbeVerdict

#: What is broken; the others are as somebody set them up.
_BROKEN: frozenset[Kind] = frozenset({"lost", "unlisted"})
_PATHS: dict[Kind, str] = {"lost": "lost", "closed": "lost", "uncut": "state.mig_slices"}


def left_out_verdicts(left_out: Iterable[LeftOutGpus], *, context: Context) -> Iterator[ProbeVerdict]:
    """Judges GPUs that no job can use while others of the machine are used.

    Args:
        left_out: GPUs that are left out, with the text on each kind.
        context: the jobs; those whose ranks are counted against the GPUs that are left run all the same.
    """
    for one in left_out:
        is_red = one.kind in _BROKEN and not context.counts_gpus
        path = f"gpus.{one.gpus[0]}.{_PATHS[one.kind]}" if one.gpus else "gpus_unlisted"
        yield ProbeVerdict(level="red" if is_red else "amber", text=one.text, fix=one.fix, path=path)
