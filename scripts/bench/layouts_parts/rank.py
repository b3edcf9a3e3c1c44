"""One rank of a layout; see `teams/rank.py`.

python -m layouts_parts.rank JOB          (RANK and its kin in the environment, as torchrun sets them)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from teams.rank import Rank, serve
from tensor_parts.model import batch_of, llama_of
from torch import Tensor

from .job import Job


class _Trainer:
    def __init__(self, job: Job) -> None:
        import dsrun

        self._engine: Any = dsrun.initialize(model=llama_of(job.llama), config=job.config)[0]
        self._job = job

    def step(self, batch: Tensor) -> float:
        """Trains on the samples of this rank of [samples, tokens], and returns the mean loss of all."""
        return float(self._engine.train_batch(self._micro_batches(batch)))

    def _micro_batches(self, batch: Tensor) -> Iterator[dict[str, Tensor]]:
        own = batch.chunk(self._job.data)[self._engine.grid.get_data_parallel_rank()]
        for micro in own.split(self._job.micro_samples):
            yield {"input_ids": micro, "labels": micro}


def _rank(text: str, number: int) -> Rank:
    job = Job.from_json(text)
    return Rank(lambda: _Trainer(job), lambda step: batch_of(job.llama, step))


if __name__ == "__main__":
    serve(_rank)
