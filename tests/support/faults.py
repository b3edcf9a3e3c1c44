"""The fault matrix's common oracle: one `dsrun` command line in places of its own, and what must not be left of it.

Knows `dsrun` from outside only, as a user does: words and signals in; lines, files, processes and an exit code out.
What is injected, and what must come of it, stands in the tests (tests/e2e/test_faults_*.py) and in scripts/soak.

[Note: oracle] For every row, whatever was injected: dsrun ends within `HARD_LIMIT_S`, without a traceback of its own;
within `CLEAN_S` and the grace no process of the job is alive, be it known by a variable that all of them inherit or by
the job's id; no socket is open that one of them listened on; no cgroup is left that was made for them; and nothing new
lies in /dev/shm, in the temporary folder, or where the job was started.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.launcher.process_modules import AGENT, SPAWNER
from support import traces
from support.cli import clean_environment
from support.processes import job_processes, wait_for_end
from support.streams import Lines, Terminal, lines_of

#: No job of the matrix may take longer, whatever happens to it.
HARD_LIMIT_S = 120.0
#: From the end of dsrun, or its death, to the last trace of the job; the job's grace comes on top.
CLEAN_S = 10.0
#: Begin of a rank's program: says who it is, in one write.
READY = "import os, sys\nsys.stdout.write(f'ready {os.getpid()}\\n')\nsys.stdout.flush()\n"
#: Begin of a program whose ranks take a while to start: beats beside them until `stop_beating`, so that a start on a
#: busy machine is not taken for a hang. `has_started` tells the rest of the program whether that is over.
BEATING = """
import threading, dsrun
has_started = threading.Event()
def beat_until_started():
    while not has_started.wait(0.1):
        dsrun.heartbeat()
beating = threading.Thread(target=beat_until_started)
beating.start()
def stop_beating():
    has_started.set()
    beating.join()
"""
#: The rest of a program that waits for whatever comes.
WAIT = "import threading\nthreading.Event().wait()\n"
#: Waits until the test lets this process through the gate that is the script's first word.
PASS_GATE = "open(sys.argv[1], 'rb', 0).read(1)\n"

#: Inherited by everything that dsrun starts, and found also where a program drops the job's own variables.
_MARK_ENV = "FAULT_MATRIX_MARK"
_READY_LINE = re.compile(r"\[(?:[^\]:]*:)?(\d+)\] ready (\d+)")


@dataclass(frozen=True, slots=True)
class Bound:
    """A row's limit on time.

    Attributes:
        stated_s: seconds that the fault matrix demands; scripts/bench/launch.py measures them on a quiet machine.
        allowed_s: seconds that the test allows, on two cores that other work may share.
    """

    stated_s: float
    allowed_s: float

    @contextmanager
    def on(self, what: str) -> Generator[None, None, None]:
        """Fails if the block takes longer than the test allows."""
        began_s = time.monotonic()
        yield
        took_s = time.monotonic() - began_s
        limits = f"the row states {self.stated_s:g} s, the test allows {self.allowed_s:g} s"
        assert took_s <= self.allowed_s, f"{what} took {took_s:.1f} s; {limits}"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended and what it said; in a terminal all of it is `out`."""

    exit_code: int
    out: list[str]
    err: list[str]

    @property
    def text(self) -> str:
        """All that was shown, stdout first."""
        return "\n".join([*self.out, *self.err])

    @property
    def errors(self) -> list[str]:
        """The `error:` lines."""
        return [line for line in self.text.splitlines() if line.startswith("error: ")]

    @property
    def quoted(self) -> list[str]:
        """Lines of a rank that the report repeats."""
        return [line.removeprefix("  | ") for line in self.err if line.startswith("  | ")]


