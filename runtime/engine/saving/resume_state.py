"""Where a run goes on from besides its tensors: random numbers, data, and the micro steps that an update has used.

[Note: between updates]
A checkpoint is of the moment between two updates. One that is saved in the middle of a global batch holds what there
was after the last update: gradients of the micro steps since are in no checkpoint, and a resumed run takes these micro
steps again, with the same samples and the same random numbers. Only buffers that forward itself changes, as a batch
norm's means, have seen them twice then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...activation.recompute.rng import RngTracker
from ...data.loader import TrainingLoader
from ...data.stream import StreamLoader
from ...protocols import StateEntry
from .randomness import RandomState, adapted, capture, restore, sources

#: Role of random-number states in a checkpoint; their names are the ranks' numbers.
RNG_ROLE = "rng"


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment between two updates, see [Note: between updates].

    Attributes:
        random: of this rank.
        data: position of the engine's loader; None where it has none.
        micro_steps: that were taken.
    """

    random: RandomState
    data: dict[str, Any] | None
    micro_steps: int


def present_moment(
    device: torch.device, named: RngTracker, loader: TrainingLoader | StreamLoader | None, *, micro_steps: int
) -> Moment:
    """Returns this one; 30 us."""
    return Moment(capture(device, named), None if loader is None else loader.state_dict(), micro_steps)


def random_entries(state: RandomState, rank: int) -> list[StateEntry]:
    """Returns what a checkpoint saves of a rank's generators."""
    text = torch.frombuffer(bytearray(state.to_bytes()), dtype=torch.uint8)
    return [StateEntry(str(rank), RNG_ROLE, (text.numel(),), 0, text.numel(), text, False)]


def random_names(rank: int, saved: int) -> list[str]:
    """Returns the names of the tensors that a rank reads to go on with its random numbers.

    Args:
        rank: that is to go on.
        saved: ranks that there were.
    """
    return [str(source) for source in dict.fromkeys(sources(rank, saved))]


def saved_random(found: Mapping[str, Tensor], rank: int, saved: int) -> list[RandomState]:
    """Returns the states that a rank goes on from.

    Args:
        found: what is stored under `random_names`, uint8 on the CPU.
        rank: of this process.
        saved: ranks that there were.

    Raises:
        CheckpointError: what was read is no such state.
    """
    states = {name: RandomState.from_bytes(bytes(text.tolist())) for name, text in found.items()}
    return [states[str(source)] for source in sources(rank, saved)]


def restore_random(states: Sequence[RandomState], rank: int, *, device: torch.device, named: RngTracker) -> None:
    """Has this rank's generators go on.

    Args:
        states: what `saved_random` returned.
        rank: of this process.
        device: of the rank.
        named: generators by name.

    Raises:
        CheckpointError: a generator does not take its state.
    """
    restore(adapted(states, rank, device), device, named)
