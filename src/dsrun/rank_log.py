"""Lines of a script's log on chosen ranks. Configures nothing: handlers and levels are the script's."""

from __future__ import annotations

import logging
from collections.abc import Collection

from dsrun.contract import RankInfo

logger = logging.getLogger("dsrun")


def log_dist(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Logs `message` as `[Rank N] message` on some ranks.

    Args:
        message: the line.
        ranks: which ranks log it; None, or one that is -1: all.
        level: of the record.
    """
    rank = RankInfo.from_env().rank
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)
