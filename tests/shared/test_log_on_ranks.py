"""Lines of a script's log: which ranks log them, how often, and from which level on."""

from __future__ import annotations

import logging

import pytest

from dsrun.contract.environment import RankInfo
from dsrun.errors import InputError
from dsrun.log_on_ranks import log_dist, log_dist_once, logger, set_log_level_from_string


def test_a_line_that_is_logged_once_is_not_logged_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in RankInfo(rank=1, world_size=2, local_rank=1, local_world_size=2, master_port=1).to_env().items():
        monkeypatch.setenv(key, value)
    with caplog.at_level(logging.INFO, logger="dsrun"):
        for _ in range(2):
            log_dist("twice", ranks=[1])
            log_dist("never", ranks=[0])
            log_dist_once("once", ranks=[1])
            log_dist_once("once too", ranks=[-1])
    assert [record.getMessage() for record in caplog.records] == [
        "[Rank 1] twice",
        "[Rank 1] once",
        "[Rank 1] once too",
        "[Rank 1] twice",
    ]


def test_a_level_is_set_by_its_name_on_a_logger_and_its_handlers() -> None:
    before = logger.level
    own = logging.getLogger("a script's")
    own.addHandler(logging.NullHandler())
    try:
        set_log_level_from_string("Warning")
        set_log_level_from_string("error", own)
        assert (logger.level, own.level, own.handlers[0].level) == (logging.WARNING, logging.ERROR, logging.ERROR)
        with pytest.raises(InputError, match="'loud' is no level"):
            set_log_level_from_string("loud")
    finally:
        logger.setLevel(before)
