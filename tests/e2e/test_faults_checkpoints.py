"""Fault matrix, part C, as a job sees it: saves beside training that are cut short, fail, or end with the script.

What each step of a save leaves: tests/runtime/checkpoint/save/test_crashes.py, test_killed_saves.py and test_saver.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.tags import complete_tags, latest_tag
from support.faults import HARD_LIMIT_S, launched
from support.many_hosts import launched_on_hosts
from support.namespaces import hosts, why_no_hosts

pytestmark = pytest.mark.timeout(HARD_LIMIT_S + 30)

#: Saves after each step, beside training; `THEN` comes after the save of each step, with its number in `step`.
PROGRAM = """
import os, resource, signal, sys, psutil, torch, dsrun
from torch import nn
torch.manual_seed(7)
engine, *_ = dsrun.initialize(model=nn.Sequential(nn.Linear(256, 2048), nn.Linear(2048, 256)), config={
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 2},
})
rank = engine.global_rank

def fill_disk():
    (writer,) = [p for p in psutil.Process().children() if "writer.main" in " ".join(p.cmdline())]
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))

while engine.global_steps < 6:
    loss = engine(torch.randn(2, 256)).square().mean()
    engine.backward(loss)
    engine.step()
    step = engine.global_steps
    engine.save_checkpoint(sys.argv[1])
    THEN
print("all steps were taken")
"""


def whole_tags(folder: Path) -> list[str]:
    tags = complete_tags(folder)
    for tag in tags:
        assert list(verify(folder / tag, read_index(folder / tag))) == []
    return tags


def test_C3_C19_a_rank_killed_while_its_checkpoint_is_written_leaves_the_ones_before(tmp_path: Path) -> None:
    program = PROGRAM.replace("THEN", "if step == 4 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    with launched(tmp_path, program, "-n", "2", words=[str(tmp_path / "checkpoints")]) as job:
        ended = job.end()
    assert ended.exit_code == 137, ended.text
    tags = whole_tags(tmp_path / "checkpoints")
    assert tags[:3] == ["global_step1", "global_step2", "global_step3"]
    assert latest_tag(tmp_path / "checkpoints") == tags[-1]


def test_C19_the_end_of_a_script_waits_for_its_last_checkpoint(tmp_path: Path) -> None:
    with launched(tmp_path, PROGRAM.replace("THEN", "pass"), "-n", "2", words=[str(tmp_path / "checkpoints")]) as job:
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    assert whole_tags(tmp_path / "checkpoints") == [f"global_step{step}" for step in range(1, 7)]
    assert len([line for line in ended.out if "saved" in line]) == 6


def test_C6_a_last_checkpoint_that_failed_is_an_exit_code(tmp_path: Path) -> None:
    # The limit comes before the last save; nothing asks for what became of it.
    program = PROGRAM.replace("THEN", "if step == 5: engine.wait_for_checkpoint(); rank == 0 and fill_disk()")
    with launched(tmp_path, program, "-n", "2", words=[str(tmp_path / "checkpoints")]) as job:
        ended = job.end()
    assert ended.exit_code == 1, ended.text
    assert "all steps were taken" in ended.text
    assert re.search(
        r"global_step6: could not be saved, nothing was published: rank 0: \S+/global_step6/rank-00000-\w+"
        r"\.safetensors: cannot be written: File too large",
        ended.text,
    )
    assert whole_tags(tmp_path / "checkpoints") == [f"global_step{step}" for step in range(1, 6)]
    assert not (tmp_path / "checkpoints" / "global_step6").exists()


def test_C6_training_goes_on_after_a_checkpoint_that_failed(tmp_path: Path) -> None:
    program = PROGRAM.replace("THEN", "if step == 2: engine.wait_for_checkpoint(); rank == 1 and fill_disk()").replace(
        "    engine.save_checkpoint(sys.argv[1])",
        """    if step in (2, 3, 6):
        engine.save_checkpoint(sys.argv[1])
    if step == 3:
        try:
            engine.wait_for_checkpoint()
        except dsrun.errors.CheckpointError as error:
            print("met", error)
        for child in psutil.Process().children():
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))""",
    )
    with launched(tmp_path, program, "-n", "2", words=[str(tmp_path / "checkpoints")]) as job:
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    said = re.compile("met .*rank 1: .*rank-00001-.*: cannot be written: File too large")
    assert len([line for line in ended.out if said.search(line)]) == 2
    assert whole_tags(tmp_path / "checkpoints") == ["global_step2", "global_step6"]


#: Every block that rank 0 writes takes 6 s, longer in all than a rank may be silent; 72 MiB a rank.
SLOW = """
import os, sys, threading, dsrun
dsrun.heartbeat(phase="start")
from dsrun.checkpoint_files.storage.calls import FileCalls
import torch
from torch import nn
if os.environ["RANK"] == "0":
    write = FileCalls.write
    FileCalls.write = lambda *args: (threading.Event().wait(6), write(*args))[1]
engine, *_ = dsrun.initialize(model=nn.Linear(3072, 4096), config={
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "checkpoint": {"asynchronous": False},
})
engine.backward(engine(torch.randn(1, 3072)).square().mean())
engine.step()
engine.save_checkpoint(sys.argv[1])
"""


@pytest.mark.depends_on_speed("a hang time-out of 15 s")
def test_C21_a_disk_that_takes_longer_than_a_rank_may_be_silent_is_no_hang(tmp_path: Path) -> None:
    words = ("-n", "2", "--hang-timeout", "15s", "--on-hang", "stop")
    with launched(tmp_path, SLOW, *words, words=[str(tmp_path / "checkpoints")]) as job:
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    assert job.events("hang") == []
    (saved,) = [line for line in ended.out if "saved" in line]
    assert float(saved.rpartition(", ")[2].split()[0]) > 15, "it was as slow as that"
    assert whole_tags(tmp_path / "checkpoints") == ["global_step1"]


#: The process that writes for rank 1 stands still from the second save on, and then rank 1 is killed.
LEAVES_A_SAVE_PENDING = PROGRAM.replace(
    "    engine.save_checkpoint(sys.argv[1])",
    """    if step == 2 and rank == 1:
        engine.wait_for_checkpoint()
        (writer,) = [p for p in psutil.Process().children() if "writer.main" in " ".join(p.cmdline())]
        writer.suspend()
    engine.save_checkpoint(sys.argv[1])""",
).replace(
    "THEN",
    """if step == 2:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.wait_for_checkpoint()""",
)


@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
def test_C3_a_rank_of_another_host_killed_while_its_part_is_pending_ends_the_job_and_publishes_nothing(
    tmp_path: Path,
) -> None:
    with hosts(2, tmp_path) as rig:
        folder = rig.folder / "checkpoints"
        with launched_on_hosts(rig, rig.folder, LEAVES_A_SAVE_PENDING, words=[str(folder)]) as job:
            ended = job.end()
        assert ended.exit_code == 137, ended.text
        assert whole_tags(folder) == ["global_step1"]
        assert latest_tag(folder) == "global_step1"
