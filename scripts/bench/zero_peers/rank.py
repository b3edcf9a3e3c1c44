"""One rank of one contender: builds it, then does as it is told on stdin and answers on stdout, a line of JSON each.

    python -m zero_peers.rank JOB          (RANK and its kin in the environment, as torchrun sets them)

Words: `build`, answered with its seconds; `step N`: N steps, and the seconds of each and of its halves; `memory` and
`reset`: see memory.py; `traffic`. The end of stdin ends it. Whatever else prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from . import contender
from .gpt import GPT, batch_of
from .job import STACK, Job
from .memory import Sampler, resident

_SEED = 20


class Rank:
    """What the words mean."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job = job
        self._rank = rank
        self._steps = 0
        self._trainer: contender.Trainer | None = None
        self._imported = resident().total
        self._sampler = Sampler() if job.sampled else None

    def answer(self, word: str, count: int) -> Any:
        """Returns what the front shall know."""
        match word:
            case "build":
                return self._build()
            case "step":
                return [self._step() for _ in range(count)]
            case "memory":
                assert self._sampler is not None, "the job is not sampled"
                return {**self._sampler.report(), "imported": self._imported}
            case "reset":
                assert self._sampler is not None, "the job is not sampled"
                self._sampler.reset()
                return None
            case "traffic":
                return self._built().traffic()
            case _:
                raise AssertionError(f"unknown word {word!r}")

    def _build(self) -> float:
        torch.manual_seed(_SEED)
        model = _stack() if self._job.shape == STACK else GPT(self._job.shape)
        began_s = time.perf_counter()
        self._trainer = contender.build(model, self._job, rank=self._rank)
        return time.perf_counter() - began_s

    def _step(self) -> dict[str, float]:
        trainer, batch = self._built(), self._batch()
        cpu_s, began_s = time.process_time(), time.perf_counter()
        loss = trainer.forward_backward(batch)
        middle_cpu_s, middle_s = time.process_time(), time.perf_counter()
        trainer.update()
        ended_s = time.perf_counter()
        return {
            "step_s": ended_s - began_s,
            "backward_s": middle_s - began_s,
            "backward_cpu_s": middle_cpu_s - cpu_s,
            "update_s": ended_s - middle_s,
            "cpu_s": time.process_time() - cpu_s,
            "loss": loss,
        }

    def _batch(self) -> Tensor:
        self._steps += 1
        shape = self._job.shape
        if shape == STACK:
            return torch.ones(shape.micro, shape.hidden)
        return batch_of(shape, rank=self._rank, step=self._steps)

    def _built(self) -> contender.Trainer:
        assert self._trainer is not None, "`build` comes first"
        return self._trainer


def _stack() -> nn.Module:
    from zero_overhead import Stack

    class Loss(Stack):
        def forward(self, x: Tensor) -> Tensor:
            """To a number that can be differentiated."""
            return super().forward(x).pow(2).mean()

    return Loss(STACK.layers, STACK.hidden)


def main() -> None:
    """Reads words until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    job = Job.from_json(sys.argv[1])
    contender.prepare(job)
    rank = Rank(job, int(os.environ["RANK"]))
    for line in sys.stdin:
        word, _, count = line.strip().partition(" ")
        print(json.dumps(rank.answer(word, int(count or 1))), file=answers, flush=True)


if __name__ == "__main__":
    main()
