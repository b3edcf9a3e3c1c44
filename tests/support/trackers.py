"""Trackers that never were: what they are given stands in a file, and what they do wrong is asked for by options.

Functions here are openers, found by name by the process of a monitor: `support.trackers:open_tracker`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsrun.contract.monitor_records import MonitorSettings
from dsrun.launcher.monitors.points import Point
from dsrun.launcher.monitors.trackers.registry import TrackerKind
from dsrun.launcher.monitors.trackers.tracker import TrackedRun, Tracker

#: A registry with the made-up tracker alone.
KINDS: Mapping[str, TrackerKind] = {"made_up": TrackerKind(opener="support.trackers:open_tracker")}


def settings(given: Path, **options: Any) -> MonitorSettings:
    """Settings of the made-up tracker.

    Args:
        given: File that gets what it is given, a JSON list of points a line for each call.
        options: `prints`: it prints these words; `exits`: it ends the process behind these words; `blocks`: it never
            answers; `raises`: it raises as long as a file of that name is there; `says`: it raises these words.
    """
    return MonitorSettings(name="made_up", options={"given": str(given), **options})


def calls(given: Path) -> list[list[dict[str, Any]]]:
    """What the tracker was given, a list of points for each call."""
    return [json.loads(line) for line in given.read_text().splitlines()] if given.exists() else []


def steps(given: Path) -> list[int]:
    """Numbers of the steps that it was given, in order."""
    return [point["step"] for call in calls(given) for point in call]


def open_tracker(run: TrackedRun) -> Tracker:
    """Opens it."""
    run.kept["opened"] = run.kept.get("opened", 0) + 1
    return MadeUpTracker(run.options)


class MadeUpTracker:
    """Writes what it is given to a file, unless it is to fail."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    def write(self, points: Sequence[Point]) -> None:
        """Takes points, or does what its options say."""
        if "prints" in self._options:
            print(self._options["prints"], end="")
        if "exits" in self._options:
            print(self._options["exits"], flush=True)
            os._exit(3)
        if self._options.get("blocks"):
            signal.pause()
        if "raises" in self._options and Path(self._options["raises"]).exists():
            raise ConnectionError("the server at https://ada:hunter2hunter2@tracker/ is down")
        if "says" in self._options:
            raise ConnectionError(self._options["says"])
        told = [
            {"step": each.step, "samples": each.samples, "values": dict(each.values), "after": each.after_samples}
            for each in points
        ]
        with Path(self._options["given"]).open("a") as file:
            file.write(f"{json.dumps(told)}\n")

    def close(self) -> None:
        """Does nothing."""
