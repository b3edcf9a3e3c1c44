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

from dsrun.checkpoint_files.index.region import uncut

from ...activation.configured import named_generators
from ...activation.recompute.rng import RngTracker
from ...data.loader import TrainingLoader
from ...data.stream import StreamLoader
from ...protocols import SOLE_HOLDER, StateEntry
from ..progress import Progress
from .randomness import RandomState, ResumedRank, adapted, capture, restore

#: Role of random-number states in a checkpoint; their names are the ranks' numbers.
RNG_ROLE = "rng"


@dataclass(frozen=True, slots=True)
class ResumeState:
    """A moment between two updates, see [Note: between updates].

    Attributes:
        random: random-number state of this rank.
        data: position of the engine's loader; None where it has none.
        micro_steps: number of micro steps taken so far.
    """

    random: RandomState
    data: dict[str, Any] | None
    micro_steps: int


def present_moment(
    device: torch.device, named: RngTracker, loader: TrainingLoader | StreamLoader | None, *, micro_steps: int
) -> ResumeState:
    """Returns this one; 30 us."""
    return ResumeState(capture(device, named), None if loader is None else loader.state_dict(), micro_steps)


class LastMoment:
    """The moment of the last update, from which a run goes on, see [Note: between updates].

    Args:
        device: Device whose random numbers are kept.
        loader: Loader whose position is kept; None where the engine has none.
        progress: Counters, and where in the global batch this rank is.
    """

    def __init__(self, device: torch.device, loader: TrainingLoader | StreamLoader | None, progress: Progress) -> None:
        self._device = device
        self._loader = loader
        self._progress = progress
        self._noted: ResumeState | None = None

    def note(self) -> None:
        """Keeps what a checkpoint needs that is saved before the next update."""
        counted = self._progress.boundary is None and self._progress.answers.gradient_accumulation_steps() == 1
        self._noted = None if counted else self.present()

    def to_save(self) -> ResumeState:
        """Returns what was noted last; the present where no micro step was taken since, or nothing was noted."""
        if not self._progress.micro_steps_done or self._noted is None:
            return self.present()
        return self._noted

    def present(self) -> ResumeState:
        """Returns the present."""
        steps = self._progress.counters.micro_steps
        return present_moment(self._device, named_generators(), self._loader, micro_steps=steps)


def random_entries(state: RandomState, rank: int) -> list[StateEntry]:
    """Returns what a checkpoint saves of a rank's generators."""
    text = torch.frombuffer(bytearray(state.to_bytes()), dtype=torch.uint8)
    return [StateEntry(str(rank), RNG_ROLE, uncut(text.shape), 0, text.numel(), text, SOLE_HOLDER)]


def random_names(rank: ResumedRank) -> list[str]:
    """Returns the names of the tensors that a rank reads to go on with its random numbers."""
    return [str(source) for source in dict.fromkeys(rank.sources())]


def saved_random(found: Mapping[str, Tensor], rank: ResumedRank) -> list[RandomState]:
    """Returns the states that a rank goes on from.

    Args:
        found: tensors stored under the names of `random_names`, uint8 on the CPU.
        rank: rank of this process.

    Raises:
        CheckpointError: what was read is no such state.
    """
    states = {name: RandomState.from_bytes(bytes(text.tolist())) for name, text in found.items()}
    return [states[str(source)] for source in rank.sources()]


def restore_random(
    states: Sequence[RandomState], rank: ResumedRank, *, device: torch.device, named: RngTracker
) -> None:
    """Has this rank's generators go on.

    Args:
        states: random-number states that `saved_random` returned.
        rank: rank of this process.
        device: device of the rank.
        named: generators by name.

    Raises:
        CheckpointError: a generator does not take its state.
    """
    restore(adapted(states, rank, device), device, named)
