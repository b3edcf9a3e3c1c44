"""`engine.monitor.write_events` records what it is given, by `engine.log`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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


def test_several_values_of_a_name_are_all_logged() -> None:
    logged: list[Mapping[str, Tensor | float]] = []
    EngineMonitor(logged.append, is_enabled=True).write_events([("a", 1.0, 8), ("b", 2.0, 8), ("a", 3.0, 16)])
    assert logged == [{"a": 1.0, "b": 2.0}, {"a": 3.0}]


@pytest.mark.parametrize("wrong", [("x",), 5, ("x", 1.0)[1:], (["x"], 1.0)])
def test_what_is_no_event_is_named(wrong: Any) -> None:
    with pytest.raises(ModelError, match=re.escape(f"write_events: {wrong!r} is no event")):
        EngineMonitor(print, is_enabled=False).write_events([("y", 1.0), wrong])
