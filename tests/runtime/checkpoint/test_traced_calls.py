"""What the crash tests record is what the system is asked for, beside training too: else they would prove nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

#: Saves a new tag and then the same again, on two ranks; prints what the recorder saw, if the ranks write themselves.
SAVES = """
import json, sys
from pathlib import Path
import torch  # before its files are traced
from support.crashes import Recorder
from support.savers import nothing, wanted, with_savers
folder, asynchronous = Path(sys.argv[1]), sys.argv[2] == "beside"
recorder = Recorder()

def body(saver, rank):
    for value in (1.0, 2.0):
        saver.save(folder, "t", lambda: wanted(value, rank=rank, size=2), progress=nothing)
        saver.finish(nothing)

with_savers(2, body, calls=recorder, asynchronous=asynchronous)
steps = [(step.does, str(step.path)) for step in recorder.steps]
print(json.dumps(steps))
"""
_SYSCALLS = "mkdir,mkdirat,openat,pwrite64,ftruncate,fsync,fdatasync,rename,renameat2,unlink,unlinkat,rmdir,link,linkat"
_STRACE = shutil.which("strace")


def may_trace(*words: str) -> bool:
    if _STRACE is None:
        return False
    command = [_STRACE, "-f", "-o", "/dev/null", "-e", f"trace={_SYSCALLS}", *words, "true"]
    done = subprocess.run(command, check=False, capture_output=True)
    return done.returncode == 0 and not done.stderr


def traced(folder: Path, how: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns what the system was asked for in the folder, and what the recorder saw: (what, path) in order."""
    assert _STRACE is not None
    log = folder.parent / f"{how}.log"
    # The kernel then stops at the calls that are asked for, and not at each one: older ones do not know how.
    fast = ["--seccomp-bpf"] if may_trace("--seccomp-bpf") else []
    command = [_STRACE, *fast, "-f", "-y", "-qq", "-o", str(log), "-e", f"trace={_SYSCALLS}", "-e", "signal=none"]
    done = subprocess.run(
        [*command, sys.executable, "-c", SAVES, str(folder), how],
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    steps = json.loads(done.stdout.splitlines()[-1])
    recorded = [(does, name(path)) for does, path in steps if path.startswith(str(folder))]
    return [call for line in joined(log.read_text()) if (call := parsed(line, folder)) is not None], recorded


def name(path: str) -> str:
    """A path without the id of its save and without the folder it was saved to."""
    return re.sub(r"[0-9a-f]{8}(?=$|\.safetensors)", "ID", path.rpartition("/run")[2]) or "/"


def joined(log: str) -> list[str]:
    """Lines of a log, with calls that others came between in one line, where they ended."""
    begun: dict[str, str] = {}
    lines: list[str] = []
    for line in log.splitlines():
        pid, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest.endswith("<unfinished ...>"):
            begun[pid] = rest.removesuffix("<unfinished ...>")
        elif resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", rest):
            lines.append(begun.pop(pid) + resumed[1])
        else:
            lines.append(rest)
    return lines


def parsed(line: str, folder: Path) -> tuple[str, str] | None:
    """One successful call as the recorder calls it; None for one that changes nothing below the folder."""
    call, _, rest = line.partition("(")
    if "= -1" in line or str(folder) not in rest:
        return None
    paths = re.findall(rf"{re.escape(str(folder))}[^\">]*", rest)
    if call == "openat":
        return ("create", name(paths[0])) if "O_CREAT" in rest else None
    if call == "fsync":
        return ("sync" if Path(paths[0]).suffix or "/." in paths[0] or paths[0].endswith("latest") else "sync folder",
                name(paths[0]))  # fmt: skip
    does = {"pwrite64": "write", "ftruncate": "cut", "unlinkat": "remove", "unlink": "remove"}
    return does.get(call, call.removesuffix("at").removesuffix("at2")), name(paths[0])


def by_path(calls: list[tuple[str, str]]) -> dict[str, list[str]]:
    """What was done to each path, in order; marks of jobs and of shared folders are no part of a save."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for does, path in calls:
        if "/.shared-" not in path and ".job-" not in path:
            found[path].append(does)
    return dict(found)


@pytest.mark.skipif(not may_trace(), reason="there is no strace, or it may not trace")
@pytest.mark.depends_on_speed("ranks that find the folder missing at one moment both make it durable")
def test_C5_the_system_is_asked_for_what_the_crash_tests_record_in_that_order(tmp_path: Path) -> None:
    run = tmp_path / "in" / "run"
    run.parent.mkdir()
    asked, recorded = traced(run, "in")
    assert by_path(asked) == by_path(recorded)
    assert len(asked) > 40
    run = tmp_path / "beside" / "run"
    run.parent.mkdir()
    # Who only waits reads its mark; no crash can make a checkpoint of one.
    beside = [(does, path) for does, path in traced(run, "beside")[0] if ".saving-" not in path and ".job-" not in path]
    assert by_path(beside) == by_path(recorded), "the process beside training takes the same steps"
    order = [path for does, path in beside if does == "rename"]
    assert order == [path for does, path in recorded if does == "rename"]
