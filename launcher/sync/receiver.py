"""The side of a sync that is on the host: says what differs from a tree elsewhere, and takes in what it is sent.

Three rules. A file appears whole or not at all: it is written beside its place and renamed. Nothing is deleted but what
an earlier sync put there and nobody has changed. Nothing is written through a symbolic link, and so none of it outside
of the folder. The questions stand in order of their asking; see [Note: questions] in survey/server. Standard library
only.
"""

from __future__ import annotations

import base64
import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from dsrun.errors import LaunchError

from ..excerpts import listed
from .record import SyncRecord
from .tree_digest import LINK, MAX_BYTES, Entry, read_entry


def compare(arguments: dict[str, Any], keep: ExitStack) -> dict[str, Any]:
    """What differs in folder `target` from `entries`, which are `Entry.to_json` by path? Changes nothing.

    Returns:
        lists of paths. `missing`: there is no such file. `different`: its content is another. `modes`: its permissions
        alone are others. `changed`: those of `different` that no sync has left so. `gone`: what a sync has put there
        and left so, and is not among the entries. `kept`: the same, but somebody has changed it. Also `rsync`, the path
        of that program, or None.
    """
    target, entries = _target(arguments), _entries(arguments["entries"])
    said = _compare(target, entries, SyncRecord(target, os.environ))
    return {**said, "rsync": shutil.which("rsync")}


def begin(arguments: dict[str, Any], keep: ExitStack) -> dict[str, Any]:
    """Makes ready for the files `send`, entries by path; sets `modes`, by path; deletes `gone`, a list of paths.

    Returns:
        `deleted`: the paths that were.
    """
    target, send = _target(arguments), _entries(arguments["send"])
    _make_target(target)
    record = SyncRecord(target, os.environ)
    record.lock(keep)
    deleted = [path for path in arguments["gone"] if _delete(target, path, record)]
    record.forget(path for path in record.paths if not os.path.lexists(_inside(target, path)))
    in_the_way = sorted({at for path in (*send, *arguments["modes"]) if (at := _obstacle(target, path)) is not None})
    if in_the_way:
        raise LaunchError(
            f"in {target}, {listed(in_the_way)} is in the way: a folder where a file is to be,"
            " or a file or symbolic link where a folder is to be",
            hint="move it away; only what a sync has put there is taken away by one",
        )
    for folder in sorted({os.path.dirname(path) for path in send}):
        os.makedirs(os.path.join(target, folder), exist_ok=True)
    for path, mode in arguments["modes"].items():
        os.chmod(_inside(target, path), mode)
    record.expect(send)
    record.write()
    return {"deleted": deleted}


def write(arguments: dict[str, Any], keep: ExitStack) -> dict[str, Any]:
    """Writes `pieces` of files: `[path, name, offset, bytes in base64, mode]`.

    `name` is that of the temporary file, the same for all pieces of a file. They come in order; the last one has a
    mode, the others None. A symbolic link is one piece, where it leads.
    """
    target = _target(arguments)
    for path, name, offset, text, mode in arguments["pieces"]:
        place = _inside(target, path)
        temporary = os.path.join(os.path.dirname(place), name)
        if offset == 0:
            # Should the front end be cut off.
            keep.callback(_discard, temporary)
        try:
            _write_piece(temporary, offset, base64.b64decode(text), mode)
            if mode is not None:
                os.replace(temporary, place)
        except OSError as error:
            _discard(temporary)
            raise OSError(error.errno, error.strerror, place) from error
    return {}


def end(arguments: dict[str, Any], keep: ExitStack) -> dict[str, Any]:
    """As `compare`, once all was sent; remembers which of the paths `sent` are as they should be."""
    target, entries = _target(arguments), _entries(arguments["entries"])
    record = SyncRecord(target, os.environ)
    said = _compare(target, entries, record)
    wrong = {*said["missing"], *said["different"]}
    record.settle({path: entries[path] for path in arguments["sent"] if path not in wrong})
    record.write()
    return {**said, "rsync": None}