class Job:
    """One `dsrun` that runs or has run; `launched` makes it.

    Args:
        process: the front end.
        mark: value of the variable that all its processes inherit.
        jobs: folder in which the folders of jobs are made.
        streams: its output by name.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], *, mark: str, jobs: Path, streams: Mapping[str, Lines]
    ) -> None:
        self.process = process
        self._streams = streams
        self._mark = f"{_MARK_ENV}={mark}".encode()
        self._jobs = jobs
        self._earlier = set(traces.names_in(jobs))
        self._listening: set[str] = set()
        self._cgroups: set[str] = set()

    @property
    def ids(self) -> set[str]:
        """The job's id, once it has one."""
        return set(traces.names_in(self._jobs)) - self._earlier

    @property
    def folder(self) -> Path:
        """The job's folder."""
        (job_id,) = self.ids
        return self._jobs / job_id

    def wait_ready(self, ranks: int, *, timeout_s: float = HARD_LIMIT_S) -> dict[int, int]:
        """Waits until every rank has said `ready PID`; returns the pids by rank, and notes what the job holds."""
        pids: dict[int, int] = {}
        for match in self._streams["stdout"].matches(_READY_LINE, timeout_s=timeout_s):
            pids[int(match[1])] = int(match[2])
            if len(pids) == ranks:
                self.look()
                return pids
        raise AssertionError(f"of {ranks} ranks only {sorted(pids)} were ready in {timeout_s:g} s\n{self.said()}")

    def wait_for(self, pattern: str, stream: str = "stderr", *, timeout_s: float = HARD_LIMIT_S) -> re.Match[str]:
        """Waits for a line in which `pattern` is found."""
        for match in self._streams[stream].matches(re.compile(pattern), timeout_s=timeout_s):
            return match
        raise AssertionError(f"no {pattern!r} on {stream} in {timeout_s:g} s\n{self.said()}")

    def said(self) -> str:
        """What was shown last, for messages of failing tests."""
        return "\n".join("\n".join([f"--- {name}", *lines.now()[-40:]]) for name, lines in self._streams.items())

    def events(self, name: str) -> list[dict[str, Any]]:
        """The job's recorded events of one name."""
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def processes(self) -> set[int]:
        """Every live process of the job, the front end among them."""
        found = {pid for pid in traces.pids() if self._mark in traces.variables_of(pid)}
        return found.union(*(job_processes(job_id) for job_id in self.ids))

    def agent(self) -> int | None:
        """The job's agent; None where there is none (yet, or any more)."""
        return next((pid for pid in sorted(self.processes()) if _runs(pid, AGENT)), None)

    def spawner(self) -> int | None:
        """The one that makes the ranks; a forked rank has its command line, but not its parent."""
        agent = self.agent()
        return next((p for p in self.processes() if _runs(p, SPAWNER) and traces.parent_of(p) == agent), None)

    def children(self, parent: int) -> list[int]:
        """Live children of a process of the job, oldest first."""
        return sorted(pid for pid in self.processes() if traces.parent_of(pid) == parent)

    def look(self) -> None:
        """Notes on which sockets the job listens and in which cgroups it is, to look for them afterwards."""
        pids = self.processes()
        self._listening |= traces.listening_sockets(held_by=pids)
        # The front end's own is the user's; a job's are made for its ranks.
        self._cgroups |= set[str]().union(*map(traces.cgroups_of, pids)) - traces.cgroups_of(self.process.pid)

    def kill(self, pid: int | None, signum: signal.Signals = signal.SIGKILL) -> None:
        """Signals a process of the job; another one's pid is an error of the test."""
        assert pid in self.processes(), f"pid {pid} is none of this job\n{self.said()}"
        os.kill(pid, signum)

    def end(self, *, timeout_s: float = HARD_LIMIT_S) -> Ended:
        """Waits for dsrun to end; fails if it does not, or shows a traceback of its own."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"dsrun did not end in {timeout_s:g} s\n{self.said()}") from None
        said = {name: lines.to_end() for name, lines in self._streams.items()}
        ended = Ended(code, said["stdout"], said.get("stderr", []))
        # Ranks' tracebacks are tagged, quoted or indented. Of an agent that was killed, the shell of its login says so.
        own = r"^(dsrun: .*)?Traceback |last lines of the agent(?! on \S+:\n  \| Killed$)"
        assert not re.search(own, ended.text, re.MULTILINE), ended.text
        return ended

    def gone(self, *, grace_s: float = 0.0) -> None:
        """Waits until no process of the job is left; fails if that takes too long. See [Note: oracle]."""
        limit_s = CLEAN_S + grace_s
        deadline_s = time.monotonic() + limit_s
        while left := self.processes():
            over = [wait_for_end(pid, timeout_s=deadline_s - time.monotonic()) for pid in left]
            assert all(over), f"left after {limit_s:g} s:\n{traces.describe(self.processes())}\n{self.said()}"

    def left_open(self) -> list[str]:
        """What is left of sockets and cgroups that the job held when it was looked at, or that bear its name."""
        cgroups = {path for path in traces.cgroups() if path in self._cgroups or any(i in path for i in self.ids)}
        sockets = self._listening & traces.listening_sockets()
        return [*(f"listening socket {inode}" for inode in sockets), *(f"cgroup {path}" for path in cgroups)]

    def destroy(self) -> None:
        """Kills what is left, so that a failing test does not disturb the next."""
        while left := self.processes():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            for pid in left:
                wait_for_end(pid, timeout_s=CLEAN_S)
        self.process.wait()
        for lines in self._streams.values():
            lines.to_end()


class Gate:
    """Where programs wait until a test lets them through. See `PASS_GATE`.

    Args:
        path: path of the named pipe that is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        os.mkfifo(path)
        # For reading too, so that neither end waits for the other to come.
        self._descriptor = os.open(path, os.O_RDWR)

    def let_through(self, count: int) -> None:
        """Lets so many processes through."""
        os.write(self._descriptor, b"." * count)

    def close(self) -> None:
        """Takes the gate away."""
        os.close(self._descriptor)
        os.unlink(self.path)


