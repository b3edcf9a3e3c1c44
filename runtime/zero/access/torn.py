"""Which parts of an engine's state a load has left part old, part new: nothing uses them until they are whole.

[Note: a load that fails halfway] Values are read to where they stay, for twice the memory or twice the reading would be
the price of going back. So a load looks at all it can before it changes anything; where a file turns out damaged after
that, the parts that were being replaced are torn, on every rank. They are whole again once all of them were loaded.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from enum import Flag, auto

from dsrun.errors import CheckpointError, Problem


class StatePart(Flag):
    """A part of an engine's state that a load replaces as a whole."""

    PARAMETERS = auto()
    FROZEN_PARAMETERS = auto()
    OPTIMIZER_STATES = auto()
    SCHEDULE = auto()
    PROGRESS = auto()


_NONE = StatePart(0)
#: All that is read by a forward.
WEIGHTS = StatePart.PARAMETERS | StatePart.FROZEN_PARAMETERS
_WORDS = {
    StatePart.PARAMETERS: "parameters and buffers",
    StatePart.FROZEN_PARAMETERS: "frozen parameters",
    StatePart.OPTIMIZER_STATES: "optimizer states",
    StatePart.SCHEDULE: "schedule",
    StatePart.PROGRESS: "counters and place in the data",
}


class TornState:
    """What of one engine's state is torn; see [Note: a load that fails halfway]. All ranks have the same."""

    def __init__(self) -> None:
        self._torn = _NONE
        self._where = ""

    @contextmanager
    def replacing(self, parts: StatePart, *, where: str, whole: bool = True) -> Generator[None]:
        """Around what replaces parts; what it raises leaves them torn, and has to be raised on every rank.

        Args:
            parts: parts of the state that are replaced.
            where: their values come from.
            whole: all of their values are replaced, so what was torn before is whole afterwards.

        Raises:
            CheckpointError: what it raised, with a word of what is refused from now on.
        """
        before, where_before = self._torn, self._where
        self._torn, self._where = before | parts, where
        try:
            yield
        except CheckpointError as error:
            more = Problem(f"{self._words()} part old, part new now, and not used until a load succeeds")
            raise CheckpointError.of([*error.problems, more]) from error
        self._torn, self._where = before & ~parts if whole else before, where_before

    def check(self, who: str) -> None:
        """Raises where anything is torn.

        Raises:
            CheckpointError: naming what is.
        """
        if self._torn:
            raise CheckpointError(
                f"{who}: {self._words()} part old, part new since the load of {self._where} failed",
                hint="load another checkpoint, with all of these; or make the engine anew to begin from scratch",
            )

    def _words(self) -> str:
        words = [words for part, words in _WORDS.items() if part in self._torn]
        return f"the engine's {', '.join(words)} {'is' if words == [_WORDS[StatePart.SCHEDULE]] else 'are'}"
