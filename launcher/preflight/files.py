"""Which hosts lack the files of a job, have others, or no room for what it writes. Pure.

Of code, what differs is named file by file, for a digest of everything cannot say what to look at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from dsrun.units import format_list

from ..machine.verdict import Context
from ..machine.verdicts.room import room_verdicts, working_folder_verdicts
from .facts import HostFacts
from .findings import Fault, Finding, Requirements, faults, fold, named
from .versions import groups, in_words

#: Of files that differ, these many are named.
_MOST_FILES = 3


def judge_files(facts: Mapping[str, HostFacts], wants: Requirements, count: int) -> Iterator[Finding]:
    """Yields what is wrong with files and folders.

    Args:
        facts: facts of the hosts that answered, by name, in rank order.
        wants: needs that the job has of its hosts.
        count: number of all hosts of the job.
    """
    yield from _files(facts, count)
    yield from _code(facts, _below(wants.script, wants.folder))
    yield from fold("disk", {name: _folder_faults(its, wants.folder) for name, its in facts.items()}, count)
    yield from fold("disk", {name: _disk_faults(its) for name, its in facts.items()}, count)
    yield from _missing_paths(facts, count)


def _files(facts: Mapping[str, HostFacts], count: int) -> Iterator[Finding]:
    fix = "`--sync` copies the working folder, or mount it there"
    without = {name for name, its in facts.items() if its.folder_fault is not None}
    yield from fold(
        "folder",
        {name: [("red", its.folder_fault, fix)] for name, its in facts.items() if its.folder_fault is not None},
        count,
    )
    for kind in dict.fromkeys(kind for its in facts.values() for kind in its.files):
        files = {name: its.files[kind] for name, its in facts.items() if kind in its.files}
        yield from fold(
            kind,
            {
                # Where the folder is missing, it is the folder that is to be mended.
                name: [("red", file.fault, fix)]
                for name, file in files.items()
                if file.fault is not None and name not in without
            },
            count,
        )
        digests = {name: file.digest for name, file in files.items() if file.digest is not None}
        parts = groups(digests)
        if len(parts) > 1:
            odd = tuple(name for name in digests if digests[name] != parts[0][0])
            contents = [(f"content {digest.partition(':')[2][:8]}", names) for digest, names in parts]
            yield Finding(
                verdict="red",
                name=kind,
                text=f"{files[odd[0]].path}: {in_words(contents)}",
                hosts=odd,
                fix="`--sync` copies it to all hosts",
            )


def _code(facts: Mapping[str, HostFacts], script: str | None) -> Iterator[Finding]:
    """Tells which Python files of the working folder are others on some hosts, or are not there."""
    code = {name: its.code for name, its in facts.items() if its.code is not None and its.folder_fault is None}
    files_of: dict[tuple[str, ...], list[str]] = {}
    for path in sorted({path for its in code.values() for path in its}):
        digests = {name: its.get(path, "") for name, its in code.items()}
        usual = groups(digests)[0][0]
        odd = tuple(name for name in digests if digests[name] != usual)
        # Of the script it is told already, and more strictly.
        if odd and path != script:
            files_of.setdefault(odd, []).append(path)
    for odd, paths in files_of.items():
        text = f"{format_list(paths, _MOST_FILES)}: not the same on {named(odd, len(code))} as on the other hosts"
        yield Finding(verdict="amber", name="code", text=text, hosts=odd, fix="`--sync` copies the working folder")


def _below(script: str | None, folder: str | None) -> str | None:
    """Returns the script's path from the working folder on."""
    if script is None or folder is None:
        return script
    return os.path.relpath(os.path.join(folder, script), folder)


def _folder_faults(facts: HostFacts, folder: str | None) -> Iterator[Fault]:
    if folder is not None:
        yield from faults(working_folder_verdicts(folder, free_bytes=facts.folder_free_bytes, path="folder"))


def _disk_faults(facts: HostFacts) -> Iterator[Fault]:
    for room in facts.paths:
        yield from faults(room_verdicts(room, path="paths", context=Context(writes=True)))


def _missing_paths(facts: Mapping[str, HostFacts], count: int) -> Iterator[Finding]:
    """Tells of folders that are there on some hosts only: a disk that is not mounted, most often."""
    for path in dict.fromkeys(entry.path for its in facts.values() for entry in its.paths):
        there = {name: entry.there for name, its in facts.items() for entry in its.paths if entry.path == path}
        deepest = max(there.values(), key=len)
        odd = [name for name, folder in there.items() if folder != deepest]
        if odd:
            text = f"{named(odd, count)}: {deepest} is not there, as it is on {named(_rest(there, odd), count)}"
            fix = "is a disk not mounted? the job would write to the disk below"
            yield Finding(verdict="amber", name="disk", text=text, hosts=tuple(odd), fix=fix)


def _rest(all_of: Mapping[str, object], odd: Sequence[str]) -> list[str]:
    return [name for name in all_of if name not in odd]
