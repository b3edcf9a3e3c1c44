"""Ranks that have said why they fail, and do not end. Judges by their error files; ends nothing itself.

An interpreter that ends of an exception may hang in that: a collective's thread waits for a peer that is stopped, or a
thread of the user's never returns. Unseen, such a rank would keep its whole job waiting, though it has failed.
A word counts only if the rank's own process signed it: a fork of it, or a program that it started, inherits the file's
name, and may fail and be dealt with.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dsrun.contract.error_file import read_error_file
from dsrun.contract.job_paths import JobPaths

from ..start.worker import RankProcess


class UnfinishedFailures:
    """Looks for words of ranks that live; remembers when it saw each.

    Args:
        run_dir: folder of the error files.
        grace_s: seconds that a rank may take to end after it has written its error file.
    """

    def __init__(self, run_dir: str, grace_s: float) -> None:
        self._paths = JobPaths(Path(run_dir))
        self._grace_s = grace_s
        self._seen_s: dict[int, float] = {}
        self._told: set[int] = set()

    def overdue(self, live: Iterable[RankProcess], now_s: float) -> list[RankProcess]:
        """Returns those of `live` that had their grace, in monotonic seconds, each of them once."""
        late = [rank for rank in live if rank.rank not in self._told and self._is_late(rank, now_s)]
        self._told.update(rank.rank for rank in late)
        return late

    def _is_late(self, rank: RankProcess, now_s: float) -> bool:
        if rank.rank not in self._seen_s:
            word = read_error_file(self._paths.error_file(rank.rank))
            if word is None or word.pid != rank.process.pid:
                return False
            self._seen_s[rank.rank] = now_s
        return now_s >= self._seen_s[rank.rank] + self._grace_s
