"""A file system that remembers every step, and what would be on the disk had it crashed after any of them."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path

from dsrun.checkpoint_files.storage.calls import FileCalls

#: What a disk writes whole or not at all.
_SECTOR = 512


@dataclass(frozen=True)
class Step:
    """One call: what it does, to which path, with which second path, and where which bytes go."""

    does: str
    path: Path
    second: Path | None = None
    offset: int = 0
    data: bytes = b""


@dataclass
class Recorder(FileCalls):
    """Does everything on the real file system, and writes it down."""

    steps: list[Step] = field(default_factory=list)
    _paths: dict[int, Path] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def _note(self, step: Step) -> None:
        with self._lock:
            self.steps.append(step)

    def make_one_folder(self, path: Path) -> None:
        with self._lock:
            super().make_one_folder(path)
            self._note(Step("mkdir", path))

    def create(self, path: Path, *, direct: bool = False) -> int:
        with self._lock:
            descriptor = super().create(path, direct=direct)
            self._paths[descriptor] = path
            self._note(Step("create", path))
            return descriptor

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        super().write(descriptor, data, offset)
        self._note(Step("write", self._paths[descriptor], offset=offset, data=bytes(data)))

    def cut(self, descriptor: int, nbytes: int) -> None:
        super().cut(descriptor, nbytes)
        self._note(Step("cut", self._paths[descriptor], offset=nbytes))

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self._note(Step("sync", self._paths[descriptor]))

    def rename(self, old: Path, new: Path) -> None:
        with self._lock:
            super().rename(old, new)
            self._note(Step("rename", old, new))

    def link(self, old: Path, new: Path) -> None:
        with self._lock:
            super().link(old, new)
            self._note(Step("link", new, old))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._note(Step("sync folder", path))

    def remove(self, path: Path) -> None:
        with self._lock:
            was_there = path.exists()
            super().remove(path)
            if was_there:
                self._note(Step("remove", path))

    def remove_folder(self, path: Path) -> None:
        with self._lock:
            super().remove_folder(path)
            if not path.exists():
                self._note(Step("rmdir", path))


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    since: list[Step] = field(default_factory=list)  # what was done to it after that

    def do(self, step: Step) -> None:
        self.content = _changed(self.content, step, len(step.data))
        self.since.append(step)

    def sync(self) -> None:
        self.durable, self.since = bytes(self.content), []

    def some(self, chance: random.Random) -> bytes:
        """What a power cut may leave: any of the writes since, each of them to any sector."""
        content = bytearray(self.durable)
        for step in self.since:
            if chance.random() < 0.5:
                torn = chance.randrange(len(step.data) // _SECTOR + 1) * _SECTOR
                content = _changed(content, step, chance.choice((len(step.data), torn)))
        return bytes(content)


def _changed(content: bytearray, step: Step, nbytes: int) -> bytearray:
    if step.does == "cut":
        return content[: step.offset] + bytes(max(0, step.offset - len(content)))
    content = content + bytes(max(0, step.offset - len(content)))
    content[step.offset : step.offset + nbytes] = step.data[:nbytes]
    return content


@dataclass
class Disk:
    """What names and bytes there are, and which of them a power cut would leave.

    A process that is killed leaves everything; after a power cut a file may have lost the bytes that were not synced,
    and a folder the names that were not, each on its own.
    """

    root: Path
    names: dict[Path, _File | None] = field(default_factory=dict)  # None: a folder
    durable_names: dict[Path, _File | None] = field(default_factory=dict)

    def load(self) -> None:
        """Takes over what is there, as durable."""
        for path in sorted(self.root.rglob("*")):
            self.names[path] = None if path.is_dir() else _File(bytearray(path.read_bytes()), path.read_bytes())
        self.durable_names = dict(self.names)

    def take(self, step: Step) -> None:
        """Does a step."""
        match step.does:
            case "mkdir":
                self.names[step.path] = None
            case "create":
                self.names[step.path] = _File()
            case "write":
                self._file(step.path).do(step)
            case "cut":
                self._file(step.path).do(step)
            case "sync":
                self._file(step.path).sync()
            case "rename":
                assert step.second is not None
                self.names[step.second] = self.names.pop(step.path)
            case "link":
                assert step.second is not None
                self.names[step.path] = self.names[step.second]
            case "sync folder":
                for path in {*self.names, *self.durable_names}:
                    if path.parent == step.path:
                        if path in self.names:
                            self.durable_names[path] = self.names[path]
                        else:
                            self.durable_names.pop(path)
            case "remove" | "rmdir":
                self.names.pop(step.path)
            case other:
                raise AssertionError(other)

    def leave(self, into: Path, *, names_kept: bool, bytes_kept: bool) -> None:
        """Writes what is left after a crash into an empty folder."""
        names = self.names if names_kept else self.durable_names
        for path in sorted(names):
            file, target = names[path], into / path.relative_to(self.root)
            if not target.parent.is_dir():
                continue  # its folder's own name was lost
            if file is None:
                target.mkdir()
            else:
                target.write_bytes(bytes(file.content) if bytes_kept else file.durable)

    def leave_some(self, into: Path, chance: random.Random) -> None:
        """Writes what a power cut may leave into an empty folder: of what was not synced, any part, in any order."""
        lost = object()
        for path in sorted({*self.names, *self.durable_names}):
            file = chance.choice([self.names.get(path, lost), self.durable_names.get(path, lost)])
            target = into / path.relative_to(self.root)
            if file is lost or not target.parent.is_dir():
                continue
            if isinstance(file, _File):
                target.write_bytes(file.some(chance))
            else:
                target.mkdir()

    def _file(self, path: Path) -> _File:
        file = self.names.get(path)
        if file is None:
            raise AssertionError(f"{os.fspath(path)} is no file")
        return file
