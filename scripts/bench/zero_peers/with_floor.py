"""The floor under a step of several ranks: what cannot be saved, done in the simplest way, all ranks at once.

Each rank computes forward and backward of the plain model, and norm, clipping and update of its share of the elements.
Then it copies, from memory that another rank has just written, the bytes that it lacks: half of the gradients and half
of the parameters with two ranks, and half of the parameters once more at stage 3. No rank waits for another.
"""

from __future__ import annotations

import mmap
import os

import torch
from teams.team import SHARED_MEMORY_ENV
from torch import Tensor, nn

from .contender import CLIPPING, LEARNING_RATE
from .job import Job

#: See `contender.prepare`.
NEEDS: tuple[str, ...] = ()


class Floor:
    """See `contender.Trainer`."""

    def __init__(self, model: nn.Module, job: Job, rank: int) -> None:
        self._model = model.to(torch.bfloat16) if job.bf16 else model
        self._params = list(model.parameters())
        numel = sum(p.numel() for p in self._params)
        share = numel // job.ranks
        dtype = self._params[0].dtype
        # Slice r is written by rank r and read by all others.
        shared = mmap.mmap(int(os.environ[SHARED_MEMORY_ENV]), share * job.ranks * dtype.itemsize)
        memory = torch.frombuffer(shared, dtype=dtype)
        slices = list(memory.split(share))
        self._mine = slices.pop(rank).fill_(0)
        self._others = slices
        self._target = torch.zeros(share, dtype=dtype)
        self._moves = 3 if job.stage == 3 else 2
        self._master = nn.Parameter(torch.zeros(share))
        self._master.grad = torch.zeros(share)
        self._optimizer = torch.optim.AdamW([self._master], lr=LEARNING_RATE, weight_decay=0.01, fused=True)

    def forward_backward(self, batch: Tensor) -> float:
        """See `Trainer`."""
        loss = self._model(batch)
        loss.backward()
        # Gradients that were freed would take new pages in the next step, which is dearer than to zero them.
        for param in self._params:
            assert param.grad is not None, "every parameter is used"
            param.grad.zero_()
        return float(loss.detach())

    def update(self) -> None:
        """See `Trainer`."""
        assert self._master.grad is not None, "it has one from the beginning"
        for _ in range(self._moves):
            for other in self._others:
                self._target.copy_(other)
        self._master.grad.copy_(self._target)
        nn.utils.clip_grad_norm_([self._master], CLIPPING)
        self._optimizer.step()
        self._mine.copy_(self._master.detach())

    def traffic(self) -> dict[str, dict[str, int]]:
        """See `Trainer`."""
        return {}


def build(model: nn.Module, job: Job, rank: int) -> Floor:
    """See `contender.build`."""
    return Floor(model, job, rank)
