"""One rank of one contender: builds it, then does as it is told on stdin and answers on stdout, a line of JSON each.

    python -m pipeline_parts.rank JOB          (RANK and its kin in the environment, as torchrun sets them)

Words: `build`, answered with its seconds; `step N`: N steps, and wall seconds, processor seconds and loss of each. The
end of stdin ends it. Whatever else prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from . import contenders
from .job import Job
from .model import batch_of


class Rank:
    """What the words mean."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job = job
        self._rank = rank
        self._steps = 0
        self._trainer: contenders.Trainer | None = None

    def answer(self, word: str, count: int) -> Any:
        """Returns what the front shall know."""
        match word:
            case "build":
                began_s = time.perf_counter()
                self._trainer = contenders.build(self._job, self._rank)
                return time.perf_counter() - began_s
            case "step":
                return [self._step() for _ in range(count)]
            case _:
                raise AssertionError(f"unknown word {word!r}")

    def _step(self) -> dict[str, float | None]:
        assert self._trainer is not None, "`build` comes first"
        self._steps += 1
        batch = batch_of(self._job, self._steps)
        cpu_s, began_s = time.process_time(), time.perf_counter()
        loss = self._trainer.step(batch)
        return {"step_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s, "loss": loss}


def main() -> None:
    """Reads words until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    rank = Rank(Job.from_json(sys.argv[1]), int(os.environ["RANK"]))
    for line in sys.stdin:
        word, _, count = line.strip().partition(" ")
        print(json.dumps(rank.answer(word, int(count or 1))), file=answers, flush=True)


if __name__ == "__main__":
    main()
