"""What a run goes on from besides its tensors, as tensors of a checkpoint and back."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from dsrun.errors import CheckpointError
from dsrun.runtime.activation.recompute.rng import RngTracker
from dsrun.runtime.data.loader import TrainingLoader
from dsrun.runtime.engine.saving.randomness import ResumedRank
from dsrun.runtime.engine.saving.resume_state import (
    present_moment,
    random_entries,
    random_names,
    restore_random,
    saved_random,
)
from dsrun.runtime.generators import host_kept, seed_host
from dsrun.runtime.protocols import SOLE_HOLDER

CPU = torch.device("cpu")


def stored(ranks: int) -> dict[str, Tensor]:
    """What ranks that have seeds of their own have in a checkpoint."""
    found: dict[str, Tensor] = {}
    with host_kept():
        for rank in range(ranks):
            seed_host(rank)
            moment = present_moment(CPU, RngTracker(), None, micro_steps=0)
            [entry] = random_entries(moment.random, rank)
            assert (entry.role, entry.shape, entry.holders) == ("rng", (entry.stop,), SOLE_HOLDER)
            found[entry.name] = entry.tensor
    return found


def drawn(rank: int) -> tuple[float, float]:
    """What a rank draws after it has taken over the states of two."""
    tensors = stored(2)
    resumed = ResumedRank(rank, 1, 2, 1)
    found = {name: tensors[name] for name in random_names(resumed)}
    with host_kept():
        restore_random(saved_random(found, resumed), resumed, device=CPU, named=RngTracker())
        return random.random(), float(torch.rand(()))


def test_ranks_go_on_with_their_own_numbers_and_new_ones_with_others() -> None:
    with host_kept():
        expected: list[tuple[float, float]] = []
        for rank in range(2):
            seed_host(rank)
            expected.append((random.random(), float(torch.rand(()))))
    found = [drawn(rank) for rank in range(4)]
    assert found[:2] == expected
    assert len(set(found)) == 4
    names = [random_names(ResumedRank(rank, 1, 2, 1)) for rank in range(4)]
    assert names == [["0"], ["1"], ["0", "1"], ["1", "0"]]
    assert random_names(ResumedRank(1, 1, 1, 1)) == ["0"]


def test_a_moment_knows_where_the_data_is_and_does_not_move_with_it() -> None:
    loader = TrainingLoader(list(range(9)), micro_batch=2)  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    moment = present_moment(CPU, RngTracker(), loader, micro_steps=1)
    next(batches)
    assert moment.data == {"epoch": 0, "samples_seen": 2, "seed": 1234}
    assert moment.micro_steps == 1
    assert present_moment(CPU, RngTracker(), None, micro_steps=0).data is None


def test_a_damaged_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match="random-number state"):
        saved_random({"0": torch.zeros(5, dtype=torch.uint8)}, ResumedRank(0, 1, 1, 1))
