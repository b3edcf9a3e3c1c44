"""`engine.monitor.write_events` records what it is given, by `engine.log`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import Tensor

from dsrun.errors import ModelError
from dsrun.runtime.engine.deepspeed.monitor import EngineMonitor


def test_events_are_logged_by_their_names() -> None:
    logged: list[Mapping[str, Tensor | float]] = []
    monitor = EngineMonitor(logged.append, is_enabled=True)
    assert monitor.enabled
    monitor.write_events([("eval/loss", 2.5, 64), ("eval/f1", 0.5, 64)])
    monitor.write_events([])
    assert logged == [{"eval/loss": 2.5, "eval/f1": 0.5}]


def test_what_is_no_event_is_named() -> None:
    with pytest.raises(ModelError, match=r"write_events: \('x',\) is no event"):
        EngineMonitor(print, is_enabled=False).write_events([("x",)])
