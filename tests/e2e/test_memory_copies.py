"""Jobs that are started again go on from memory: kill -9 of a rank, loss of a host's memory, and nothing is left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faults import HARD_LIMIT_S, launched
from support.faults_training import STEPS, TRAIN, losses_said, true_losses
from support.many_hosts import launched_on_hosts
from support.namespaces import Rig, hosts, why_no_hosts

pytestmark = pytest.mark.timeout(HARD_LIMIT_S + 30)

_WHY_NOT = why_no_hosts()

#: Never saves to the disk, and copies to memory after steps 2, 4, 6 and 8.
PROGRAM = TRAIN.replace('"asynchronous": False', '"memory_copy": {"every": 2}').replace(
    # On a slow machine the next copy would be left out.
    "engine.save_checkpoint(checkpoints)",
    "engine.wait_for_checkpoint()",
)
#: Rank 1 is killed before its sixth step in the first attempt, when every rank's copy of step 4 is whole.
CRASH = """
    if attempt == 0 and step == 5:
        engine.wait_for_checkpoint()
        dist.barrier()
        if rank == 1:
            BEFORE
            os.kill(os.getpid(), signal.SIGKILL)
"""


def crash(before: str = "pass") -> str:
    """The program that crashes; `before` is what rank 1 does as its last deed."""
    return PROGRAM.replace("    CRASH\n", CRASH.replace("BEFORE", before).lstrip("\n"))


#: What a host that was started anew has of the memory that it had.
FORGET = "import shutil; shutil.rmtree(os.environ['DSRUN_MEMORY_COPY'])"


def check_losses(out: list[str], *, again: tuple[int, ...] = (4,)) -> None:
    """Every step has the loss of the undisturbed run to the last bit, and so have those that were taken again."""
    said = losses_said(out)
    assert [len(said[step]) for step in range(STEPS)] == [2 if step in again else 1 for step in range(STEPS)]
    assert all(len(set(losses)) == 1 for losses in said.values())
    for step, (loss,) in true_losses().items():
        assert said[step][0] == pytest.approx(loss, abs=1e-6)


def test_a_job_whose_rank_was_killed_goes_on_from_memory_and_leaves_nothing_there(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with launched(tmp_path, crash(), "-n", "2", "--max-restarts", "2", words=[str(folder)]) as job:
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    assert "[0] dsrun: going on from the copy in memory of step 4" in ended.out
    assert "[1] attempt 1 from 4 resume None" in ended.out
    check_losses(ended.out)
    assert not folder.exists(), "no disk was needed"


#: Waits for its end when it has copies.
STAYS = """
    if step == 5:
        engine.wait_for_checkpoint()
        print("ready", os.getpid(), flush=True)
        __import__("threading").Event().wait()
"""


def test_a_job_that_is_stopped_leaves_nothing_in_memory_either(tmp_path: Path) -> None:
    """Its agents end ranks that have failed, as where another attempt follows; the front end knows that none does."""
    program = PROGRAM.replace("    CRASH\n", STAYS.lstrip("\n"))
    with launched(tmp_path, program, "-n", "2", "--max-restarts", "2", words=["-"]) as job:
        job.wait_ready(2)
        assert list(Path("/dev/shm").glob(f"dsrun-copies-{job.folder.name}-0/rank-*"))
        job.process.send_signal(signal.SIGINT)
        ended = job.end()
    assert ended.exit_code == 130, ended.text
    assert not list(Path("/dev/shm").glob(f"dsrun-copies-{job.folder.name}-*"))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Two hosts with a rank each."""
    with hosts(2, tmp_path_factory.mktemp("hosts")) as rig:
        yield rig


@pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
def test_a_host_that_came_back_empty_is_served_by_its_neighbours_memory(rig: Rig) -> None:
    folder = rig.folder / "lost"
    folder.mkdir()
    program = crash(FORGET)
    with launched_on_hosts(rig, folder, program, "--max-restarts", "1", words=[str(folder / "none")]) as job:
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    assert "going on from the copy in memory of step 4; rank 1 from the neighbour's memory" in ended.text
    check_losses(ended.out)
