"""How far a tracker has been given a job's records, as a file in the job's folder. Gives nothing to anyone.

The file is replaced whole after each batch that the tracker took, so that a monitor that was killed goes on behind it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import JobPaths
from dsrun.contract.monitor_records import MonitorSettings
from dsrun.files.atomic import write_atomic

_SCHEMA_VERSION = 1
_MODE = 0o600


@dataclass(slots=True, kw_only=True)
class MonitorState:
    """What a tracker has been given.

    Attributes:
        offset: Byte of the records behind the last one that counts as given.
        step: Number of the newest step in them; None before the first.
        samples: Samples of the newest point in them; None before the first.
        kept: Values that the tracker's module finds again: the id of its run, names of its files.
        closed: Whether the tracker was closed behind the last record.
    """

    offset: int = 0
    step: int | None = None
    samples: int | None = None
    kept: dict[str, Any] = field(default_factory=dict[str, Any])
    closed: bool = False


class StateFile:
    """The file of one tracker in a job's folder.

    Args:
        folder: Folder of the job.
        settings: Settings of the tracker, which are written too, without their secrets.
    """

    def __init__(self, folder: Path, settings: MonitorSettings) -> None:
        self._path = JobPaths(folder).monitor_state(settings.name)
        self._settings = settings.without_secrets()

    def read(self) -> MonitorState:
        """Reads how far the tracker is; a new state where there is no file, or one that nothing can be made of."""
        value = _read(self._path)
        return MonitorState() if value is None else value[1]

    def begin(self) -> None:
        """Writes the settings down where there is no file, so that they are found for a tracker that took nothing.

        Raises:
            OSError: the folder cannot be written to.
        """
        if _read(self._path) is None:
            self.write(MonitorState())

    def write(self, state: MonitorState) -> None:
        """Replaces the file.

        Raises:
            OSError: the folder cannot be written to.
        """
        body = {"schema_version": _SCHEMA_VERSION, "settings": self._settings.to_json(), **asdict(state)}
        write_atomic(self._path, f"{json.dumps(body, indent=2)}\n".encode(), mode=_MODE)


def read_settings(folder: Path, name: str) -> MonitorSettings | None:
    """Returns the settings that a job's tracker had, without secrets; None where it had none.

    Args:
        folder: Folder of the job.
        name: Name of the tracker.
    """
    value = _read(JobPaths(folder).monitor_state(name))
    return None if value is None else value[0]


def _read(path: Path) -> tuple[MonitorSettings, MonitorState] | None:
    try:
        value: Any = json.loads(path.read_bytes())
        if value["schema_version"] != _SCHEMA_VERSION:
            return None
        fields: Mapping[str, Any] = {name: value[name] for name in MonitorState.__dataclass_fields__}
        return MonitorSettings.from_json(value["settings"]), MonitorState(**fields)
    except (OSError, ValueError, KeyError, TypeError):
        return None
