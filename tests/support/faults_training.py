"""A small run for rows of the fault matrix, and what its losses must be by plain PyTorch. See support.faults."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn

from support.ranks import run_ranks

STEPS = 8
#: Ranks of the run.
WORLD_SIZE = 2

#: Trains, saves after every second step, and says each loss to the last bit. `CRASH` is put in before each step.
#: Words: folder of the checkpoints, or `-` for none.
TRAIN = f"""
import os, signal, sys, torch, dsrun
import torch.distributed as dist
from torch import nn
checkpoints = sys.argv[1]
torch.manual_seed(7)
engine, *_ = dsrun.initialize(model=nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)), config={{
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {{"type": "SGD", "params": {{"lr": 0.02, "momentum": 0.9}}}},
    "zero_optimization": {{"stage": 2}},
    "gradient_clipping": 0.0,
    "checkpoint": {{"asynchronous": False}},
}})
if checkpoints != "-":
    engine.load_checkpoint(checkpoints, missing_ok=True)
rank, attempt = engine.global_rank, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, "from", engine.global_steps, "resume", os.environ.get("DSRUN_RESUME"))
while engine.global_steps < {STEPS}:
    step = engine.global_steps
    CRASH
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(4, 6, generator=generator)[rank * 2 : rank * 2 + 2]
    loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print("step", step, "loss", (total.item() / 2).hex())
    if checkpoints != "-" and engine.global_steps % 2 == 0:
        engine.save_checkpoint(checkpoints)
engine.destroy()
"""

#: The run that nothing befalls.
UNDISTURBED = TRAIN.replace("CRASH", "pass")


def losses_said(lines: list[str]) -> dict[int, list[float]]:
    """Every loss that rank 0 said, by step; a step that was taken again after a restart has several."""
    said: dict[int, list[float]] = {}
    for line in lines:
        # Of several hosts, a line says which it is from.
        if match := re.fullmatch(r"\[(?:[^\]:]*:)?0\] step (\d+) loss (\S+)", line):
            said.setdefault(int(match[1]), []).append(float.fromhex(match[2]))
    return said


def true_losses() -> dict[int, list[float]]:
    """The losses of `TRAIN` by plain PyTorch in this process, on the whole batch."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses: dict[int, list[float]] = {}
    for step in range(STEPS):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 + step))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = [loss.item()]
    return losses


def undisturbed_losses() -> dict[int, list[float]]:
    """The losses of `UNDISTURBED`, to the last bit, on ranks that no launcher started and no network is between.

    Raises:
        AssertionError: they are not those of plain PyTorch.
    """
    losses = losses_said(run_ranks(WORLD_SIZE, _train_undisturbed)[0])
    true = {step: [pytest.approx(loss, abs=1e-6) for loss in said] for step, said in true_losses().items()}
    assert losses == true
    return losses


def _train_undisturbed() -> list[str]:
    """Runs the script as it stands, and returns what rank 0 said as the launcher would show it."""
    sys.argv = ["train.py", "-"]
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(UNDISTURBED, "train.py", "exec"), {"__name__": "__main__"})
    return [f"[0] {line}" for line in out.getvalue().splitlines()]
