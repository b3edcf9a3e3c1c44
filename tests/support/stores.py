"""An object store in this process's memory, by fsspec's rules, that fails where it is told to.

Files go up in parts and are there when they are committed, as in S3: a put is whole or not there. `registered` makes
its addresses known; what it holds is gone with it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

SCHEME = "shaky"


class BusyError(OSError):
    """503: it will do it when it is asked again."""

    def __init__(self) -> None:
        super().__init__(16, "503 Slow Down")


@dataclass
class Held:
    """What a store holds, and what goes wrong in it.

    Attributes:
        files: name to (bytes, when by the store's clock).
        pending: uploads that were begun and not ended: name to parts.
        fails: (what is asked, name) -> raised; asked before each `open`, `part`, `commit`, `pipe`, `info`, `cat`,
            `ls` and `rm`.
        hides: function that returns whether listings do not show a name yet.
        cuts: (name, bytes) -> the bytes that a read returns.
        asked: requests to the store so far, in order, as (request, name).
        clock: time of the next put; each takes a second.
    """

    files: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    pending: dict[str, list[bytes]] = field(default_factory=dict)
    fails: Callable[[str, str], BaseException | None] = lambda what, name: None
    hides: Callable[[str], bool] = lambda name: False
    cuts: Callable[[str, bytes], bytes] = lambda name, data: data
    asked: list[tuple[str, str]] = field(default_factory=list)
    clock: float = 1000.0
    lock: Any = field(default_factory=RLock)

    def ask(self, what: str, name: str) -> None:
        """Takes note of what is asked, and fails if it is to."""
        with self.lock:
            self.asked.append((what, name))
            error = self.fails(what, name)
        if error is not None:
            raise error

    def put(self, name: str, data: bytes) -> None:
        """Has a file there, whole."""
        with self.lock:
            self.clock += 1
            self.files[name] = (data, self.clock)

    def names(self) -> list[str]:
        """Every file."""
        return sorted(self.files)


class ShakyFile(AbstractBufferedFile):
    """An upload in parts."""

    def _initiate_upload(self) -> None:
        self.fs.held.pending[self.path] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        del final
        self.fs.held.ask("part", self.path)
        self.fs.held.pending[self.path].append(self.buffer.getvalue())
        return True

    def commit(self) -> None:
        """Makes one file of all parts."""
        self.fs.held.ask("commit", self.path)
        self.fs.held.put(self.path, b"".join(self.fs.held.pending.pop(self.path)))

    def discard(self) -> None:
        """Gives the parts up."""
        self.fs.held.ask("discard", self.path)
        self.fs.held.pending.pop(self.path, None)


class ShakyFileSystem(AbstractFileSystem):
    """See the head of this file."""

    protocol = SCHEME
    cachable = False
    held: Held

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **words: Any) -> ShakyFile:
        assert mode == "wb", "files are read by ranges"
        self.held.ask("open", path)
        return ShakyFile(self, path, mode, block_size or "default", autocommit=words["autocommit"])

    def pipe_file(self, path: str, value: bytes, **words: Any) -> None:
        """Puts a small file."""
        path = self._strip_protocol(path)
        self.held.ask("pipe", path)
        self.held.put(path, bytes(value))

    def info(self, path: str, **words: Any) -> dict[str, Any]:
        """Says how large a file is."""
        path = self._strip_protocol(path)
        self.held.ask("info", path)
        if path not in self.held.files:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.held.files[path][0]), "type": "file"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **words: Any) -> bytes:
        """Reads a range."""
        path = self._strip_protocol(path)
        self.held.ask("cat", path)
        if path not in self.held.files:
            raise FileNotFoundError(path)
        return self.held.cuts(path, self.held.files[path][0][start:end])

    def rm_file(self, path: str) -> None:
        """Removes a file."""
        path = self._strip_protocol(path)
        self.held.ask("rm", path)
        self.held.files.pop(path, None)

    def ls(self, path: str, detail: bool = True, **words: Any) -> list[Any]:
        """Lists what begins alike, up to the next slash."""
        path = self._strip_protocol(path)
        self.held.ask("ls", path)
        found: dict[str, dict[str, Any]] = {}
        for name, (data, when) in self.held.files.items():
            head, _, rest = name.removeprefix(f"{path}/").partition("/")
            if name.startswith(f"{path}/") and not self.held.hides(name):
                kind = "directory" if rest else "file"
                entry = {"name": f"{path}/{head}", "size": 0 if rest else len(data), "type": kind}
                found[head] = entry if rest else {**entry, "LastModified": when}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else [one["name"] for one in found.values()]


@contextmanager
def registered() -> Generator[Held]:
    """Yields a store that `shaky://...` leads to."""
    held = Held()
    fsspec.register_implementation(SCHEME, type("OneShaky", (ShakyFileSystem,), {"held": held}), clobber=True)
    yield held
