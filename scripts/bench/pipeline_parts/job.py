"""What one rank of a contender shall build and run, as a value that travels as JSON. Imports no contender."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from teams.job import JsonJob


@dataclass(frozen=True, slots=True)
class Job(JsonJob):
    """One rank's work.

    Attributes:
        program: module that a rank runs.
        contender: `dsrun`, `torch` (torch.distributed.pipelining), `deepspeed` (its PipelineEngine), or `plain` (one
            process, no pipeline).
        ranks: number of ranks, a stage each.
        model: kind of the model; `gpt`, or `sleep` for layers that sleep and compute next to nothing.
        layers: number of layers between the first and the last one, or of those that sleep.
        micros: micro batches of a step.
        schedule: schedule, as dsrun's config names it.
        chunks: chunks of the model a rank.
        hidden: width.
        seq: tokens of a sample.
        vocab: tokens there are.
        samples: samples of a micro batch.
        forward_ms: milliseconds that a sleeping layer's forward takes; its backward takes twice as long.
    """

    program: ClassVar[str] = "pipeline_parts.rank"

    contender: str
    ranks: int
    model: Literal["gpt", "sleep"]
    layers: int
    micros: int
    schedule: str = "1f1b"
    chunks: int = 1
    hidden: int = 256
    seq: int = 128
    vocab: int = 2048
    samples: int = 1
    forward_ms: float = 0.0
