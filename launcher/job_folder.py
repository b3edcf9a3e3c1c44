"""What a job is called and where its logs, records and error files go. Makes the folder; puts nothing into it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from dsrun.errors import UsageError

#: One JSON object a line: what happened to the job, in order of time.
EVENTS_FILE = "events.jsonl"

# Without 0/o, 1/l/i: people read ids aloud and type them.
_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"


def new_job_id(now: datetime, choose: Callable[[str], str] = secrets.choice) -> str:
    """Returns a short id that sorts by time, like `20261121-0733-x7k2`.

    Args:
        now: start of the job; its clock's own zone is what the user reads.
        choose: picks one character of a text.
    """
    return f"{now:%Y%m%d-%H%M}-{''.join(choose(_ALPHABET) for _ in range(4))}"


def jobs_folder(environ: Mapping[str, str]) -> Path:
    """Returns where jobs go by default, after the XDG base directory specification."""
    state = environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path(environ.get("HOME") or Path.home()) / ".local" / "state"
    return base / "dsrun" / "jobs"


def make_job_folder(parent: Path, new_id: Callable[[], str]) -> tuple[str, Path]:
    """Makes a folder that only this user may enter and no other job has.

    Args:
        parent: where jobs go; made if it is missing.
        new_id: proposes an id; asked again while the id is taken.

    Returns:
        the id, and the folder as an absolute path.

    Raises:
        UsageError: the folder cannot be made.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            job_id = new_id()
            folder = parent.absolute() / job_id
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                continue
            return job_id, folder
    except OSError as error:
        raise UsageError(
            f"log folder {parent}: cannot be made: {(error.strerror or str(error)).lower()}",
            hint="name another with `--log-dir DIR`",
        ) from error
