"""One rank of one contender of `pipeline.py`; see `teams/rank.py`.

python -m pipeline_parts.rank JOB          (RANK and its kin in the environment, as torchrun sets them)
"""

from __future__ import annotations

from teams.rank import Rank, serve

from . import contenders
from .job import Job
from .model import batch_of


def _rank(text: str, number: int) -> Rank:
    job = Job.from_json(text)
    return Rank(lambda: contenders.build(job, number), lambda step: batch_of(job, step))


if __name__ == "__main__":
    serve(_rank)
