"""What a save that goes on beside training takes of host memory: a copy of what a rank writes and is on no drive.

The runtime's part of it: `runtime/checkpoint/staging/sources.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsrun.estimate.memory.model_state import PaddedUnit, split_units
from dsrun.estimate.run.settings import RunSettings


def checkpoint_copy_bytes(
    units: Sequence[PaddedUnit], settings: RunSettings, *, frozen_numel: int = 0, ranks: int = 1
) -> int:
    """Returns the bytes that one rank copies for a save; 0 where saves stop training instead.

    Masters, optimizer states and frozen parameters, each written by one rank. Buffers are not counted.

    Args:
        units: units of the model, padded for the ranks.
        settings: formats, and what lies on drives.
        frozen_numel: parameters that are not trained, of all ranks.
        ranks: number of ranks that share the work of copying what all of them hold.
    """
    if not settings.saves_beside:
        return 0
    split = split_units(units, settings)
    copied = settings.master_bytes * split.staying_numel + settings.states_of(split.staying_numel)
    if settings.offload_optimizer != "nvme":
        copied += settings.master_bytes * split.leaving_numel
        copied += sum(settings.away_states_of(unit.shard) for unit in split.leaving)
    if settings.offload_param != "nvme":
        copied += settings.compute_bytes * -(-frozen_numel // ranks)
    return copied
