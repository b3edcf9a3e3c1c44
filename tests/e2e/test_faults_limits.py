"""Fault matrix, part A: users and machines that are short of something. See test_faults_process.py."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.faults import HARD_LIMIT_S, PASS_GATE, READY, STRANGER, WAIT, Bound, Gate, Places, launched

pytestmark = pytest.mark.timeout(HARD_LIMIT_S + 30)

GRACE_S = 1.0
DEAD_RANK = Bound(5 + GRACE_S, 20 + GRACE_S)
TWO_RANKS = ("-n", "2", "--start", "exec")
#: Meets the others, over torch.
MEETS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


def test_A29_with_64_descriptors_a_small_job_runs(tmp_path: Path) -> None:
    with launched(tmp_path, READY, *TWO_RANKS, prefix=["prlimit", "--nofile=64:64"]) as job:
        assert job.end().exit_code == 0


def test_A29_with_64_descriptors_a_large_job_is_refused_in_one_line(tmp_path: Path) -> None:
    args = ("-q", "-n", "60", "--start", "exec")
    with launched(tmp_path, READY, *args, prefix=["prlimit", "--nofile=64:64"]) as job:
        ended = job.end()
    assert ended.exit_code == 74
    assert len(ended.err) == 1
    assert "too many open files" in ended.err[0]
    assert "ulimit -n" in ended.err[0]


@pytest.fixture
def stranger(tmp_path: Path) -> list[str]:
    """Words that run a command as a user whom the machine does not know, and who has no other process."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("A29 needs root and setpriv: limits on processes do not hold for root, so another user is needed")
    places = Places.below(tmp_path)
    for folder in (places.work, places.temp, places.state):
        os.chown(folder, STRANGER, STRANGER)
    uid = str(STRANGER)
    # That user may read whatever root may, or the interpreter itself might be out of reach.
    see = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *see]


_BETWEEN = pytest.mark.soak("the limits below and above it")


@pytest.mark.parametrize(
    "limit",
    [1, pytest.param(4, marks=_BETWEEN), 7, pytest.param(8, marks=_BETWEEN), 9, pytest.param(16, marks=_BETWEEN)],
)
def test_A29_with_few_processes_allowed_a_job_runs_or_is_refused_in_one_line(
    tmp_path: Path, stranger: list[str], limit: int
) -> None:
    prefix = [*stranger, "prlimit", f"--nproc={limit}:{limit}"]
    with launched(tmp_path, READY, *TWO_RANKS, "-q", prefix=prefix, grace_s=GRACE_S) as job:
        ended = job.end()
    if ended.exit_code:
        assert len(ended.errors) == 1, ended.text
        assert "resource temporarily unavailable; raise `ulimit -u`" in ended.errors[0]
    else:
        assert sorted(line.split()[1] for line in ended.out) == ["ready", "ready"]


def test_A29_without_home_a_job_runs_where_a_folder_is_named(tmp_path: Path) -> None:
    env = {"HOME": None, "XDG_STATE_HOME": None}
    log_dir = str(tmp_path / "state" / "dsrun" / "jobs")
    with launched(tmp_path, READY, *TWO_RANKS, "--log-dir", log_dir, env=env) as job:
        assert job.end().exit_code == 0


def test_A29_without_any_home_the_way_out_is_named_in_one_line(tmp_path: Path, stranger: list[str]) -> None:
    env = {"HOME": None, "XDG_STATE_HOME": None}
    with launched(tmp_path, READY, *TWO_RANKS, env=env, prefix=stranger) as job:
        ended = job.end()
    assert ended.exit_code == 2
    assert len(ended.errors) == 1
    assert "XDG_STATE_HOME" in ended.text


def test_A29_a_temporary_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, MEETS, "-n", "2", env={"TMPDIR": "/proc"}) as job:
        assert job.end().exit_code == 0


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A control group without a limit yet.

    Attributes:
        folder: where the kernel shows it.
        limit: name of the file that limits it.
        usage: name of the file that says what it has.
    """

    folder: Path
    limit: str
    usage: str

    @property
    def prefix(self) -> list[str]:
        """Words that run a command in it."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    def leave_bytes(self, more_bytes: int) -> None:
        """Limits it to what it has now and so much more."""
        used_bytes = int((self.folder / self.usage).read_text())
        (self.folder / self.limit).write_text(str(used_bytes + more_bytes))


@pytest.fixture
def memory_cgroup() -> Iterator[MemoryCgroup]:
    """A memory cgroup, which is gone afterwards."""
    name = f"fault-matrix-{uuid.uuid4().hex[:8]}"
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    unified = (v2 / "cgroup.controllers").exists() and "memory" in (v2 / "cgroup.subtree_control").read_text().split()
    if os.geteuid() != 0:
        pytest.skip("A30 needs root: a memory cgroup has to be made for the job")
    if not unified and not (v1 / "memory.limit_in_bytes").exists():
        pytest.skip("A30 needs a memory controller: neither cgroup v2's nor v1's is mounted here")
    files = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    group = MemoryCgroup((v2 if unified else v1) / name, *files)
    try:
        group.folder.mkdir()
    except OSError as error:
        pytest.skip(f"A30 needs a memory cgroup of its own: {error}")
    yield group
    group.folder.rmdir()


#: Rank 1 takes ever more memory, 10 MB at a time, once the gate is opened.
HUNGRY = f"{READY}{PASS_GATE}kept = []\nwhile os.environ['RANK'] == '1': kept.append(b'x' * 10_000_000)\n{WAIT}"


@pytest.mark.depends_on_speed("the bound DEAD_RANK")
def test_A30_a_rank_killed_by_its_memory_cgroup_gives_137_and_the_cgroup_is_named(
    tmp_path: Path, memory_cgroup: MemoryCgroup, gate: Gate
) -> None:
    words = [gate.path]
    with launched(tmp_path, HUNGRY, *TWO_RANKS, words=words, prefix=memory_cgroup.prefix, grace_s=GRACE_S) as job:
        pids = job.wait_ready(2)
        # What a job has until then depends on the build of torch, and its spawner may import torch still, which is 300
        # MiB with CUDA's libraries. The kernel ends whoever has most: that is the rank once it took more than that.
        memory_cgroup.leave_bytes(800 << 20)
        with DEAD_RANK.on("the end of all ranks"):
            gate.let_through(2)
            ended = job.end()
    assert ended.exit_code == 137
    assert f"rank 1 on localhost (pid {pids[1]})" in ended.errors[0]
    assert re.search(r"out of memory: the limit of [0-9.]+ [MG]iB of the control group /", ended.errors[0]), ended.text
