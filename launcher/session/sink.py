"""What a session needs of whoever shows and keeps a job's output. Implemented by `job_output`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..protocol import Output, RankStack, RankStatus, RankTraceBytes, Reading


class Sink(Protocol):
    """What becomes of a job's output and news; called on the thread that runs the session, and may not raise."""

    def take(self, frame: Output) -> None:
        """Bytes of a rank, in order for each rank."""
        ...

    def reading(self, told: Reading) -> None:
        """What a rank does with its stdin, after all the bytes that it wrote before."""
        ...

    def ended(self, rank: int, last_word: str | None) -> None:
        """No more bytes come from a rank; what it left without an end of line is shown.

        Args:
            rank: rank that writes no more.
            last_word: text that the rank left beside its streams, to end its log with; None where it left none.
        """
        ...

    def tail(self, rank: int) -> tuple[str, ...]:
        """The rank's last lines, both streams."""
        ...

    def log(self, rank: int) -> str:
        """Path of the rank's complete output."""
        ...

    def note(self, text: str) -> None:
        """One line about the job itself, for people."""
        ...

    def event(self, name: str, **fields: Any) -> None:
        """One fact about the job, for `events.jsonl`; values are plain JSON."""
        ...

    def pulse(self, ranks: Sequence[RankStatus]) -> None:
        """How the ranks of one host fare."""
        ...

    def records(self, text: str) -> None:
        """Records of rank 0 that it could not write into the job's folder itself; whole lines, see `Records`."""
        ...

    def rank_trace(self, piece: RankTraceBytes) -> None:
        """A piece of a rank's profile, which the rank could not write into the job's folder itself."""
        ...

    def stacks(self, ranks: Sequence[RankStack]) -> None:
        """Where ranks are that could not write it into the job's folder themselves."""
        ...

    def tick(self, now_s: float) -> float | None:
        """Does what is due by the monotonic clock; returns when it wants to be called next, if at all."""
        ...
