"""One rank of one contender: builds it, then does as it is told on stdin and answers on stdout, a line of JSON each.

Words: `build`, answered with its seconds; `step N`: N steps, and wall seconds, processor seconds and loss of each. The
end of stdin ends it. Whatever else prints goes to stderr. A benchmark's own program may know more words.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch


class Rank:
    """What the words mean.

    Args:
        build: function that makes the contender: an object whose `step(batch)` trains on a batch and returns the loss,
            None where it is not known.
        batch_of: function that returns the batch of a step, counted from 1.
    """

    def __init__(self, build: Callable[[], Any], batch_of: Callable[[int], Any]) -> None:
        self._build = build
        self._batch_of = batch_of
        self._steps = 0
        self._trainer: Any = None

    def answer(self, word: str, count: int) -> Any:
        """Returns what the front shall know."""
        match word:
            case "build":
                began_s = time.perf_counter()
                self._trainer = self._build()
                return time.perf_counter() - began_s
            case "step":
                return [self._step() for _ in range(count)]
            case _:
                raise AssertionError(f"unknown word {word!r}")

    @property
    def trainer(self) -> Any:
        """The contender."""
        assert self._trainer is not None, "`build` comes first"
        return self._trainer

    def _step(self) -> dict[str, float | None]:
        self._steps += 1
        return self.measured_step(self._batch_of(self._steps))

    def measured_step(self, batch: Any) -> dict[str, float | None]:
        """Trains on a batch; returns the loss, and seconds by the name of what they are of, `cpu_s` at its end or not.

        Args:
            batch: batch of `batch_of`.
        """
        cpu_s, began_s = time.process_time(), time.perf_counter()
        loss = self.trainer.step(batch)
        return {"step_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s, "loss": loss}


def serve(make: Callable[[str, int], Rank]) -> None:
    """Reads words until there are no more.

    Args:
        make: function that returns the rank, given the job's text and its number.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    rank = make(sys.argv[1], int(os.environ["RANK"]))
    for line in sys.stdin:
        word, _, count = line.strip().partition(" ")
        print(json.dumps(rank.answer(word, int(count or 1))), file=answers, flush=True)
