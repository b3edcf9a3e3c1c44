"""Event files of TensorBoard, in `<output_path>/<job_name>`, by the package `tensorboard`.

Each opening makes another event file, which TensorBoard reads behind the older ones. A session that begins at a step
has it forget older points from there on.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ..points import Point
from .run_folder import RunFolder
from .tracker import TrackedRun, Tracker


def open_tracker(run: TrackedRun) -> Tracker:
    """Opens an event file.

    Args:
        run: The run.

    Raises:
        OSError: the folder cannot be made.
        TrackerProblem: another job writes there.
    """
    writers: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    folder = RunFolder(run, tracker="tensorboard")
    return EventFile(writers.EventFileWriter(str(folder.path)), folder)


class EventFile:
    """An open event file.

    Args:
        writer: Writer of `tensorboard`.
        folder: Its folder.
    """

    def __init__(self, writer: Any, folder: RunFolder) -> None:
        self._writer = writer
        self._folder = folder

    def write(self, points: Sequence[Point]) -> None:
        """Writes an event for each point, and has them in the file when it returns."""
        events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        for point in points:
            if point.after_samples is not None:
                start = events.SessionLog(status=events.SessionLog.START)
                self._writer.add_event(
                    events.Event(wall_time=point.time, step=max(0, point.after_samples + 1), session_log=start)
                )
            values = [summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
            self._writer.add_event(
                events.Event(wall_time=point.time, step=point.samples, summary=summaries.Summary(value=values))
            )
        self._writer.flush()

    def close(self) -> None:
        """Closes the file, and lets go of the folder."""
        self._writer.close()
        self._folder.let_go()
