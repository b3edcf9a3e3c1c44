"""Scripts and dsrun itself below mpirun, torchrun and srun: every process is one rank, and none starts others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import clean_environment, run_dsrun

pytestmark = pytest.mark.timeout(120)
_MPIRUN = shutil.which("mpirun")
needs_mpirun = pytest.mark.skipif(_MPIRUN is None, reason="needs mpirun: apt-get install openmpi-bin")

#: Trains a step at stage 2, and says who this rank is and what became of the weights.
TRAIN = """
import sys, torch, dsrun
torch.manual_seed(7)
engine, *_ = dsrun.initialize(model=torch.nn.Linear(4, 1))
rank = engine.global_rank
engine.backward((engine(torch.full((2, 4), rank + 1.0))).square().mean())
engine.step()
weight = sum(p.sum().item() for p in engine.module.parameters())
sys.stdout.write(f"rank {rank} of {engine.world_size} {weight:.9f}\\n")
engine.destroy()
"""
#: Says the same without torch, and what it was given.
WHO = """
import os, sys
from dsrun.contract.environment import RankInfo
info = RankInfo.from_env()
given = [*sys.argv[1:], os.environ["MINE"], os.path.basename(os.environ["DSRUN_CONFIG"])]
sys.stdout.write(f"rank {info.rank} of {info.world_size} {info.local_rank} {' '.join(given)}\\n")
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
    "zero_optimization": {"stage": 2},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "who.py").write_text(WHO)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    return clean_environment(OMP_NUM_THREADS="1", XDG_STATE_HOME=str(folder / "state"), CUDA_VISIBLE_DEVICES="")


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=100)


def mpirun(*words: str) -> list[str]:
    assert _MPIRUN is not None
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # Its own shared memory and network are not what is tested.
    return [_MPIRUN, *as_root, "--oversubscribe", "--mca", "btl", "self", "-n", "2", *words]


def ranks_in(out: str) -> list[str]:
    return sorted(line for line in out.splitlines() if line.startswith("rank "))


@needs_mpirun
def test_a_script_trains_below_mpirun_as_it_does_below_dsrun(folder: Path) -> None:
    plain = run(mpirun("-x", "DSRUN_CONFIG=ds.json", sys.executable, "train.py"), folder)
    assert plain.returncode == 0, plain.stderr
    done = run_dsrun(
        *("-n", "2", "-q", "--config", "ds.json", "train.py"), cwd=folder, env=environment(folder), timeout_s=100
    )
    assert done.exit_code == 0, done.stderr
    below_dsrun = ranks_in("\n".join(line.partition("] ")[2] for line in done.stdout.splitlines()))
    assert [line.split()[:4] for line in below_dsrun] == [["rank", rank, "of", "2"] for rank in "01"]
    assert ranks_in(plain.stdout) == below_dsrun


#: What stands behind the other launcher.
DSRUN = [sys.executable, "-m", "dsrun", "--config", "ds.json", "--env", "MINE=1", "who.py", "--lr", "2"]
RANKS = ["rank 0 of 2 0 --lr 2 1 ds.json", "rank 1 of 2 1 --lr 2 1 ds.json"]


@needs_mpirun
def test_dsrun_below_mpirun_is_one_rank_each(folder: Path) -> None:
    done = run(mpirun(*DSRUN), folder)
    assert done.returncode == 0, done.stderr
    assert ranks_in(done.stdout) == RANKS
    assert done.stderr.count("dsrun: Open MPI started 2 ranks") == 1
    assert not (folder / "state").exists(), "no job of dsrun's own"


@needs_mpirun
def test_what_is_wrong_is_found_below_mpirun_too(folder: Path) -> None:
    done = run(mpirun(sys.executable, "-m", "dsrun", "--config", "none.json", "trian.py"), folder)
    assert done.returncode == 2
    assert "none.json" in done.stderr
    assert "did you mean" in done.stderr


def test_dsrun_below_torchrun_is_one_rank_each(folder: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = run([*launcher, *DSRUN], folder)
    assert done.returncode == 0, done.stderr
    assert ranks_in(done.stdout) == RANKS
    assert done.stderr.count("dsrun: torchrun started 2 ranks") == 1


def test_a_rank_of_dsrun_that_runs_dsrun_starts_a_job_of_its_own(folder: Path) -> None:
    inner = "import os; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    (folder / "inner.py").write_text(inner)
    words = [sys.executable, "-m", "dsrun", "-q", "--start", "exec", "inner.py"]
    (folder / "outer.py").write_text(f"import subprocess, sys; subprocess.run({words!r}, check=True)")
    done = run_dsrun("-n", "2", "-q", "--start", "exec", "outer.py", cwd=folder, env=environment(folder), timeout_s=100)
    assert done.exit_code == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] [0] 0 of 1", "[1] [0] 0 of 1"]
