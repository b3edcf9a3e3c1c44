"""Which place a text means, and who does there what `places.py` says. A further kind of storage is a row here.

Object stores are loaded when one is used: a path costs nothing of them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dsrun.errors import CheckpointError, InputError

from .calls import FileCalls
from .places import Address, Place, Storage
from .posix import PosixStorage

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
#: What a Path makes of an address.
_MANGLED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/.*", re.DOTALL)
#: Its addresses are paths of this host.
_FILE = "file"
#: What is stored there is seen by the process that stored it alone.
_MEMORY = "memory"


def place_of(text: str | os.PathLike[str]) -> Place:
    """Returns the place that a path or an address means: `checkpoints`, `s3://bucket/run`, `file:///data/run`.

    Raises:
        InputError: the address names nothing in its store, or has become a Path.
    """
    if not isinstance(text, str | Path):
        text = os.fspath(text)
    if isinstance(text, Path) and _MANGLED.fullmatch(str(text)):
        raise InputError(f"{text}: an address was made a Path, which is not one any more", hint="pass it as a str")
    found = None if isinstance(text, Path) else _ADDRESS.fullmatch(text)
    if found is None:
        return Path(text)
    scheme, path = found[1].lower(), found[2]
    if scheme == _FILE:
        if not path.startswith("/"):
            raise InputError(f"{text}: it names a host", hint=f"name a path of this one: `{_FILE}:///folder`")
        return Path(path)
    parts = [part for part in path.split("/") if part]
    if not parts:
        raise InputError(f"{text}: it names no bucket and no folder", hint=f"write `{scheme}://bucket/folder`")
    return Address(scheme, "/".join(parts))


def place_given(value: object, *, who: str, to: str = "save checkpoints in") -> Place:
    """Returns the place that an argument of a script means: a text, or any `os.PathLike`.

    Args:
        value: value that the script passed as the place.
        who: call and argument, for messages, as in "save_checkpoint: save_dir".
        to: purpose of the folder, for messages, e.g. `save checkpoints in`.

    Raises:
        InputError: it is no path, empty, or an address of nothing.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(text, str):
        shown = "None" if value is None else f"{value!r}, a {type(value).__name__}"  # pyright: ignore[reportUnknownArgumentType]
        raise InputError(f"{who} is {shown}", hint=f"pass the folder to {to}: a str or an os.PathLike")
    if not text:
        raise InputError(f"{who} is empty", hint=f"pass the folder to {to}")
    return place_of(value if isinstance(value, Path) else text)


def absolute(place: Place) -> str:
    """Returns the text that means a place whatever folder a process works in."""
    return str(place.absolute()) if isinstance(place, Path) else str(place)


def check_writable_beside(place: Place) -> None:
    """Refuses a place that another process of this host cannot write to on behalf of this one.

    Raises:
        CheckpointError: it is such a place.
    """
    if isinstance(place, Address) and place.scheme == _MEMORY:
        raise CheckpointError(
            f"{place}: a process beside this one writes checkpoints, and does not see this one's memory",
            hint="set `checkpoint.asynchronous` to false, or save to a folder",
        )


def storage_of(place: Place, calls: FileCalls | None = None) -> Storage:
    """Returns who stores at a place.

    Args:
        place: the place.
        calls: the file system, if it is a path; None: the one there is.

    Raises:
        StorageError: no such store is known, or what is needed for it is not installed.
    """
    if isinstance(place, Path):
        return PosixStorage(FileCalls() if calls is None else calls)
    from .objects import ObjectStorage

    return ObjectStorage.of(place.scheme)
