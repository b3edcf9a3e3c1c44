"""What one rank of a contender shall build and run, as a value that travels as JSON. Imports no contender."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from teams.job import JsonJob


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT and the batch of a rank.

    Attributes:
        layers: transformer blocks.
        hidden: width.
        heads: number of attention heads.
        vocab: tokens there are.
        seq: tokens of a sample.
        micro: samples of a forward.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    micro: int

    @property
    def numel(self) -> int:
        """Parameters: 12 h^2 + 13 h a block, two tables of the vocabulary, positions, and the last norm."""
        h = self.hidden
        return self.layers * (12 * h * h + 13 * h) + 2 * self.vocab * h + self.seq * h + 2 * h


#: 101 million parameters; 512 tokens take about a second of a core, 32 tokens leave the moving of data to be seen.
MEDIUM = Shape(layers=12, hidden=768, heads=12, vocab=10240, seq=128, micro=4)
SHORT = Shape(layers=12, hidden=768, heads=12, vocab=10240, seq=32, micro=1)
#: 201 million parameters, and next to no activations.
LARGE = Shape(layers=14, hidden=1024, heads=16, vocab=12288, seq=64, micro=1)
#: The model of zero_overhead.py: all bookkeeping, no arithmetic.
STACK = Shape(layers=24, hidden=16, heads=1, vocab=0, seq=1, micro=2)


@dataclass(frozen=True, slots=True)
class Job(JsonJob):
    """One rank's work.

    Attributes:
        program: module that a rank runs.
        contender: `dsrun`, `deepspeed`, `fsdp2`, `plain` (one process and a torch optimizer), or `floor`.
        stage: ZeRO stage; for the contender `floor`, the stage that it does the work of.
        ranks: number of ranks of the job.
        shape: the model.
        bf16: parameters and gradients in bf16 with fp32 masters, else everything in fp32.
        sampled: note the most memory that is resident, every few milliseconds.
    """

    program: ClassVar[str] = "zero_peers.rank"

    contender: str
    stage: int
    ranks: int
    shape: Shape
    bf16: bool
    sampled: bool = False

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Reads what `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        shape = Shape(**fields.pop("shape"))
        return cls(shape=shape, **fields)
