"""What a save copies: masters, states and frozen parameters, each once, and nothing that lies on a drive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.estimate.memory.checkpoint_copy import checkpoint_copy_bytes
from dsrun.estimate.memory.model_state import pad_units
from dsrun.estimate.model.units import UnitGroup
from dsrun.estimate.run.settings import RunSettings

UNITS = [UnitGroup("a", 4096, count=3), UnitGroup("rest", 1024, has_module=False)]
TRAINED = 3 * 4096 + 1024
ADAM = RunSettings(compute_bytes=2, saves_beside=True)


def copied(settings: RunSettings, *, ranks: int = 2) -> int:
    return checkpoint_copy_bytes(pad_units(UNITS, ranks), settings, frozen_numel=1001, ranks=ranks)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_copies_its_share_of_masters_states_and_frozen_parameters(stage: int, ranks: int) -> None:
    assert copied(replace(ADAM, stage=stage), ranks=ranks) == 12 * TRAINED // ranks + 2 * -(-1001 // ranks)


def test_host_memory_is_copied_in_its_format_and_drives_are_not() -> None:
    away = replace(ADAM, stage=3, offload_optimizer="cpu")
    assert copied(away) == 12 * TRAINED // 2 + 2 * 501
    assert copied(replace(away, state_format="bf16")) == 8 * TRAINED // 2 + 2 * 501
    assert copied(replace(away, offload_optimizer="nvme")) == 2 * 501
    assert copied(replace(away, offload_optimizer="nvme", offload_param="nvme")) == 0


def test_saves_that_stop_training_copy_nothing() -> None:
    assert copied(replace(ADAM, saves_beside=False)) == 0
