"""The files a job needs on a host: its script, and which Python files lie in its working folder.

Reads for preflight, within a fixed time: a working folder that is too large to look through, a home folder for one, is
told as such and not compared. Which files --sync copies is another question, see tree_files.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..os_errors import refusal_of
from ..sync.tree_files import LEFT_OUT

_MAIN = "__main__.py"
#: A larger file is data, and hashing it would hold up the launch; its size is compared all the same.
_MOST_HASHED_BYTES = 64 << 20
#: A working folder with more is data, or not one.
_MOST_ENTRIES = 10_000
_MOST_FILES = 1000
_MOST_BYTES = 32 << 20
#: On a slow file system.
_PATIENCE_S = 1.0
_SUFFIX = ".py"
#: Of installed packages, whose versions are compared elsewhere.
_VENV_MARK = "pyvenv.cfg"
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """A file that the job needs.

    Attributes:
        path: absolute path of the file that was asked for.
        digest: digest of the file, which tells contents apart; None where it cannot be read.
        fault: reason why the file cannot be read; None if it can.
    """

    path: str
    digest: str | None
    fault: str | None


class _TooMuch(Exception):
    """The folder holds more than is looked through."""


def file_facts(path: str) -> FileFacts:
    """Reads a file; a folder that Python can run stands for its `__main__.py`."""
    main = os.path.join(path, _MAIN)
    try:
        return FileFacts(path=path, digest=_digest_of(main if os.path.isdir(path) else path), fault=None)
    except OSError as error:
        return FileFacts(path=path, digest=None, fault=refusal_of(error))


def folder_fault(folder: str) -> str | None:
    """Says why a working folder cannot be used; None if it can."""
    try:
        with os.scandir(folder):
            return None if os.access(folder, os.X_OK, effective_ids=True) else f"{folder}: cannot be entered"
    except OSError as error:
        return refusal_of(error)


def code_digests(folder: str, *, patience_s: float = _PATIENCE_S) -> dict[str, str] | None:
    """Returns the digest of each Python file in a folder, by relative path; None if that would take too long.

    Args:
        folder: absolute path; what cannot be read in it counts as not there.
        patience_s: longest time for it.
    """
    until_s = time.monotonic() + patience_s
    found: dict[str, str] = {}
    left_bytes = _MOST_BYTES
    try:
        for path in _python_files(folder, until_s):
            try:
                with open(path, "rb") as file:
                    data = file.read(left_bytes + 1)
            except OSError:
                continue
            left_bytes -= len(data)
            if left_bytes < 0 or len(found) == _MOST_FILES:
                return None
            found[os.path.relpath(path, folder)] = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
    except _TooMuch:
        return None
    return found


def _python_files(folder: str, until_s: float) -> Iterator[str]:
    """Yields regular files, going through no link.

    Raises:
        _TooMuch: there is no end to it.
    """
    waiting = [folder]
    count = 0
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(here) as entries:
                names = list(entries)
        except OSError:
            continue
        if any(entry.name == _VENV_MARK for entry in names):
            continue
        count += len(names)
        if count > _MOST_ENTRIES or time.monotonic() > until_s:
            raise _TooMuch
        for entry in names:
            if entry.name.startswith(".") or entry.name in LEFT_OUT:
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            elif entry.name.endswith(_SUFFIX) and entry.is_file(follow_symlinks=False):
                yield entry.path


def _digest_of(path: str) -> str:
    # A named pipe is not waited for.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        head = file.read(_MOST_HASHED_BYTES)
        return f"{os.fstat(file.fileno()).st_size}:{hashlib.sha256(head).hexdigest()}"
