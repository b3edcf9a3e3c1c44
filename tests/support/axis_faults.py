"""One rank of eight on three axes, pipe x data x tensor, that stalls, is killed or raises; and what must be said of it.

The rank comes to a place in its third update and stays there. What then happens to it is one of `HOW`. All others
come to wait for it, through neighbours that wait themselves: nobody but that rank may be blamed.
"""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsrun.launcher.jobs.live_status import read_live
from support.faults import BEATING, HARD_LIMIT_S, Bound, Ended, Gate, Job, launched

RANKS = 8
GRACE_S = 1.0
#: Of the whole time without progress, from the last beat.
TIMEOUT_S = 5.0
HANG = Bound(TIMEOUT_S + 5 + GRACE_S, TIMEOUT_S + 30 + GRACE_S)
DEAD_RANK = Bound(5 + GRACE_S, 20 + GRACE_S)

How = Literal["never returns", "SIGSTOP", "SIGKILL", "raises"]
HOW: tuple[How, ...] = ("never returns", "SIGSTOP", "SIGKILL", "raises")
#: Places of a fault, and what the rank says it does there; None for the script's own code.
PLACES = {
    "forward": "forward of micro batch 0 of chunk {pipe}",
    "backward": "backward of micro batch 0 of chunk {pipe}",
    "optimizer": "step",
    "save": "save checkpoint",
    "loader": None,
    "script": None,
}

#: Behind `BEATING`: trains for ever, and says `ready` after two updates. Words: the place; the rank; a gate, behind
#: which the rank raises; and the folder of checkpoints.
GRID = """
import os, sys
import torch
from torch import nn
torch.set_num_threads(1)
place, rank, gate, checkpoints = sys.argv[1:]
def come_to(here):
    if has_started.is_set() and here == place and os.environ["RANK"] == rank:
        compute_for_ever()
def compute_for_ever():
    open(gate, "rb", 0).read(1)
    raise ValueError("no more data")
class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        come_to("backward")
        return grad
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
    def forward(self, x):
        come_to("forward")
        return x + Late.apply(self.down(self.up(x).relu()))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
class LateSGD(torch.optim.SGD):
    def step(self, *args, **kwargs):
        come_to("optimizer")
        return super().step(*args, **kwargs)
def batches():
    while True:
        come_to("loader")
        yield torch.ones(2, 8)
class LateScheduler(torch.optim.lr_scheduler.LambdaLR):
    def state_dict(self):
        come_to("save")
        return super().state_dict()
torch.manual_seed(0)
engine, *_ = dsrun.initialize(model=Model(), optimizer=lambda params: LateSGD(params, lr=0.01),
                              lr_scheduler=lambda optimizer: LateScheduler(optimizer, lambda step: 1.0), config={
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
    "pipeline": {"stages": 2},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [
        {"patterns": r".*\\.up\\.(weight|bias)", "partition_type": "column"},
        {"patterns": r".*\\.down\\.(weight|bias)", "partition_type": "row"},
    ]}},
})
data = batches()
while True:
    if engine.global_steps == 2:
        stop_beating()
        sys.stdout.write(f"ready {os.getpid()}\\n")
        sys.stdout.flush()
        come_to("script")
        if place == "save":
            engine.save_checkpoint(checkpoints)
    engine.train_batch(data)
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one rank.

    Attributes:
        how: kind of the fault.
        place: place in the program, one of `PLACES`.
        rank: number of the rank.
    """

    how: How
    place: str
    rank: int

    @property
    def coordinate(self) -> str:
        """The rank's place on the axes."""
        return f"pipe {self.rank // 4}, data {self.rank // 2 % 2}, tensor {self.rank % 2}"

    @property
    def action(self) -> str | None:
        """What the rank says it does."""
        said = PLACES[self.place]
        return None if said is None else said.format(pipe=self.rank // 4)

    def run(self, folder: Path) -> Ended:
        """Runs the job to its end, which the fault is the reason for, and checks what is said of the rank."""
        hangs = self.how in ("never returns", "SIGSTOP")
        args = ("--hang-timeout", f"{TIMEOUT_S:g}s", "--on-hang", "stop") if hangs else ()
        gate = Gate(folder / "gate")
        words = [self.place, str(self.rank), gate.path, str(folder / "checkpoints")]
        with launched(folder, BEATING + GRID, "-n", str(RANKS), *args, words=words, grace_s=GRACE_S) as job:
            pids = job.wait_ready(RANKS)
            if self.how != "never returns":
                self._wait_for_waits(job)
            with (HANG if hangs else DEAD_RANK).on("the end of all ranks"):
                if self.how == "raises":
                    gate.let_through(1)
                elif self.how != "never returns":
                    job.kill(pids[self.rank], signal.Signals[self.how])
                ended = job.end()
                job.gone()
        gate.close()
        self._check(ended, pids[self.rank])
        return ended

    def _wait_for_waits(self, job: Job) -> None:
        """Returns when each other rank waits, and has for a second."""
        deadline_s = time.monotonic() + HARD_LIMIT_S
        waiting: set[int] = set()
        while waiting != set(range(RANKS)) - {self.rank}:
            assert time.monotonic() < deadline_s, f"only {waiting} wait\n{job.said()}"
            time.sleep(0.1)
            live = read_live(job.folder)
            ranks = () if live is None else live.ranks
            waiting = {rank.rank for rank in ranks if rank.collective and (rank.idle_s or 0) >= 1}

    def _check(self, ended: Ended, pid: int) -> None:
        who = f"rank {self.rank} ({self.coordinate})"
        during = f" during {self.action}" if self.action else ""
        verdict = ended.errors[0]
        match self.how:
            case "never returns" | "SIGSTOP":
                is_stopped = self.how == "SIGSTOP"
                does = r"is stopped \(.*?\)" if is_stopped else r"is in compute_for_ever \(train\.py:\d+\)"
                blamed = rf"error: no progress for \S+: {re.escape(who)} {does}{during}, (.*)"
                assert ended.exit_code == 76, ended.text
                told = re.fullmatch(blamed, verdict)
                assert told, verdict
                assert not re.search(r"\b(is|are|goes|go) ", told[1]), verdict
            case "SIGKILL":
                assert ended.exit_code == 137, ended.text
                assert verdict == f"error: {who} on localhost (pid {pid}) was killed by SIGKILL", ended.text
            case "raises":
                assert ended.exit_code == 1, ended.text
                # On its way out it may be stopped: others that saw it go may be gone before.
                assert verdict.startswith(f"error: {who} on localhost (pid {pid}) "), ended.text
                assert verdict.endswith((" exited with code 1", " failed")), ended.text
                assert "  ValueError: no more data" in ended.err, ended.text
        if self.how in ("SIGKILL", "raises") and self.action:
            assert f"  it was in {self.action}, after step 2" in ended.err, ended.text
