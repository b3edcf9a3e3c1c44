"""Makes one host's folder hold what a tree here holds: deletes, sends, and asks whether it is so. See `receiver.py`.

Runs in a thread of its own, and blocks. How many hosts are brought at once, and what is told of them, stands in sync.
"""

from __future__ import annotations

import base64
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Any

from dsrun.errors import Problem
from dsrun.units import format_bytes

from ..excerpts import listed
from ..hosts.spec import HostSpec
from ..survey.client import NoAnswer, Survey
from ..transport.base import Transport
from .rsync import copy_by_rsync
from .tree_digest import LINK, Entry, Tree

#: Of files in a question; small against a slow disk's patience, large against the time of a question.
_BATCH_BYTES = 2 << 20
_BATCH_FILES = 500
#: For all files of a tree to be read there, perhaps over a network.
READ_PATIENCE_S = 180.0
_WRITE_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a host's folder holds, against a tree; paths as the surveyor's `compare` tells them."""

    missing: tuple[str, ...]
    different: tuple[str, ...]
    modes: tuple[str, ...]
    changed: tuple[str, ...]
    gone: tuple[str, ...]
    kept: tuple[str, ...]
    rsync: str | None

    @property
    def unlike(self) -> tuple[str, ...]:
        """Files that are not there as they are here."""
        return (*self.missing, *self.different, *self.modes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSyncResult:
    """What it took on one host.

    Attributes:
        host: its name.
        files: number of files that were sent.
        size: bytes of them.
        deleted: files that earlier syncs had put there.
        how: `nothing` was to be sent; or by `survey`, or `rsync`.
        seconds: seconds that the sync of this host took.
        notes: remarks for the user about this host, in words.
    """

    host: str
    files: int = 0
    size: int = 0
    deleted: int = 0
    how: str = "nothing"
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


def question_of(tree: Tree, target: str) -> dict[str, Any]:
    """Returns the arguments of `compare`."""
    return {"target": target, "entries": {path: entry.to_json() for path, entry in tree.entries.items()}}


def comparison_of(value: Mapping[str, Any]) -> Comparison:
    """Reads the answer to `compare`."""
    lists = {name: tuple(paths) for name, paths in value.items() if name != "rsync"}
    return Comparison(**lists, rsync=value["rsync"])


def files_text(count: int, size: int) -> str:
    """`3 files (2.0 KiB)`."""
    return f"{count} file{'' if count == 1 else 's'} ({format_bytes(size)})"


class HostSync:
    """The sync of one host.

    Args:
        survey: open, with this host.
        host: host to sync to.
        tree: files of the folder on this machine.
        target: absolute path of the folder there.
        comparison: differences between the host's folder and the tree.
        asking: held while the host is asked something.
        keep: its end ends programs that were started here.
    """

    def __init__(
        self,
        survey: Survey,
        host: HostSpec,
        *,
        tree: Tree,
        target: str,
        comparison: Comparison,
        asking: threading.Lock,
        keep: ExitStack,
    ) -> None:
        self.name = host.name
        #: How rsync reaches the host; None sends over the survey.
        self.rsync_by: Transport | None = None
        self._survey = survey
        self._host = host
        self._tree = tree
        self._target = target
        self._found = comparison
        self._asking = asking
        self._keep = keep
        self._began_s = monotonic()
        self._send = {path: tree.entries[path] for path in (*comparison.missing, *comparison.different)}
        # What is here and is no part of the tree any more, like a file that git ignores now, stays where it is: over
        # there it may be the same file.
        self._gone = [path for path in comparison.gone if not _lies_in(tree.folder, path)]
        self._notes: list[str] = []

    @property
    def is_needless(self) -> bool:
        """Whether all is there as it should be."""
        return not (self._found.unlike or self._gone)

    @property
    def size(self) -> int:
        """Bytes to send."""
        return sum(entry.size for entry in self._send.values())

    def intent(self) -> str:
        """Says what is about to be sent."""
        return f"sync: sending {files_text(len(self._send), self.size)} to {self._target} on {self.name}"

    def run(self) -> HostSyncResult | Problem:
        """Sends what differs, and asks whether all is there."""
        try:
            self._began_s = monotonic()
            return self._run()
        except _Failed as failed:
            return failed.problem

    def synced(self, *, deleted: int = 0, how: str = "nothing") -> HostSyncResult:
        """Says what it took."""
        if self._found.kept:
            self._notes.append(f"{listed([*self._found.kept])} is gone here, but was changed there and stays")
        return HostSyncResult(
            host=self.name,
            files=len(self._send),
            size=self.size,
            deleted=deleted,
            how=how,
            seconds=monotonic() - self._began_s,
            notes=tuple(self._notes),
        )

    def _run(self) -> HostSyncResult:
        entries = {path: entry.to_json() for path, entry in self._send.items()}
        modes = {path: self._tree.entries[path].mode for path in self._found.modes}
        begun = self._ask("begin", {"send": entries, "modes": modes, "gone": self._gone})
        how = self._copy()
        ended = comparison_of(self._ask("end", {**question_of(self._tree, self._target), "sent": [*self._send]}))
        if ended.unlike:
            raise _Failed(
                f"sync: host {self.name}: {listed([*ended.unlike])} in {self._target} is still not what it is here",
                "was it changed meanwhile, here or there? Can its file system keep permissions?",
            )
        if self._found.changed:
            self._notes.append(f"{listed([*self._found.changed])} had another content and was replaced")
        return self.synced(deleted=len(begun["deleted"]), how=how)

    def _copy(self) -> str:
        if not self._send:
            return "nothing"
        if self.rsync_by is not None:
            assert self._found.rsync is not None, "it is used where it was found"
            fault = copy_by_rsync(
                [*self._send],
                folder=self._tree.folder,
                host=self._host,
                transport=self.rsync_by,
                target=self._target,
                program=self._found.rsync,
                keep=self._keep,
            )
            if fault is None:
                return "rsync"
            # What it has sent is there already; the rest, or the fault, comes over the survey.
            self._notes.append(f"rsync failed, so files were sent without it: {fault}")
        for pieces in self._batches():
            self._ask("write", {"pieces": pieces}, patience_s=_WRITE_PATIENCE_S)
        return "survey"

    def _batches(self) -> Iterator[list[list[Any]]]:
        batch: list[list[Any]] = []
        size = 0
        for piece in self._pieces():
            batch.append(piece)
            size += len(piece[3])
            if size >= _BATCH_BYTES or len(batch) >= _BATCH_FILES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _pieces(self) -> Iterator[list[Any]]:
        """Yields the arguments of `write`, for each file at least one."""
        token = secrets.token_hex(8)
        for number, (path, entry) in enumerate(self._send.items()):
            temporary = f".dsrun-{token}-{number}"
            offset = 0
            for data, is_last in self._read(path, entry):
                text = base64.b64encode(data).decode()
                yield [path, temporary, offset, text, entry.mode if is_last else None]
                offset += len(data)

    def _read(self, path: str, entry: Entry) -> Iterator[tuple[bytes, bool]]:
        """Yields what a file holds, with whether it is the last of it."""
        place = os.path.join(self._tree.folder, path)
        try:
            if entry.mode == LINK:
                yield os.fsencode(os.readlink(place)), True
                return
            with open(place, "rb", buffering=0) as file:
                left = entry.size
                while left > _BATCH_BYTES:
                    data = file.read(_BATCH_BYTES)
                    if not data:
                        break
                    left -= len(data)
                    yield data, False
                yield file.read(max(left, 0)), True
        except OSError as error:
            raise _Failed(
                f"sync: {place}: cannot read it any more: {error.strerror}", "start again once it stays as it is"
            ) from error

    def _ask(self, question: str, arguments: Mapping[str, Any], *, patience_s: float = READ_PATIENCE_S) -> Any:
        given = {"target": self._target, **arguments}
        with self._asking:
            answer = self._survey.ask(f"sync_{question}", given, host_names=[self.name], patience_s=patience_s)[
                self.name
            ]
        if isinstance(answer, NoAnswer):
            raise _Failed(f"sync: host {self.name}: {answer.reason}", answer.hint)
        return answer.value


def _lies_in(folder: str, path: str) -> bool:
    """Whether there is a file or link at `path`, and no link on the way to it."""
    above = os.path.dirname(path)
    is_real = os.path.realpath(os.path.join(folder, above)) == os.path.normpath(
        os.path.join(os.path.realpath(folder), above)
    )
    place = os.path.join(folder, path)
    return is_real and (os.path.islink(place) or (os.path.exists(place) and not os.path.isdir(place)))


class _Failed(Exception):
    """A host that cannot be brought to hold the tree."""

    def __init__(self, message: str, hint: str | None) -> None:
        super().__init__(message)
        self.problem = Problem(message, hint)
