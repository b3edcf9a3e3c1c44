"""What a rank of a pipeline does, one action after the other, as values. Nothing is made or checked here.

[Note: chunks]
A pipeline of p ranks cuts a model into p * v chunks of neighbouring layers, numbered from the inputs to the loss; each
rank has v of them. With v = 1 a rank's chunk is its stage. Micro batches are numbered from 0 in the order in which a
global batch has them, and every chunk takes its backwards in that order: then sums of gradients have the same bits
under every schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What an action is; the values are the letters that pictures and texts show."""

    # Enum's own is a function of Python, and schedules look kinds up hundreds of thousands of times.
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    #: The forward of a chunk.
    FORWARD = "F"
    #: The whole backward of a chunk: gradients of its inputs and of its weights.
    BACKWARD = "B"
    #: The part of a backward that the chunk before waits for: gradients of the inputs.
    INPUT_GRADS = "I"
    #: The other part: gradients of the weights.
    WEIGHT_GRADS = "W"
    #: What the next chunk needs leaves; it stands behind the forward.
    SEND_FORWARD = "SF"
    #: What the chunk before has made is asked for; the forward waits for it.
    RECEIVE_FORWARD = "RF"
    #: The gradients of the inputs leave; it stands behind the backward.
    SEND_BACKWARD = "SB"
    #: The gradients of the outputs are asked for; the backward waits for them.
    RECEIVE_BACKWARD = "RB"
    #: The parameters of a chunk are gathered from the ranks that have slices of them.
    GATHER = "G"
    #: The gathered parameters of a chunk are given up.
    DROP = "D"
    #: The gradients of a chunk are summed up over the ranks that have the same chunk.
    REDUCE = "R"


COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADS, Kind.WEIGHT_GRADS)
#: Micro batch of actions that are of none.
NO_MICRO = -1


class Action(NamedTuple):
    """One action of a rank.

    Attributes:
        kind: kind of what is done.
        chunk: number of the chunk in the model, from the inputs on; see [Note: chunks]. It is always the chunk of the
            rank that acts: a send names the chunk that has made the message, a receive the one that needs it.
        micro: number of the micro batch; `NO_MICRO` for those of a whole chunk.
    """

    kind: Kind
    chunk: int
    micro: int = NO_MICRO

    def __str__(self) -> str:
        """Returns the action as `F3.0`: kind, micro batch, chunk."""
        micro = "" if self.micro == NO_MICRO else f"{self.micro}"
        return f"{self.kind.value}{micro}.{self.chunk}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What all ranks of a pipeline do in one global batch.

    Attributes:
        name: name of the kind of schedule, as the config has it.
        micros: micro batches of a global batch.
        rank_of: rank of each chunk, by its number.
        actions: actions of each rank, in order.
    """

    name: str
    micros: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def chunks(self) -> int:
        """Chunks of the model."""
        return len(self.rank_of)

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Returns the chunks that a rank has, ascending."""
        return tuple(chunk for chunk, owner in enumerate(self.rank_of) if owner == rank)
