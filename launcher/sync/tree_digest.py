"""What is in a working folder, as a value: each file's mode and digest.

Reads; copies nothing. Which files there are is the business of tree_files. Standard library only, for it also runs on
hosts.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dsrun.errors import Problem, UsageError
from dsrun.units import format_bytes, format_list

from .tree_files import list_files

#: More than this is data, not code, and is no business of a launch.
MAX_FILES, MAX_BYTES = 10_000, 500 << 20
#: Mode of an entry that is a symbolic link, whose content is where it leads; permissions it has none.
LINK = stat.S_IFLNK
_DIGEST_BYTES = 20
_READ_BYTES = 1 << 20
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or symbolic link.

    Attributes:
        mode: permission bits, or `LINK`.
        digest: digest of the file's bytes, or of the link's text.
        size: size in bytes.
    """

    mode: int
    digest: str
    size: int

    def to_json(self) -> list[Any]:
        """Returns it for a message."""
        return [self.mode, self.digest, self.size]


Entries = Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class Tree:
    """A working folder's files.

    Attributes:
        folder: absolute path.
        entries: entry of each file and symbolic link, by relative path, sorted. Names that are no UTF-8 hold surrogate
            escapes.
        notes: remarks in words about things that a user may not expect.
    """

    folder: str
    entries: dict[str, Entry]
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries.values())


def read_tree(folder: str, *, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES) -> Tree:
    """Lists and hashes a working folder's files.

    Args:
        folder: folder to read; its own path may be or go through a symbolic link.
        max_files: more are refused.
        max_bytes: more are refused, before any is hashed.

    Raises:
        UsageError: it cannot be read, or is too large; names what is large.
    """
    folder = os.path.abspath(folder)
    listing = list_files(folder)
    sizes: dict[str, int] = {}
    for path in listing.paths:
        with suppress(FileNotFoundError, NotADirectoryError):
            # Gone since it was listed.
            sizes[path] = os.lstat(os.path.join(folder, path)).st_size
    if len(sizes) > max_files or sum(sizes.values()) > max_bytes:
        raise _too_large(folder, sizes, max_files=max_files, max_bytes=max_bytes)
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    for path in sizes:
        try:
            entry = read_entry(os.path.join(folder, path))
        except OSError as error:
            hint = "make it readable, or leave it out in .gitignore"
            problems.append(Problem(f"{os.path.join(folder, path)}: cannot read it: {error.strerror}", hint))
        else:
            if entry is not None:
                entries[path] = entry
    if problems:
        raise UsageError.of(problems)
    return Tree(folder, entries, (*listing.notes, *_notes_on_links(folder, entries)))


def read_entry(path: str) -> Entry | None:
    """Reads one file or symbolic link.

    Returns:
        None where there is neither.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            text = os.fsencode(os.readlink(path))
            return Entry(LINK, _hash(text).hexdigest(), len(text))
        if not stat.S_ISREG(status.st_mode):
            return None
        # Not followed, should it have become a link meanwhile; nor waited for, if a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        digest, size = _hash(), 0
        while data := file.read(_READ_BYTES):
            digest.update(data)
            size += len(data)
    return Entry(stat.S_IMODE(status.st_mode), digest.hexdigest(), size)


def _hash(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES)


def _too_large(folder: str, sizes: Mapping[str, int], *, max_files: int, max_bytes: int) -> UsageError:
    if len(sizes) > max_files:
        counts = Counter(path.partition("/")[0] if "/" in path else "the folder itself" for path in sizes)
        named = ", ".join(f"{top} ({count:,})" for top, count in counts.most_common(_MOST_NAMED))
        message = f"{len(sizes):,} files, more than {max_files:,}; most are in {named}"
    else:
        largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:_MOST_NAMED]
        named = ", ".join(f"{path} ({format_bytes(sizes[path])})" for path in largest)
        total, limit = format_bytes(sum(sizes.values())), format_bytes(max_bytes)
        message = f"{total}, more than {limit}; the largest are {named}"
    return UsageError(
        f"working folder {folder} holds {_printable(message)}",
        hint="leave out data and results in .gitignore, or start from the folder of the code alone",
    )


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def _notes_on_links(folder: str, entries: Entries) -> Iterator[str]:
    """Says which links lead out of the tree: elsewhere they may lead nowhere."""
    out: list[str] = []
    for path, entry in entries.items():
        if entry.mode == LINK:
            text = os.readlink(os.path.join(folder, path))
            leads_to = os.path.normpath(os.path.join(os.path.dirname(path), text))
            if os.path.isabs(text) or leads_to == ".." or leads_to.startswith("../"):
                out.append(f"{path} -> {text}")
    if out:
        named = format_list(out, _MOST_NAMED)
        yield _printable(f"symbolic links out of {folder} are copied as they are: {named}")
