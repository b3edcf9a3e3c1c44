"""The tag at the front of a line: which rank wrote it, and on which host where there are several. Prints nothing."""

from __future__ import annotations

from collections.abc import Sequence

from .rank_set import format_rank_set

# Six colours that can be read on dark and on light ground; red is left for errors.
_COLOURS = ("36", "32", "35", "34", "33", "96")
_RESET = "\x1b[0m"


class LineTags:
    """The tags of one job's lines.

    Args:
        hosts: host of each rank, by rank; one host for all is enough where there is only one.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._several_hosts = len(set(hosts)) > 1

    def text(self, ranks: Sequence[int], *, coloured: bool) -> str:
        """Returns what stands before a line: `[3]`, `[w1:3]` on several hosts, `[0-7]` for several ranks.

        Args:
            ranks: ranks that wrote the line alike.
            coloured: whether colours of the terminal may be used.
        """
        if len(ranks) > 1:
            return f"\x1b[1m[{format_rank_set(ranks)}]{_RESET}" if coloured else f"[{format_rank_set(ranks)}]"
        rank = ranks[0]
        tag = f"[{self._hosts[rank]}:{rank}]" if self._several_hosts else f"[{rank}]"
        return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{tag}{_RESET}" if coloured else tag
