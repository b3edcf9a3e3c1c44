"""Under a umask that takes nothing, what dsrun makes for a job is this user's alone, while it runs and afterwards."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.cli import clean_environment, start_dsrun
from support.processes import job_processes, kill_left, wait_until_gone

pytestmark = pytest.mark.timeout(90)
DEADLINE_S = 60.0

#: Both ranks say that they run, and go on once the test has put a file down.
STAY = """
import pathlib, time
import dsrun.contract.heartbeats
dsrun.contract.heartbeats.heartbeat(step=1)
print("up", flush=True)
while not pathlib.Path("end").exists():
    time.sleep(0.02)
"""


def modes(folders: list[Path]) -> Iterator[tuple[str, int]]:
    """Everything in some folders, they too, with its mode."""
    for folder in folders:
        yield str(folder), folder.stat().st_mode
        for above, names, files in os.walk(folder):
            for name in (*names, *files):
                path = os.path.join(above, name)
                yield path, os.lstat(path).st_mode


def memory_files(job_id: str) -> Iterator[tuple[str, int]]:
    """Nameless files in memory that processes of a job have open, with their modes."""
    for pid in job_processes(job_id):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if (name := os.readlink(entry)).startswith("/memfd:dsrun"):
                    yield f"{name} of {pid}", entry.stat().st_mode
            except FileNotFoundError:
                continue


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Generator[None]:
    """Kills a process that still runs at the end of the block."""
    try:
        yield
    finally:
        process.kill()


def offenders(found: Iterator[tuple[str, int]]) -> list[str]:
    """What others may use, by name and mode; links have no mode of their own."""
    return [f"{name} {stat.filemode(mode)}" for name, mode in found if mode & 0o077 and not stat.S_ISLNK(mode)]


def test_a_detached_job_under_umask_000_keeps_all_of_its_files_private(tmp_path: Path) -> None:
    work = tmp_path / "work"
    own = [tmp_path / name for name in ("state", "runtime", "tmp")]
    for folder in (work, *own):
        folder.mkdir(mode=0o700)
    (work / "stay.py").write_text(STAY)
    shared = Path("/dev/shm")
    before = set(shared.iterdir())
    state, runtime, temporary = map(str, own)
    env = clean_environment(
        XDG_STATE_HOME=state, XDG_RUNTIME_DIR=runtime, TMPDIR=temporary, CUDA_VISIBLE_DEVICES="", HOME=str(tmp_path)
    )
    words = ["run", "-d", "-n", "2", "--start", "exec", "--max-restarts", "1", "stay.py"]
    with start_dsrun(*words, cwd=work, env=env, before="umask 000") as starting:
        out, err = starting.communicate(timeout=DEADLINE_S)
    assert starting.returncode == 0, err.decode()
    job_id = out.decode().strip()
    try:
        with start_dsrun("logs", job_id, "-f", cwd=work, env=env) as following, ended(following):
            assert following.stdout is not None
            assert {following.stdout.readline() for _ in range(2)} == {b"[0] up\n", b"[1] up\n"}
            in_memory = [path for path in set(shared.iterdir()) - before if job_id in path.name]
            assert in_memory, "the agent holds copies in memory"
            memory = list(memory_files(job_id))
            assert memory, "the agent has a table of heartbeats"
            assert offenders(iter([*modes([*own, *in_memory]), *memory])) == []
            (work / "end").touch()
            following.communicate(timeout=DEADLINE_S)
        assert wait_until_gone(job_id, timeout_s=DEADLINE_S) == []
    finally:
        (work / "end").touch()
        kill_left(job_id)
    assert offenders(modes(own)) == []
