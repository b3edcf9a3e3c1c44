"""Records that are on the disk as soon as a test looks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import JobPaths
from dsrun.runtime.engine.engine import Engine
from dsrun.runtime.observe.records import RecordWriter
from support.inside_engine import records_of


class RecordsAtOnce(RecordWriter):
    """Writes every record before it returns."""

    def write_behind(self, event: str, fields: Callable[[], Mapping[str, Any]]) -> None:
        self.write(event, fields())


def read_records(folder: Path, event: str, engine: Engine | None = None) -> list[dict[str, Any]]:
    """Returns the records of an event in a job's folder, with those that an engine is about to write."""
    if engine is not None:
        records_of(engine).flush()
    records = [json.loads(line) for line in JobPaths(folder).records.read_text().splitlines()]
    return [record for record in records if record["event"] == event]
