"""One rank of one contender of `zero.py`; see `teams/rank.py`.

    python -m zero_peers.rank JOB          (RANK and its kin in the environment, as torchrun sets them)

A step's seconds are told by its halves too. More words: `memory` and `reset`: see memory.py; `traffic`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from teams.rank import Rank, serve
from torch import Tensor, nn

from . import contender
from .gpt import GPT, batch_of
from .job import STACK, Job
from .memory import Sampler, resident

_SEED = 20


class _ZeroRank(Rank):
    def __init__(self, job: Job, rank: int) -> None:
        self._imported = resident().total
        self._sampler = Sampler() if job.sampled else None
        torch.manual_seed(_SEED)
        # Given away when the contender is built: what it frees of the model is then free.
        models: list[nn.Module] = [_stack() if job.shape == STACK else GPT(job.shape)]
        super().__init__(
            lambda: contender.build(models.pop(), job, rank=rank), lambda step: _batch_of(job, rank=rank, step=step)
        )

    def answer(self, word: str, count: int) -> Any:
        """See `Rank`."""
        match word:
            case "memory":
                assert self._sampler is not None, "the job is not sampled"
                return {**self._sampler.report(), "imported": self._imported}
            case "reset":
                assert self._sampler is not None, "the job is not sampled"
                self._sampler.reset()
                return None
            case "traffic":
                return self.trainer.traffic()
            case _:
                return super().answer(word, count)

    def measured_step(self, batch: Any) -> dict[str, float | None]:
        """See `Rank`."""
        cpu_s, began_s = time.process_time(), time.perf_counter()
        loss = self.trainer.forward_backward(batch)
        middle_cpu_s, middle_s = time.process_time(), time.perf_counter()
        self.trainer.update()
        ended_s = time.perf_counter()
        return {
            "step_s": ended_s - began_s,
            "backward_s": middle_s - began_s,
            "backward_cpu_s": middle_cpu_s - cpu_s,
            "update_s": ended_s - middle_s,
            "cpu_s": time.process_time() - cpu_s,
            "loss": loss,
        }


def _batch_of(job: Job, *, rank: int, step: int) -> Tensor:
    if job.shape == STACK:
        return torch.ones(job.shape.micro, job.shape.hidden)
    return batch_of(job.shape, rank=rank, step=step)


def _stack() -> nn.Module:
    from zero_overhead import Stack

    class Loss(Stack):
        def forward(self, x: Tensor) -> Tensor:
            """To a number that can be differentiated."""
            return super().forward(x).pow(2).mean()

    return Loss(STACK.layers, STACK.hidden)


def _rank(text: str, number: int) -> Rank:
    job = Job.from_json(text)
    contender.prepare(job)
    return _ZeroRank(job, number)


if __name__ == "__main__":
    serve(_rank)
