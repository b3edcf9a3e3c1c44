"""One rank of one contender of `tensor.py`; see `teams/rank.py`.

    python -m tensor_parts.rank JOB          (RANK and its kin in the environment, as torchrun sets them)

More words: `traffic`, answered with what dsrun has counted; `times N`, with what layers alone cost, see `linears.py`.
"""

from __future__ import annotations

from typing import Any

from teams.rank import Rank, serve

from . import contenders
from .job import Job
from .model import batch_of


class _TensorRank(Rank):
    def answer(self, word: str, count: int) -> Any:
        """See `Rank`."""
        match word:
            case "traffic":
                return self.trainer.traffic()
            case "times":
                return self.trainer.times(count)
            case _:
                return super().answer(word, count)


def _rank(text: str, number: int) -> Rank:
    job = Job.from_json(text)
    return _TensorRank(lambda: contenders.build(job), lambda step: batch_of(job, step))


if __name__ == "__main__":
    serve(_rank)
