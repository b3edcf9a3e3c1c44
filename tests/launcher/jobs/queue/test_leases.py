from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dsrun.launcher.jobs.queue.leases import Claim, ClaimFolder, remove_idle, safe_name

HOLD = """
import sys
from pathlib import Path
from dsrun.launcher.jobs.queue.leases import ClaimFolder
folder = ClaimFolder(Path(sys.argv[1]))
with folder.deciding():
    folder.claim("GPU-0", {"pid": 1})
print("held", flush=True)
sys.stdin.read()
"""
#: Takes the first free of ten names, or none, and says which; then waits for the end of its stdin.
COMPETE = """
import sys
from pathlib import Path
from dsrun.launcher.jobs.queue.leases import ClaimFolder
folder = ClaimFolder(Path(sys.argv[1]))
taken = []
for _ in range(10):
    with folder.deciding(patience_s=60):
        held = {claim.name for claim in folder.others(clean=True)} | set(taken)
        free = [f"slot-{n}" for n in range(10) if f"slot-{n}" not in held]
        if free:
            folder.claim(free[0], {})
            taken.append(free[0])
print(*taken, flush=True)
sys.stdin.read()
"""


def start(program: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_claim_is_seen_by_others_until_it_is_dropped(tmp_path: Path) -> None:
    mine, other = ClaimFolder(tmp_path / "a"), ClaimFolder(tmp_path / "a")
    mine.claim("GPU-0", {"job_id": "x"})
    assert other.others() == [Claim(name="GPU-0", content={"job_id": "x"})]
    assert mine.others() == []
    mine.drop("GPU-0")
    assert other.others() == []
    assert os.listdir(tmp_path / "a") == []


def test_claims_are_private_and_readable_by_hand(tmp_path: Path) -> None:
    folder = ClaimFolder(tmp_path / "a" / "b")
    folder.claim("GPU-0", {"job_id": "x", "pid": 3})
    file = tmp_path / "a" / "b" / "GPU-0"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert json.loads(file.read_text()) == {"job_id": "x", "pid": 3}
    folder.drop_all()


def test_a_claim_ends_with_its_holder_however_it_ends(tmp_path: Path) -> None:
    folder = ClaimFolder(tmp_path)
    with start(HOLD, tmp_path) as holder:
        assert first_line(holder) == "held"
        assert [claim.name for claim in folder.others()] == ["GPU-0"]
        holder.kill()
    assert folder.others() == []
    assert (tmp_path / "GPU-0").exists(), "only who decides may clean"
    with folder.deciding():
        assert folder.others(clean=True) == []
    assert not (tmp_path / "GPU-0").exists()


def test_processes_that_take_at_once_never_get_the_same(tmp_path: Path) -> None:
    competitors = [start(COMPETE, tmp_path) for _ in range(4)]
    taken = [name for process in competitors for name in first_line(process).split()]
    for process in competitors:
        process.communicate()
    assert sorted(taken) == [f"slot-{n}" for n in range(10)]


def test_what_a_dead_process_wrote_half_is_removed(tmp_path: Path) -> None:
    folder = ClaimFolder(tmp_path)
    (tmp_path / ".GPU-0.123").write_text("{")
    (tmp_path / "GPU-1").write_text("")
    assert folder.others() == []
    with folder.deciding():
        assert folder.others(clean=True) == []
    assert os.listdir(tmp_path) == [".deciding"]


def test_a_decision_that_another_does_not_finish_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    one, other = ClaimFolder(tmp_path), ClaimFolder(tmp_path)
    with one.deciding(), pytest.raises(TimeoutError), other.deciding(patience_s=0.05):
        raise AssertionError("decided by two")
    with other.deciding(patience_s=0.0):
        pass


@pytest.mark.parametrize(
    ("name", "file"),
    [("GPU-1.job-2", "GPU-1.job-2"), ("../x", "_x"), ("a/b", "a_b"), ("MIG-GPU-1/2/3", "MIG-GPU-1_2_3"), ("..", "_")],
)
def test_a_name_is_a_file_of_the_folder(name: str, file: str) -> None:
    assert safe_name(name) == file


def test_folders_in_which_nothing_happened_for_a_month_go(tmp_path: Path) -> None:
    month_s = 31 * 24 * 3600.0
    for name in ("old", "own", "held", "other"):
        folder = ClaimFolder(tmp_path / name)
        if name == "other":
            continue
        with folder.deciding():
            pass
    (tmp_path / "held" / "GPU-0.job").touch()
    (tmp_path / "file").touch()
    remove_idle(tmp_path, keep="own")
    assert {path.name for path in tmp_path.iterdir()} == {"old", "own", "held", "other", "file"}
    remove_idle(tmp_path, keep="own", now_s=(tmp_path / "old").stat().st_mtime + month_s)
    assert {path.name for path in tmp_path.iterdir()} == {"own", "held", "other", "file"}
