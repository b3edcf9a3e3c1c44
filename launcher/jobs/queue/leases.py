"""Claims: files that count for as long as a process holds their lock. Leases of devices and queue tickets are such.

The kernel lets go of a lock when its holder ends, however it ends: nobody has to notice a death, and a pid that was
given to another process cannot keep anything. What a claim is about, and who may have it, is decided elsewhere.

[Note: claims] A file gets its name only after it was locked and written, so a file that can be locked is a dead
process's. Its content (JSON) is for people and for messages; the lock alone counts. Whoever decides by what it sees
takes `deciding()` first: between looking and claiming nobody else looks. Claims are one user's: other users' jobs are
not seen here. On NFS the kernel turns these locks into POSIX ones, which are dropped when *any* descriptor of the file
is closed: a process therefore never opens a claim of its own again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.files.private import make_private_folder

_DECISION_FILE = ".deciding"
_LOOK_AGAIN_S = 0.02
_IDLE_S = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of a living process, as others see it.

    Attributes:
        name: name of the claim's file.
        content: JSON values that the holder of the claim wrote into the file.
    """

    name: str
    content: dict[str, Any]


class ClaimFolder:
    """The claims in one folder; makes it, for this user only.

    Args:
        path: the folder.
        own: topmost folder that is dsrun's own, as for `make_private_folder`; None where no folder is.

    Raises:
        OSError: it cannot be made, or is another user's.
    """

    def __init__(self, path: Path, *, own: Path | None = None) -> None:
        make_private_folder(path, own=own)
        self._path = path
        self._own: dict[str, int] = {}

    @contextlib.contextmanager
    def deciding(self, *, patience_s: float = 10.0) -> Generator[None, None, None]:
        """Keeps everybody else from deciding meanwhile.

        Args:
            patience_s: longest time in seconds to wait for the decision of another process, which needs milliseconds.

        Raises:
            TimeoutError: another process has not come to a decision (it may be stopped).
            OSError: the filesystem knows no locks.
        """
        descriptor = os.open(self._path / _DECISION_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline_s = time.monotonic() + patience_s
            while not _lock(descriptor):
                if time.monotonic() >= deadline_s:
                    raise TimeoutError(
                        errno.ETIMEDOUT, "another dsrun holds this lock and does not move", str(self._path)
                    )
                time.sleep(_LOOK_AGAIN_S)
            yield
        finally:
            os.close(descriptor)

    def claim(self, name: str, content: Mapping[str, Any]) -> None:
        """Makes a claim of this process, while `deciding`; it lasts until `drop` or the end of the process.

        Args:
            name: no other claim's, without a leading dot.
            content: values to write into the claim's file as JSON, for people and messages.

        Raises:
            OSError: the file cannot be written or locked.
        """
        assert name not in self._own, f"{name} is claimed already"
        path = self._path / safe_name(name)
        draft = self._path / f".{safe_name(name)}.{os.getpid()}"
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, json.dumps(dict(content)).encode())
            os.rename(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        self._own[path.name] = descriptor

    def drop(self, name: str) -> None:
        """Ends a claim of this process; no effect on one that it does not have."""
        descriptor = self._own.pop(safe_name(name), None)
        if descriptor is not None:
            # Unlinked first: a file that others find is either locked or left by a dead process.
            (self._path / safe_name(name)).unlink(missing_ok=True)
            os.close(descriptor)

    def drop_all(self) -> None:
        """Ends all claims of this process."""
        for name in list(self._own):
            self.drop(name)

    def others(self, *, clean: bool = False) -> list[Claim]:
        """Returns the claims of other living processes, by name.

        Args:
            clean: remove what dead ones left; only while `deciding`.
        """
        found: list[Claim] = []
        for name in sorted(os.listdir(self._path)):
            if name in self._own or (name.startswith(".") and (not clean or name == _DECISION_FILE)):
                continue
            content = _content_if_locked(self._path / name)
            if content is not None and not name.startswith("."):
                found.append(Claim(name=name, content=content))
            elif content is None and clean:
                (self._path / name).unlink(missing_ok=True)
        return found


def safe_name(name: str) -> str:
    """Returns the name of the file for a claim: letters, digits and `-_.~` as they are."""
    return re.sub(r"[^\w.~-]", "_", name, flags=re.ASCII).lstrip(".") or "_"


def remove_idle(parent: Path, *, keep: str, now_s: float | None = None) -> None:
    """Removes folders of claims in which nothing was claimed or dropped for a month, as each boot has one of its own.

    Args:
        parent: folder that holds the folders of claims.
        keep: name of one that stays.
        now_s: time of the files' clock; the present if None.
    """
    before_s = (time.time() if now_s is None else now_s) - _IDLE_S
    for path in parent.iterdir():
        # No folder, or gone meanwhile: another dsrun may do the same.
        with contextlib.suppress(OSError):
            if path.name != keep and path.stat().st_mtime < before_s and os.listdir(path) == [_DECISION_FILE]:
                (path / _DECISION_FILE).unlink()
                path.rmdir()


def _content_if_locked(path: Path) -> dict[str, Any] | None:
    """Returns what a living holder wrote; None where nobody holds the file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        if _lock(descriptor, shared=True):
            return None
        content: Any = json.loads(os.read(descriptor, 1 << 20) or b"{}")
    except ValueError:
        # Held, but not written by us: it counts all the same.
        content = {}
    finally:
        os.close(descriptor)
    return content if isinstance(content, dict) else {}


def _lock(descriptor: int, *, shared: bool = False) -> bool:
    """Locks without waiting; returns whether it could."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