#: What a job may put into /dev/shm: dsrun's own files, torch's, those of Python's `multiprocessing` (its semaphores
#: too), NCCL's, and the tests'. Other programs of the machine have theirs there.
_SEGMENTS = re.compile(r"dsrun|torch_|psm_|sem\.|pym-|nccl-|fault-matrix")
#: Users whose jobs tests start: their own, and one whom the machine does not know.
STRANGER = 100_000 + os.getpid()
_OWNERS = (os.geteuid(), STRANGER)
#: Files that tests plant, with the number of the process.
_PLANTED = re.compile(r"/dev/shm/(?:fault-matrix(\d+)|(?:torch|psm)_(\d+)_oracle)$")
#: Copies in memory of a job, whose number stands in the name.
_COPIES = re.compile(r"/dev/shm/dsrun-copies-(\d+-\d+-\w+)-")


@dataclass(frozen=True, slots=True)
class Places:
    """The folders of one test, made below one folder; jobs of a test share them."""

    work: Path
    temp: Path
    state: Path

    @classmethod
    def below(cls, folder: Path) -> Places:
        """Makes the folders where they are missing."""
        places = cls(folder / "work", folder / "temp", folder / "state")
        for place in (places.work, places.temp, places.state):
            place.mkdir(exist_ok=True)
        return places

    def left(self) -> set[str]:
        """What lies where a job may leave nothing; of /dev/shm what is of the kind, this user's and used by nobody.

        Torch's own cache of the user is none of the job's: importing parts of torch makes that folder.
        """
        names = (name for name in traces.names_in("/dev/shm") if _SEGMENTS.match(name))
        shared = {path for name in names if traces.owner_of(path := f"/dev/shm/{name}") in _OWNERS}
        shared -= traces.in_use("/dev/shm/")
        found = traces.files_in(self.work, self.temp) | shared
        # Of this process's own tests: others that run beside it plant files to see that they are found.
        theirs = {
            path for path in shared if (planted := _PLANTED.match(path)) and str(os.getpid()) not in planted.groups()
        }
        theirs |= {path for path in found if (copies := _COPIES.match(path)) and not self._is_ours(copies[1])}
        return {path for path in found - theirs if "/torchinductor_" not in path}

    def _is_ours(self, job: str) -> bool:
        return (self.state / "dsrun" / "jobs" / job).exists()


