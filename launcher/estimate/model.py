"""The MODEL of `dsrun plan`: a number of parameters, a config.json, a callable, or a script that has run before.

Torch stays out of this process: a callable is built in one of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsrun.config.text.source import read_source
from dsrun.contract.job_paths import JobPaths
from dsrun.errors import ModelError, UsageError
from dsrun.estimate.model.architecture import assumptions, from_transformers
from dsrun.estimate.model.units import ModelSize, from_architecture, from_count, parse_count

from ..process_modules import DESCRIBE_MODEL
from ..records.follow import START_EVENT, read_line

_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_FORMS = "expected a count like `7B`, a transformers config.json, `module:callable`, or a script that has run before"
#: Begins the note on a model that comes from a record.
LAST_RUN = "the model is that of the script's last run"
#: How long building on the meta device may take; importing torch is most of it.
_BUILD_S = 120.0
_MAX_BYTES = 1 << 20
#: No path or name is longer.
_MAX_CHARACTERS = 4096
#: The newest jobs that are looked through for a script.
_MAX_JOBS = 500


def find_model(text: str, *, jobs: Sequence[Path]) -> ModelSize:
    """Returns the model that a user names.

    Args:
        text: MODEL as the user gave it: a number, a path or a callable.
        jobs: folders of jobs, for what a script trained when it last ran.

    Raises:
        UsageError: the text names no model.
        ModelError: it names one that cannot be read or built.
    """
    numel = parse_count(text)
    if numel is not None:
        if numel < 1:
            raise UsageError(f"MODEL `{text}` has no parameters", hint=_FORMS)
        return from_count(numel)
    if len(text) > _MAX_CHARACTERS:
        raise UsageError(f"MODEL `{text[:40]}...` is nothing that can be planned", hint=_FORMS)
    path = Path(text)
    if not text:
        raise UsageError("MODEL `` is empty", hint=_FORMS)
    if path.suffix == ".py":
        return _of_script(path, jobs)
    if path.suffix == ".json" or path.is_dir():
        return _of_config(path / "config.json" if path.is_dir() else path)
    if _CALLABLE.fullmatch(text):
        return _of_callable(text)
    raise UsageError(f"MODEL `{text}` is nothing that can be planned", hint=_FORMS)


def _of_config(path: Path) -> ModelSize:
    if not path.exists():
        raise UsageError(f"{path}: cannot be read: no such file or directory", hint=_FORMS)
    config: Any = read_source(path)[0].plain()
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected an object, `{{ ... }}`")
    label = path.parent.resolve().name if path.name == "config.json" else path.stem
    model = from_architecture(from_transformers(config, source=str(path)), label=label)
    return replace(model, notes=assumptions(config))


def _of_callable(target: str) -> ModelSize:
    command = [sys.executable, "-m", DESCRIBE_MODEL, target]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_BUILD_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"`{target}` was not built on the meta device within {_BUILD_S:g}s") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        problem = next((line.removeprefix("error: ") for line in said if line.startswith("error: ")), None)
        hint = next((line.removeprefix("hint: ") for line in said if line.startswith("hint: ")), None)
        last = said[-1] if said else f"exit code {done.returncode}"
        raise ModelError(problem or f"`{target}` cannot be built on the meta device: {last}", hint=hint)
    return replace(ModelSize.from_json(json.loads(done.stdout)), label=target)


def _of_script(path: Path, jobs: Sequence[Path]) -> ModelSize:
    if not path.is_file():
        raise UsageError(f"MODEL {path}: file not found", hint=_FORMS)
    run = last_run(path, jobs=jobs)
    if run is None:
        raise UsageError(
            f"MODEL {path}: a script says nothing about its model before it runs, and no run of it is on record",
            hint="add `--model 7B` (or a config.json, or `module:callable`), or run it once with `dsrun`",
        )
    return run.model


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    """What a script trained when it last ran.

    Attributes:
        job_id: id of the job of that run.
        model: its model.
        time_s: start of the run, seconds since the epoch.
        arguments: digest of the script's words.
    """

    job_id: str
    model: ModelSize
    time_s: float
    arguments: str


def last_run(script: Path, *, jobs: Sequence[Path], arguments: str | None = None) -> LastRun | None:
    """Returns the newest run of a script that came as far as an engine.

    Args:
        script: the script.
        jobs: folders of jobs.
        arguments: digest of the script's words that a run must have to be taken; None takes any run.
    """
    wanted = os.path.realpath(script)
    for folder in _newest_first(jobs):
        record = _start_record(JobPaths(folder).records)
        if record is None or record.get("script") != wanted or arguments not in (None, record.get("arguments")):
            continue
        try:
            model = ModelSize.from_json(record["model"])
            note = f"{LAST_RUN}, job {folder.name}"
            return LastRun(
                job_id=folder.name,
                model=replace(model, notes=(note, *model.notes)),
                time_s=float(record["time"]),
                arguments=str(record["arguments"]),
            )
        except (ModelError, KeyError, TypeError, ValueError):
            continue  # of another version
    return None


def _newest_first(jobs: Sequence[Path]) -> Iterator[Path]:
    found: list[Path] = []
    for parent in jobs:
        try:
            found += [entry for entry in parent.iterdir() if entry.is_dir()]
        except OSError:
            continue
    # Ids begin with the date, so their order is that of the runs.
    yield from sorted(found, key=lambda folder: folder.name, reverse=True)[:_MAX_JOBS]


def _start_record(path: Path) -> dict[str, Any] | None:
    """Returns the first record of a run, if it is that of an engine's start."""
    try:
        with path.open("rb") as file:
            record = read_line(file.readline(_MAX_BYTES))
    except OSError:
        return None
    return record if record is not None and record.get("event") == START_EVENT else None
