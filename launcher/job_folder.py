"""What a job is called and where its logs, records and error files go. Makes the folder; puts nothing into it."""

from __future__ import annotations

import os
import secrets
import shutil
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
    """Returns where jobs go by default, after the XDG base directory specification.

    Raises:
        UsageError: nothing tells where this user's files are.
    """
    state = environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else _home(environ) / ".local" / "state"
    return base / "dsrun" / "jobs"


def _home(environ: Mapping[str, str]) -> Path:
    try:
        return Path(environ.get("HOME") or Path.home())
    except RuntimeError as error:
        # A container may run under a number that the user database does not know.
        raise UsageError(
            "there is no folder for jobs: neither XDG_STATE_HOME nor HOME is set, and this user has no home",
            hint="set XDG_STATE_HOME to a folder that can be written to",
        ) from error


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
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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


def link_job(folder: Path, environ: Mapping[str, str]) -> str | None:
    """Makes a job that is elsewhere known in the state folder.

    Args:
        folder: the job's, as an absolute path.
        environ: where the state folder is.

    Returns:
        why it cannot be made known; None if it is.
    """
    try:
        parent = jobs_folder(environ)
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not parent.samefile(folder.parent):
            (parent / folder.name).symlink_to(folder)
    except UsageError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename2 or error.filename}: {(error.strerror or str(error)).lower()}"
    return None


def remove_job(folder: Path, environ: Mapping[str, str]) -> None:
    """Removes a job's folder, and what `link_job` made.

    Raises:
        OSError: something of it cannot be removed.
    """
    shutil.rmtree(folder)
    link = jobs_folder(environ) / folder.name
    if link.is_symlink():
        link.unlink()
