"""`engine.monitor`, by which scripts written for DeepSpeed give figures of their own to trackers, by the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dsrun.config.config import Config
from dsrun.config.monitors import enabled_monitors
from dsrun.errors import ModelError


class EngineMonitor:
    """What DeepSpeed's engine has as `monitor`.

    Args:
        log: `engine.log`, which records figures at the steps that were taken before.
        is_enabled: whether the config switches a tracker on.

    Attributes:
        enabled: Whether the config switches a tracker on. Figures are recorded in any case, for reports.
    """

    def __init__(self, log: Callable[[Mapping[str, Tensor | float]], None], *, is_enabled: bool) -> None:
        self._log = log
        self.enabled = is_enabled

    def write_events(self, event_list: Sequence[tuple[Any, ...]]) -> None:
        """Records figures; every rank may call, and rank 0's count.

        Args:
            event_list: triples of name, value and samples. The samples of the engine count, which they should be.
                Several values of one name are recorded one after the other.

        Raises:
            ModelError: an event is no triple, or a name or a value is none.
        """
        figures: list[dict[str, Any]] = [{}]
        for event in event_list:
            if not isinstance(event, Sequence) or len(event) < 2 or not isinstance(event[0], str):  # pyright: ignore[reportUnnecessaryIsInstance]  # of scripts
                raise ModelError(
                    f"engine.monitor.write_events: {event!r} is no event", hint='expected ("eval/loss", 2.3, samples)'
                )
            name, value = event[:2]
            if name in figures[-1]:
                figures.append({})
            figures[-1][name] = value
        for each in figures:
            if each:
                self._log(each)


class MonitorAccess:
    """The engine's attribute `monitor`."""

    _settings: Config
    log: Callable[[Mapping[str, Tensor | float]], None]

    @property
    def monitor(self) -> EngineMonitor:
        """What takes figures of a script by DeepSpeed's name, see `EngineMonitor`."""
        return EngineMonitor(self.log, is_enabled=bool(enabled_monitors(self._settings)))
