"""What `dsrun plan` counts for copies in memory is what the arithmetic of the runtime comes to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.estimate.memory.model_state import PaddedUnit, StateBytes
from dsrun.estimate.memory.restart_copies import memory_copy_bytes
from dsrun.estimate.run.settings import RunSettings

UNITS = [
    PaddedUnit(
        padded=padded,
        shard=padded // 4,
        has_module=True,
        numel=padded - 24,
        frozen=0,
        frozen_padded=0,
        frozen_shard=0,
        frozen_numel=0,
    )
    for padded in (1024, 3072)
]


def state(stage: int, *, frozen: int = 0, frozen_slices: int = 0) -> StateBytes:
    owned = 1024 if stage else 4096
    return StateBytes(
        parameters=0,
        gather_slots=0,
        gradients=0,
        gradient_slots=0,
        gradient_sums=0,
        masters=4 * owned,
        states=8 * owned,
        frozen=frozen,
        frozen_slices=frozen_slices,
    )


@pytest.mark.parametrize(("hosts", "copies"), [(1, 2), (3, 4)])
def test_a_rank_copies_what_it_owns_twice_and_keeps_as_much_for_a_neighbour(hosts: int, copies: int) -> None:
    settings = RunSettings(stage=3, memory_copies=True)
    found = memory_copy_bytes(state(3, frozen=800, frozen_slices=800), UNITS, settings, ranks_per_host=4, hosts=hosts)
    assert found == copies * (12 * 1024 + 800)


def test_what_all_ranks_hold_is_shared_out_within_a_host() -> None:
    settings = RunSettings(stage=0, memory_copies=True)
    found = memory_copy_bytes(state(0, frozen=800), UNITS, settings, ranks_per_host=4, hosts=2)
    assert found == 4 * (12 * 4096 + 800) // 4
    assert memory_copy_bytes(state(0), UNITS, replace(settings, memory_copies=False), ranks_per_host=4, hosts=2) == 0
