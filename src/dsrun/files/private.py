"""Folders and files that only this user may use, whatever the umask, and whether others could put theirs in the place.

What dsrun makes for itself is private; what a user asked for as output (checkpoints, exports) follows the umask and
does not come here.

[Note: trusted folders] Who may write to a folder can put a link or a file of theirs in the place of what is below it.
So dsrun's own folders must be this user's. Where a folder above them is another user's than root's, or others may
write to it and no sticky bit keeps them from renaming what is not theirs, that is told and no more: such are homes of
containers (an emptyDir volume of Kubernetes, a home of the host's for the container's root) and folders of a group of
people below their head's. A folder of the user's own group counts as theirs: many systems give each user such a group
and make folders writable to it. An owner that this user namespace, or a file server, cannot name is nobody's.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
import sys
from collections.abc import Callable
from pathlib import Path

_ROOT = 0
#: Stands for owners that cannot be named; see proc_sys_kernel(5), overflowuid.
_NOBODY = 65534
#: Folders above dsrun's own that were told of: once a run is enough.
_told: set[Path] = set()


class ForeignFolderError(PermissionError):
    """A folder that dsrun would keep its files in, or a link on the way to it, is another user's."""


def _say(line: str) -> None:
    print(f"dsrun: {line}", file=sys.stderr, flush=True)


def make_private_folder(path: Path, *, own: Path | None = None, tell: Callable[[str], None] = _say) -> None:
    """Makes a folder, and those above it that are missing, for this user only.

    Args:
        path: the folder; one that is there stays as it is, unless it is dsrun's own.
        own: the topmost folder that is dsrun's own, `path` or above it: from there on, folders that are there are made
            private too. See [Note: trusted folders].
        tell: callback that gets a line about each folder that was made private, and a warning where others could
            exchange `own`.

    Raises:
        ForeignFolderError: another user has the folder in their hands.
        OSError: it cannot be made.
    """
    path = Path(os.path.abspath(path))
    own = None if own is None else Path(os.path.abspath(own))
    if own is not None:
        _refuse_foreign(own)
        _warn_of_writers(own, tell)
    for folder in (*reversed(path.parents), path):
        is_own = own is not None and (folder == own or own in folder.parents)
        if not folder.is_dir():
            try:
                make_new_private_folder(folder)
            except FileExistsError:
                # Another dsrun may have made it meanwhile.
                if not folder.is_dir():
                    if folder == path:
                        raise
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
        if is_own:
            _tighten(folder, tell)


def make_new_private_folder(path: Path) -> None:
    """Makes one folder for this user only; where the file system has no modes, with those that it gives.

    Args:
        path: the folder, in one that is there.

    Raises:
        FileExistsError: something has the name.
        OSError: it cannot be made.
    """
    os.mkdir(path, 0o700)
    if os.stat(path).st_mode & 0o700 != 0o700:  # a umask has taken rights of this user's own
        os.chmod(path, 0o700)


def make_private_memory(name: str, flags: int = 0) -> int:
    """Makes a nameless file in memory that only this user may open, by /proc; returns its descriptor.

    The kernel makes such files open to everybody, whatever the umask.

    Args:
        name: name of the file in /proc.
        flags: flags for `os.memfd_create`, in addition to MFD_CLOEXEC.

    Raises:
        OSError: it cannot be made.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | flags)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _tighten(folder: Path, tell: Callable[[str], None]) -> None:
    """Takes the rights of others at a folder of dsrun's own."""
    found = folder.stat()
    if found.st_uid not in _mine():
        raise _foreign(folder, found.st_uid)
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        try:
            os.chmod(folder, 0o700)
        except PermissionError:  # vfat, exFAT and CIFS have the modes that they were mounted with
            return
        if not folder.stat().st_mode & 0o077:
            tell(f"{folder} was open to others ({stat.S_IMODE(found.st_mode):03o}), and is yours alone now (700)")


def _refuse_foreign(own: Path) -> None:
    """Refuses a folder that another user owns, or to which a link of theirs leads."""
    for folder in (own, *own.parents):
        if folder.is_symlink() and (user := folder.lstat().st_uid) not in (_ROOT, *_mine()):
            raise _foreign(folder, user)
    there = Path(os.path.realpath(own))
    if there.exists() and (user := there.stat().st_uid) not in _mine():
        raise _foreign(there, user)


def _warn_of_writers(own: Path, tell: Callable[[str], None]) -> None:
    """Tells of the nearest folder above in which others could exchange what is below it, once a run."""
    for folder in Path(os.path.realpath(own)).parents:
        if not folder.exists() or not (right := _right_of_others(found := folder.stat())):
            continue
        if folder not in _told:
            _told.add(folder)
            # An owner is not kept by a sticky bit.
            sticky = f"`chmod +t {folder}`, or " if found.st_uid in (_ROOT, *_mine()) else ""
            tell(
                f"warning: {folder} (mode {stat.S_IMODE(found.st_mode):04o}) {right}, who could put a folder of "
                f"theirs in the place of {own}; {sticky}set XDG_STATE_HOME to a folder that is yours alone"
            )
        return


def _right_of_others(found: os.stat_result) -> str:
    """Says by which right others may exchange what is in a folder; empty where nobody may."""
    if found.st_uid not in (_ROOT, *_mine()):
        return f"belongs to {_name(found.st_uid)}"
    if found.st_mode & stat.S_ISVTX:
        return ""
    if found.st_mode & stat.S_IWOTH:
        return "may be written to by everybody"
    is_of_others = found.st_gid not in (_ROOT, os.getegid())
    return f"may be written to by group {found.st_gid}" if found.st_mode & stat.S_IWGRP and is_of_others else ""


def _mine() -> tuple[int, ...]:
    return (os.geteuid(), _NOBODY)


def _foreign(folder: Path, user: int) -> ForeignFolderError:
    kind = "link" if folder.is_symlink() else "folder"
    return ForeignFolderError(f"{folder} is a {kind} of {_name(user)}, not yours")


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
