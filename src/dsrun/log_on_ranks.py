"""Lines of a script's log on chosen ranks. Configures nothing: handlers and levels are the script's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection

from dsrun.contract.environment import RankInfo
from dsrun.errors import InputError

logger = logging.getLogger("dsrun")


def log_dist(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Logs `message` as `[Rank N] message` on some ranks.

    Args:
        message: the line.
        ranks: ranks that log the line; None, or a collection with -1 in it, for all ranks.
        level: logging level of the record.
    """
    rank = RankInfo.from_env().rank
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def log_dist_once(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Does what `log_dist` does, for each message, ranks and level once in a process."""
    _once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def _once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Sets the level of a logger and of its handlers.

    Args:
        log_level_str: `debug`, `info`, `warning`, `error` or `critical`.
        custom_logger: the logger; None: `dsrun`.

    Raises:
        InputError: no such level.
    """
    levels = ("debug", "info", "warning", "error", "critical")
    if log_level_str.lower() not in levels:
        raise InputError(
            f"set_log_level_from_string: {log_level_str!r} is no level", hint=f"levels are {', '.join(levels)}"
        )
    chosen = logger if custom_logger is None else custom_logger
    for leveled in (chosen, *chosen.handlers):
        leveled.setLevel(log_level_str.upper())