def _settled(places: Places, before: set[str]) -> set[str]:
    """Returns what is new in the places of a job that is gone.

    A semaphore of another program, whose process has ended, is nobody's until that program's own tracker takes it away:
    it is looked for again as long as a job's may be cleaned up.
    """
    deadline_s = time.monotonic() + CLEAN_S
    new = places.left() - before
    while any(path.startswith("/dev/shm/sem.mp-") for path in new) and time.monotonic() < deadline_s:
        time.sleep(0.1)
        new &= places.left()
    return new


@contextmanager
def launched(
    folder: Path,
    program: str | None,
    *args: str,
    words: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    prefix: Sequence[str] = (),
    terminal: Terminal | None = None,
    redirected: bool = False,
    grace_s: float = 2.0,
    keep: int | None = None,
) -> Generator[Job, None, None]:
    """Runs `dsrun ARGS train.py WORDS`, and holds it against the oracle when the block is left. See [Note: oracle].

    Args:
        folder: folder of the test.
        program: source of train.py; None where `args` name the program.
        args: options of dsrun.
        words: the script's.
        env: variables on top; None takes one away.
        prefix: words before dsrun's, like `nohup`.
        terminal: terminal in which to run dsrun; None to have stdout and stderr as pipes.
        redirected: whether stdout and stderr are pipes in the terminal too, as with `dsrun ... > log`.
        grace_s: seconds of grace, passed to dsrun as `--grace` and allowed by the oracle.
        keep: number of characters of each line that are kept, for floods of output; None for all. See `Lines`.
    """
    places = Places.below(folder)
    mark = uuid.uuid4().hex
    script = places.work / "train.py"
    if program is not None:
        script.write_text(program)
    command = [sys.executable, "-m", "dsrun", "--grace", f"{grace_s:g}s", *args, *([script.name] if program else [])]
    before = places.left()
    # A short name of the folder for temporary files: sockets lie there, whose paths may have 107 bytes.
    short = Path(tempfile.gettempdir(), f"dsrun-{mark[:12]}")
    short.symlink_to(places.temp)
    process, streams = _start(
        [*prefix, *command, *words],
        cwd=places.work,
        env=_environment(places, short, mark, env or {}),
        terminal=terminal,
        pipes=redirected or terminal is None,
        keep=keep,
    )
    job = Job(process, mark=mark, jobs=places.state / "dsrun" / "jobs", streams=streams)
    try:
        yield job
        process.wait(HARD_LIMIT_S)
        job.gone(grace_s=grace_s)
        left = [*job.left_open(), *sorted(_settled(places, before))]
        assert not left, f"left: {', '.join(left)}\n{job.said()}"
    finally:
        job.destroy()
        short.unlink()


def _start(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    terminal: Terminal | None,
    pipes: bool,
    keep: int | None,
) -> tuple[subprocess.Popen[bytes], dict[str, Lines]]:
    theirs = subprocess.DEVNULL if terminal is None else terminal.theirs
    out, err = (os.pipe(), os.pipe()) if pipes else ((-1, theirs), (-1, theirs))
    process = subprocess.Popen(
        list(command),
        cwd=cwd,
        env=dict(env),
        stdin=theirs,
        stdout=out[1],
        stderr=err[1],
        start_new_session=True,
        preexec_fn=None if terminal is None else terminal.enter,
    )
    if terminal is not None:
        terminal.started()
    if pipes:
        os.close(out[1])
        os.close(err[1])
        return process, {"stdout": lines_of(out[0], keep=keep), "stderr": lines_of(err[0], keep=keep)}
    assert terminal is not None, "without a terminal there are pipes"
    return process, {"stdout": terminal.lines}


def _environment(places: Places, temp: Path, mark: str, changes: Mapping[str, str | None]) -> dict[str, str]:
    base: dict[str, str | None] = {
        **clean_environment(),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "XDG_STATE_HOME": str(places.state),
        "TMPDIR": str(temp),
        _MARK_ENV: mark,
        **changes,
    }
    return {name: value for name, value in base.items() if value is not None}


def _runs(pid: int, module: str) -> bool:
    return any(f"{module} ".encode() in word for word in traces.words_of(pid))
