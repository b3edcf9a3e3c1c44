"""Fault matrix, part A: jobs in each other's way, and what an earlier kill left behind.

See test_faults_process.py. Of A34 only the user's side applies: dsrun compiles nothing, so there is no build that a
kill could interrupt, and no lock that the next start could wait for.
"""

from __future__ import annotations

import re
import select
import socket
from pathlib import Path

import pytest

from support.faults import HARD_LIMIT_S, READY, launched
from support.faults_training import UNDISTURBED, losses_said, undisturbed_losses

pytestmark = pytest.mark.timeout(HARD_LIMIT_S + 30)

GRACE_S = 1.0

#: Meets the others, and says where.
MEETS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(value)
print("sum", int(value), "port", os.environ["MASTER_PORT"])
dist.barrier()
dist.destroy_process_group()
"""


def test_A21_a_master_port_that_another_process_has_is_neither_used_nor_joined(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with launched(tmp_path, MEETS, "-n", "2", env=env) as job:
            ended = job.end()
        assert ended.exit_code == 0, ended.text
        said = {line.partition("] ")[2] for line in ended.out}
        assert len(said) == 1
        match = re.fullmatch(r"sum 3 port (\d+)", said.pop())
        assert match is not None
        assert int(match[1]) != port
        # Nobody has even tried to connect.
        assert select.select([foreign], [], [], 0)[0] == []


def test_A22_two_jobs_with_the_same_settings_at_once_both_finish_with_the_right_losses(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    one, other = (launched(folder, UNDISTURBED, "-n", "2", words=["-"], env=env) for folder in folders)
    with one as first, other as second:
        ends = [first.end(), second.end()]
    assert [ended.exit_code for ended in ends] == [0, 0], ends[0].text + ends[1].text
    expected = undisturbed_losses()
    assert [losses_said(ended.out) for ended in ends] == [expected, expected]


#: Takes a step with an engine.
ENGINE = f"""
import torch, dsrun
from torch import nn
engine, *_ = dsrun.initialize(model=nn.Linear(8, 4), config={{
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 0.1}}}},
    "zero_optimization": {{"stage": 3}},
}})
{READY}
engine.backward(engine(torch.ones(2, 8)).square().mean())
engine.step()
engine.destroy()
"""


def test_A34_nothing_is_built_at_first_use_so_a_kill_in_it_hinders_no_later_start(tmp_path: Path) -> None:
    caches = tmp_path / "caches"
    names = ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    # And no compiler to be found.
    env = {name: str(caches / name) for name in names} | {"PATH": str(tmp_path)}
    with launched(tmp_path, ENGINE, "-n", "2", env=env, grace_s=GRACE_S) as job:
        job.wait_ready(2)
        job.process.kill()
        job.gone(grace_s=GRACE_S)
    with launched(tmp_path, ENGINE, "-n", "2", env=env, grace_s=GRACE_S) as job:
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    # torch makes a folder or two; what is in them would be a build, or its lock.
    assert [path for path in caches.rglob("*") if path.is_file()] == []
