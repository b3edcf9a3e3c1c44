"""Makes a folder on many hosts hold what a working folder here holds, and says what that took. One host: sync_host.

A host that has all of it is asked one question. Others get what differs: little over the talk of the survey, which is
open and works on every transport; much by rsync, where both ends have it, over a second channel. Either way the hosts
are asked again afterwards, and a host that still differs is a problem. What becomes of problems is the caller's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from dsrun.errors import Problem
from dsrun.units import format_duration

from ..hosts.spec import HostSpec
from ..survey.client import NoAnswer, Survey
from ..transport.base import Transport
from .host import READ_PATIENCE_S, Comparison, HostSync, HostSyncResult, comparison_of, files_text, question_of
from .rsync import is_here
from .tree_digest import Tree, read_tree

#: From here on rsync's differences and its raw bytes make up for a second login. See docs/decisions/0010.
RSYNC_FROM_BYTES = 16 << 20
#: Far below what a surveyor waits for its front end.
ALIVE_EVERY_S = 120.0
#: Between two looks at what else there is to do.
_LOOK_S = 0.1
#: Hosts that are sent files at the same time: they share the way out of this machine.
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class SyncResult:
    """A sync.

    Attributes:
        hosts: those that hold the tree now, in their order.
        problems: one for each that does not.
        notes: remarks for the user about the tree itself.
    """

    hosts: tuple[HostSyncResult, ...]
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
) -> SyncResult:
    """Brings every host's `target` to hold what `folder` holds here; returns when all have it or have failed.

    Args:
        survey: open, with these hosts.
        hosts: hosts to sync to.
        folder: here.
        target: absolute path on the hosts; made if it is missing.
        rsync_by: transport by which rsync reaches the hosts; None does without rsync.
        rsync_from_bytes: less is not worth a second connection.
        note: callback that gets a line before files are sent to a host; runs on the caller's thread.
        alive_every_s: seconds between two short messages to hosts that wait for other hosts or for rsync.

    Raises:
        UsageError: the folder cannot be read, or is too large.
    """
    tree = read_tree(folder)
    compared = compare_hosts(survey, tree, target=target, host_names=[host.name for host in hosts])
    done: dict[str, HostSyncResult | Problem] = {}
    gate = threading.Semaphore(_AT_ONCE)
    # A host is asked by one thread at a time.
    asking = {host.name: threading.Lock() for host in hosts}
    faults: list[Exception] = []

    def bring(job: HostSync) -> None:
        try:
            with gate:
                done[job.name] = job.run()
        except Exception as fault:
            # Of ours, and so raised where somebody sees it.
            faults.append(fault)

    with ExitStack() as keep:
        threads: list[threading.Thread] = []
        for host in hosts:
            match compared[host.name]:
                case NoAnswer(reason, hint):
                    done[host.name] = Problem(f"sync: host {host.name}: {reason}", hint)
                case comparison:
                    use_rsync = comparison.rsync is not None and rsync_by is not None and is_here()
                    job = HostSync(
                        survey,
                        host,
                        tree=tree,
                        target=target,
                        comparison=comparison,
                        asking=asking[host.name],
                        keep=keep,
                    )
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
            alive_at_s = time.monotonic() + alive_every_s
            while thread.is_alive():
                thread.join(min(_LOOK_S, alive_every_s))
                survey.attend()
                if thread.is_alive() and time.monotonic() >= alive_at_s:
                    _keep_alive(survey, asking)
                    alive_at_s = time.monotonic() + alive_every_s
    if faults:
        raise faults[0]
    results = [done[host.name] for host in hosts]
    return SyncResult(
        tuple(result for result in results if isinstance(result, HostSyncResult)),
        tuple(result for result in results if isinstance(result, Problem)),
        tree.notes,
    )


def compare_hosts(
    survey: Survey, tree: Tree, *, target: str, host_names: Sequence[str] | None = None
) -> dict[str, Comparison | NoAnswer]:
    """Asks hosts, by one question each, how their folder differs from a tree. Sends no file.

    Args:
        survey: open.
        tree: files of the folder on this machine.
        target: absolute path of the folder on the hosts.
        host_names: names of the hosts to ask; None asks all.
    """
    answers = survey.ask("compare", question_of(tree, target), host_names=host_names, patience_s=READ_PATIENCE_S)
    return {
        name: answer if isinstance(answer, NoAnswer) else comparison_of(answer.value)
        for name, answer in answers.items()
    }


def synced_lines(synced: SyncResult) -> list[str]:
    """Returns what a user is told of a sync that went well: a line for hosts alike, then what to know about each.

    Notes about the tree are for those who have just sent it, not for every launch.
    """
    alike: dict[tuple[int, int, int, str], list[HostSyncResult]] = {}
    for host in synced.hosts:
        alike.setdefault((host.files, host.size, host.deleted, host.how), []).append(host)
    lines = list(synced.notes) if any(host.files for host in synced.hosts) else []
    for (files, size, deleted, how), hosts in alike.items():
        names = ", ".join(host.host for host in hosts)
        if how == "nothing" and not deleted:
            lines.append(f"sync: {names}: nothing to send")
            continue
        took = format_duration(max(host.seconds for host in hosts))
        gone = f", {deleted} deleted" if deleted else ""
        by = f", by {how}" if how == "rsync" else ""
        lines.append(f"sync: {names}: {files_text(files, size)}{gone} in {took}{by}")
    return [*lines, *(f"sync: host {host.host}: {text}" for host in synced.hosts for text in host.notes)]


def _keep_alive(survey: Survey, asking: Mapping[str, threading.Lock]) -> None:
    """Says a word to each host that nobody asks anything: surveyors give up a front end that has fallen silent."""
    free = {name: lock for name, lock in asking.items() if lock.acquire(blocking=False)}
    try:
        # One that answers no more is found out by its next question.
        survey.ask("echo", {}, host_names=[*free])
    finally:
        for lock in free.values():
            lock.release()