def _target(arguments: dict[str, Any]) -> str:
    target: str = arguments["target"]
    if not os.path.isabs(target):
        raise LaunchError(f"cannot sync to {target!r}: expected an absolute path")
    return target


def _entries(values: dict[str, list[Any]]) -> dict[str, Entry]:
    return {path: Entry(*value) for path, value in values.items()}


def _inside(target: str, path: str) -> str:
    assert not {"", ".", ".."}.intersection(path.split("/")), f"{path!r} is a path below the folder"
    return os.path.join(target, path)


def _compare(target: str, entries: dict[str, Entry], record: SyncRecord) -> dict[str, list[str]]:
    said: dict[str, list[str]] = {name: [] for name in ("missing", "different", "modes", "changed", "gone", "kept")}
    for path, wanted in entries.items():
        found = _read(_inside(target, path))
        if found is None:
            said["missing"].append(path)
        elif found.digest != wanted.digest or (found.mode == LINK) != (wanted.mode == LINK):
            said["different"].append(path)
            if not record.is_as_left(path, found):
                said["changed"].append(path)
        elif found.mode != wanted.mode:
            said["modes"].append(path)
    for path in record.paths:
        if path not in entries and (found := _read(_inside(target, path))) is not None:
            said["gone" if record.is_as_left(path, found) else "kept"].append(path)
    return said


def _read(place: str) -> Entry | None:
    """Reads what is there, unless it is so large that it can be nothing of ours."""
    with suppress(FileNotFoundError, NotADirectoryError):
        status = os.lstat(place)
        if stat.S_ISREG(status.st_mode) and status.st_size > MAX_BYTES:
            return Entry(stat.S_IMODE(status.st_mode), "", status.st_size)
    return read_entry(place)


def _make_target(target: str) -> None:
    missing = [target] if not os.path.lexists(target) else []
    while missing and not os.path.lexists(above := os.path.dirname(missing[-1])):
        missing.append(above)
    if missing and os.path.dirname(missing[-1]) == "/" and len(missing) > 1:
        raise LaunchError(
            f"cannot make {target}: there is no {missing[-1]}",
            hint="is a file system not mounted there? Make that folder if it is meant to be",
        )
    os.makedirs(target, exist_ok=True)


def _delete(target: str, path: str, record: SyncRecord) -> bool:
    """Deletes what a sync has put there and nobody has changed, and the folders that are empty then."""
    place = _inside(target, path)
    found = _read(place)
    if found is None or not record.is_as_left(path, found) or _through_link(target, path) is not None:
        return False
    # Another host may have the same folder, and do the same.
    Path(place).unlink(missing_ok=True)
    folder = os.path.dirname(path)
    with suppress(OSError):
        # Until one holds something.
        while folder:
            os.rmdir(os.path.join(target, folder))
            folder = os.path.dirname(folder)
    return True


def _obstacle(target: str, path: str) -> str | None:
    """Returns what keeps a file from being put at `path`, relative to `target`; removes a folder that is empty."""
    if (at := _through_link(target, path)) is not None:
        return at
    place = _inside(target, path)
    if not os.path.isdir(place) or os.path.islink(place):
        return None
    try:
        os.rmdir(place)
    except OSError:
        return path
    return None


def _through_link(target: str, path: str) -> str | None:
    """Returns the folder on the way to `path` that is a link or a file; None if there is none."""
    for folder in _folders(path):
        place = os.path.join(target, folder)
        if os.path.lexists(place) and (os.path.islink(place) or not os.path.isdir(place)):
            return folder
    return None


def _folders(path: str) -> Iterable[str]:
    parts = path.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts)))


def _write_piece(temporary: str, offset: int, data: bytes, mode: int | None) -> None:
    if mode == LINK:
        os.symlink(data, os.fsencode(temporary))
        return
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if offset == 0 else 0)
    with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
        file.seek(offset)
        file.write(data)
        if mode is not None:
            os.fchmod(file.fileno(), mode)


def _discard(temporary: str) -> None:
    """Deletes half a file, if there is one."""
    with suppress(OSError):
        # On a file system that cannot be written to, this fails even where there is none.
        os.unlink(temporary)
