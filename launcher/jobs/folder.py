"""What a job is called and where its logs, records and error files go. Makes the folder; puts nothing into it."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from dsrun.contract.job_paths import StatePaths
from dsrun.errors import UsageError
from dsrun.files.private import ForeignFolderError, make_new_private_folder, make_private_folder

#: The way out where the state folder is not this user's alone.
STATE_HINT = "set XDG_STATE_HOME to a folder of yours that nobody else may write to, or use `--log-dir DIR`"

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
    """Returns where jobs go by default.

    Raises:
        UsageError: nothing tells where this user's files are.
    """
    return state_paths(environ).jobs


def state_paths(environ: Mapping[str, str]) -> StatePaths:
    """Returns where dsrun keeps what outlives it, after the XDG base directory specification.

    Raises:
        UsageError: nothing tells where this user's files are.
    """
    state = environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else _home(environ) / ".local" / "state"
    return StatePaths(base / "dsrun")


def _home(environ: Mapping[str, str]) -> Path:
    try:
        return Path(environ.get("HOME") or Path.home())
    except RuntimeError as error:
        # A container may run under a number that the user database does not know.
        raise UsageError(
            "there is no folder for jobs: neither XDG_STATE_HOME nor HOME is set, and this user has no home",
            hint="set XDG_STATE_HOME to a folder that can be written to",
        ) from error


def make_state_folder(path: Path, environ: Mapping[str, str]) -> None:
    """Makes a folder of dsrun's own, for this user only.

    Args:
        path: folder to make, below dsrun's own folder in the state folder.
        environ: environment variables; XDG_STATE_HOME or HOME says where the state folder is.

    Raises:
        ForeignFolderError: another user has it in their hands.
        OSError: it cannot be made.
        UsageError: nothing tells where this user's files are.
    """
    make_private_folder(path, own=state_paths(environ).folder)


def make_job_folder(parent: Path, new_id: Callable[[], str], *, own: Path | None = None) -> tuple[str, Path]:
    """Makes a folder that only this user may enter and no other job has.

    Args:
        parent: folder that holds the folders of jobs; made if it is missing.
        new_id: proposes an id; asked again while the id is taken.
        own: topmost folder that is dsrun's own, as for `make_private_folder`; None where the user has named `parent`.

    Returns:
        the id, and the folder as an absolute path.

    Raises:
        UsageError: the folder cannot be made.
    """
    try:
        make_private_folder(parent, own=own)
        while True:
            job_id = new_id()
            folder = parent.absolute() / job_id
            try:
                make_new_private_folder(folder)
            except FileExistsError:
                continue
            return job_id, folder
    except ForeignFolderError as error:
        raise UsageError(f"state folder: {error}", hint=STATE_HINT) from error
    except OSError as error:
        raise UsageError(
            f"log folder {parent}: cannot be made: {(error.strerror or str(error)).lower()}",
            hint="name another with `--log-dir DIR`",
        ) from error


def link_job(folder: Path, environ: Mapping[str, str]) -> str | None:
    """Makes a job that is elsewhere known in the state folder.

    Args:
        folder: the job's, as an absolute path.
        environ: environment variables; XDG_STATE_HOME or HOME says where the state folder is.

    Returns:
        why it cannot be made known; None if it is.
    """
    try:
        parent = jobs_folder(environ)
        make_state_folder(parent, environ)
        if not parent.samefile(folder.parent):
            (parent / folder.name).symlink_to(folder)
    except UsageError as error:
        return str(error)
    except ForeignFolderError as error:
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
