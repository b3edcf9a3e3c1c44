"""What earlier syncs have put into a folder of this host, so that they can take it away again, and nothing else.

Kept outside of the folder, for this user alone: [XDG_STATE_HOME]/dsrun/synced, a file for each folder and host, as
homes are shared more often than the disks of their hosts.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from dsrun.errors import LaunchError
from dsrun.files.atomic import write_atomic
from dsrun.files.private import make_private_folder

from ..jobs.folder import state_paths
from ..os_errors import refusal_of
from .tree_digest import Entry

#: For a sync whose front end was just cut off to notice it.
_LOCK_PATIENCE_S, _LOCK_PAUSE_S = 2.0, 0.05


class SyncRecord:
    """The record of one folder.

    Args:
        target: the folder.
        environ: environment that says where this user's state files are.
    """

    def __init__(self, target: str, environ: Mapping[str, str]) -> None:
        self._target = os.path.realpath(target)
        name = hashlib.blake2b(os.fsencode(f"{os.uname().nodename}\0{self._target}"), digest_size=16).hexdigest()
        self._path = state_paths(environ).sync_record(name)
        #: By path: digests of which any may be there. There are two while a sync is under way, or was broken off.
        self._digests: dict[str, list[str]] = {}
        if self._path.exists():
            try:
                read: dict[str, Any] = json.loads(self._path.read_text())
                self._digests = {str(path): list(digests) for path, digests in read["files"].items()}
            except (ValueError, LookupError, AttributeError, TypeError) as error:
                raise LaunchError(
                    f"{self._path} there is no record of syncs: {error}",
                    hint="delete it; files that are gone here then stay there",
                ) from error

    @property
    def paths(self) -> tuple[str, ...]:
        """What syncs have put there."""
        return tuple(self._digests)

    def is_as_left(self, path: str, entry: Entry) -> bool:
        """Whether a sync has put there what is there now."""
        return entry.digest in self._digests.get(path, ())

    def expect(self, entries: Mapping[str, Entry]) -> None:
        """Notes what is about to be put there; until `settle`, what was there before counts as well."""
        for path, entry in entries.items():
            self._digests[path] = [*dict.fromkeys([*self._digests.get(path, ()), entry.digest])]

    def settle(self, entries: Mapping[str, Entry]) -> None:
        """Notes what is there now."""
        self._digests |= {path: [entry.digest] for path, entry in entries.items()}

    def forget(self, paths: Iterable[str]) -> None:
        """Notes what is there no more."""
        for path in paths:
            self._digests.pop(path, None)

    def write(self) -> None:
        """Makes all that was noted last."""
        self._make_folder()
        text = json.dumps({"target": self._target, "files": self._digests})
        write_atomic(self._path, text.encode(), mode=0o600)

    def lock(self, keep: ExitStack) -> None:
        """Keeps syncs of other processes into this folder away, for as long as `keep`.

        Raises:
            LaunchError: one is under way, or there is no place for records.
        """
        self._make_folder()
        descriptor = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        keep.callback(os.close, descriptor)
        until_s = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                # One of the process, so that the next sync of the same surveyor has it already.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError) as error:
                if time.monotonic() > until_s:
                    raise LaunchError(
                        f"another sync to {self._target} is under way there", hint="start again once it has ended"
                    ) from error
            time.sleep(_LOCK_PAUSE_S)

    def _make_folder(self) -> None:
        folder = self._path.parent
        try:
            make_private_folder(folder, own=folder.parent)
        except OSError as error:
            raise LaunchError(
                f"cannot keep note of what syncs put there: {refusal_of(error)} ({folder})",
                hint="is there a home folder? `XDG_STATE_HOME`, set at login there, names another place",
            ) from error
