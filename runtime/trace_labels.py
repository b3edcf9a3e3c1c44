"""Names that a profiler shows around our own work: phases, units, waits. Without a profiler they cost a comparison.

They are in the trace of `--profile`, and in that of a profiler which a script has started itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd.profiler import record_function

from .compat import profiler_runs

_NONE = nullcontext()


def labelled(name: str) -> AbstractContextManager[object]:
    """Returns what shows a name around a `with`, if a profiler runs when it is called.

    Args:
        name: name as a profiler shows it.
    """
    return record_function(name) if profiler_runs() else _NONE


class OpenLabel:
    """A name that is shown from here to `end`.

    Args:
        name: name as a profiler shows it.
    """

    def __init__(self, name: str) -> None:
        self._label = record_function(name)
        self._label.__enter__()

    def end(self) -> None:
        """Ends it."""
        self._label.__exit__(None, None, None)
