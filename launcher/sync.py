"""Makes a folder on many hosts hold what a working folder here holds, and says what that took. See sync_here.

A host that has all of it is asked one question. Others get what differs: little over the talk of the survey, which is
open and works on every transport; much by rsync, where both ends have it, over a second channel. Either way the hosts
are asked again afterwards, and a host that still differs is a problem. What becomes of problems is the caller's.
"""

from __future__ import annotations

import base64
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Any

from dsrun.errors import Problem
from dsrun.units import format_bytes, format_duration

from .excerpts import listed
from .hosts import HostSpec
from .survey import Survey, Unable
from .sync_rsync import copy_by_rsync, is_here
from .transport.base import Transport
from .tree_digest import LINK, Entry, Tree, read_tree

#: From here on rsync's differences and its raw bytes make up for a second login. See docs/decisions/0010.
RSYNC_FROM_BYTES = 16 << 20
#: Far below what a surveyor waits for its front end.
ALIVE_EVERY_S = 120.0
#: Hosts that are sent files at the same time: they share the way out of this machine.
_AT_ONCE = 8
#: Of files in a question; small against a slow disk's patience, large against the time of a question.
_BATCH_BYTES = 2 << 20
_BATCH_FILES = 500
#: For all files of a tree to be read there, perhaps over a network.
_READ_PATIENCE_S = 180.0
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
class HostSynced:
    """What it took on one host.

    Attributes:
        host: its name.
        files: that were sent.
        size: bytes of them.
        deleted: files that earlier syncs had put there.
        how: `nothing` was to be sent; or by `survey`, or `rsync`.
        seconds: of this host's part.
        notes: what a user should know about this host, in words.
    """

    host: str
    files: int = 0
    size: int = 0
    deleted: int = 0
    how: str = "nothing"
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Synced:
    """A sync.

    Attributes:
        hosts: those that hold the tree now, in their order.
        problems: one for each that does not.
        notes: about the tree itself.
    """

    hosts: tuple[HostSynced, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def sync_hosts(
    survey: Survey,
    hosts: Sequence[HostSpec],
    *,
    folder: str,
    target: str,
    rsync_by: Transport | None,
    rsync_from_bytes: int = RSYNC_FROM_BYTES,
    note: Callable[[str], None] = lambda _: None,
    alive_every_s: float = ALIVE_EVERY_S,
) -> Synced:
    """Brings every host's `target` to hold what `folder` holds here; returns when all have it or have failed.

    Args:
        survey: open, with these hosts.
        hosts: where to.
        folder: here.
        target: absolute path on the hosts; made if it is missing.
        rsync_by: how rsync reaches the hosts; None does without it.
        rsync_from_bytes: less is not worth a second connection.
        note: told in words of each host that files are about to be sent to; on the caller's thread.
        alive_every_s: how often hosts are spoken to that wait for others, or for rsync.

    Raises:
        UsageError: the folder cannot be read, or is too large.
    """
    tree = read_tree(folder)
    began_s = monotonic()
    compared = compare_hosts(survey, tree, target=target, of=[host.name for host in hosts])
    done: dict[str, HostSynced | Problem] = {}
    gate = threading.Semaphore(_AT_ONCE)
    # A host is asked by one thread at a time.
    asking = {host.name: threading.Lock() for host in hosts}

    def bring(job: _HostSync) -> None:
        with gate:
            done[job.name] = job.run()

    with ExitStack() as keep:
        threads: list[threading.Thread] = []
        for host in hosts:
            match compared[host.name]:
                case Unable(reason, hint):
                    done[host.name] = Problem(f"sync: host {host.name}: {reason}", hint)
                case comparison:
                    use_rsync = comparison.rsync is not None and rsync_by is not None and is_here()
                    job = _HostSync(survey, host, tree, target, comparison, asking[host.name], keep, began_s)
                    if job.is_needless:
                        done[host.name] = job.synced()
                        continue
                    if use_rsync and job.size >= rsync_from_bytes:
                        job.rsync_by = rsync_by
                    if job.size:
                        note(job.intent())
                    threads.append(threading.Thread(target=bring, args=(job,), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(alive_every_s)
                if thread.is_alive():
                    _keep_alive(survey, asking)
    results = [done[host.name] for host in hosts]
    return Synced(
        tuple(result for result in results if isinstance(result, HostSynced)),
        tuple(result for result in results if isinstance(result, Problem)),
        tree.notes,
    )


def compare_hosts(
    survey: Survey, tree: Tree, *, target: str, of: Sequence[str] | None = None
) -> dict[str, Comparison | Unable]:
    """Asks hosts, by one question each, how their folder differs from a tree. Sends no file.

    Args:
        survey: open.
        tree: what there is here.
        target: absolute path of the folder on the hosts.
        of: names of the hosts; None asks all.
    """
    answers = survey.ask("compare", _question(tree, target), of=of, patience_s=_READ_PATIENCE_S)
    return {
        name: answer if isinstance(answer, Unable) else _comparison(answer.value) for name, answer in answers.items()
    }


def synced_lines(synced: Synced) -> list[str]:
    """Returns what a user is told of a sync that went well: a line for hosts alike, then what to know about each."""
    alike: dict[tuple[int, int, int, str], list[HostSynced]] = {}
    for host in synced.hosts:
        alike.setdefault((host.files, host.size, host.deleted, host.how), []).append(host)
    lines = list(synced.notes)
    for (files, size, deleted, how), hosts in alike.items():
        names = ", ".join(host.host for host in hosts)
        if how == "nothing" and not deleted:
            lines.append(f"sync: {names}: nothing to send")
            continue
        took = format_duration(max(host.seconds for host in hosts))
        gone = f", {deleted} deleted" if deleted else ""
        by = f", by {how}" if how == "rsync" else ""
        lines.append(
            f"sync: {names}: {files} file{'' if files == 1 else 's'} ({format_bytes(size)}){gone} in {took}{by}"
        )
    return [*lines, *(f"sync: host {host.host}: {text}" for host in synced.hosts for text in host.notes)]


def _keep_alive(survey: Survey, asking: Mapping[str, threading.Lock]) -> None:
    """Says a word to each host that nobody asks anything: surveyors give up a front end that has fallen silent."""
    free = {name: lock for name, lock in asking.items() if lock.acquire(blocking=False)}
    try:
        # One that answers no more is found out by its next question.
        survey.ask("echo", {}, of=[*free])
    finally:
        for lock in free.values():
            lock.release()


def _files(count: int, size: int) -> str:
    return f"{count} file{'' if count == 1 else 's'} ({format_bytes(size)})"


class _HostSync:
    """The sync of one host that differs."""

    def __init__(
        self,
        survey: Survey,
        host: HostSpec,
        tree: Tree,
        target: str,
        comparison: Comparison,
        asking: threading.Lock,
        keep: ExitStack,
        began_s: float,
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
        self._began_s = began_s
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
        return f"sync: sending {_files(len(self._send), self.size)} to {self._target} on {self.name}"

    def run(self) -> HostSynced | Problem:
        """Sends what differs, and asks whether all is there."""
        try:
            return self._run()
        except _Failed as failed:
            return failed.problem

    def synced(self, *, deleted: int = 0, how: str = "nothing") -> HostSynced:
        """Says what it took."""
        return HostSynced(
            host=self.name,
            files=len(self._send),
            size=self.size,
            deleted=deleted,
            how=how,
            seconds=monotonic() - self._began_s,
            notes=tuple(self._notes),
        )

    def _run(self) -> HostSynced:
        entries = {path: entry.to_json() for path, entry in self._send.items()}
        modes = {path: self._tree.entries[path].mode for path in self._found.modes}
        begun = self._ask("begin", {"send": entries, "modes": modes, "gone": self._gone})
        how = self._copy()
        ended = _comparison(self._ask("end", {**_question(self._tree, self._target), "sent": [*self._send]}))
        if ended.unlike:
            raise _Failed(
                f"sync: host {self.name}: {listed([*ended.unlike])} in {self._target} is still not what it is here",
                "was it changed meanwhile, here or there? Can its file system keep permissions?",
            )
        if self._found.changed:
            self._notes.append(f"{listed([*self._found.changed])} had another content and was replaced")
        if self._found.kept:
            self._notes.append(f"{listed([*self._found.kept])} is gone here, but was changed there and stays")
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

    def _ask(self, question: str, arguments: Mapping[str, Any], *, patience_s: float = _READ_PATIENCE_S) -> Any:
        given = {"target": self._target, **arguments}
        with self._asking:
            answer = self._survey.ask(f"sync_{question}", given, of=[self.name], patience_s=patience_s)[self.name]
        if isinstance(answer, Unable):
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


def _question(tree: Tree, target: str) -> dict[str, Any]:
    return {"target": target, "entries": {path: entry.to_json() for path, entry in tree.entries.items()}}


def _comparison(value: Mapping[str, Any]) -> Comparison:
    lists = {name: tuple(paths) for name, paths in value.items() if name != "rsync"}
    return Comparison(**lists, rsync=value["rsync"])
