"""Bytes of copies of the state in a host's shared memory, from which a job that is started again goes on.

As the runtime makes them: `runtime/checkpoint/memory_copy/copies.py` says why there are two, and two more for a
neighbour. Headers, random-number states, buffers and what the script adds are left out: some KiB, mostly.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsrun.estimate.memory.model_state import PaddedUnit, StateBytes
from dsrun.estimate.run.settings import RunSettings

#: The copy that is being made, and the last whole one.
_GENERATIONS = 2


def memory_copy_bytes(
    state: StateBytes, units: Sequence[PaddedUnit], settings: RunSettings, *, ranks_per_host: int, hosts: int
) -> int:
    """Returns what a rank's copies take of its host's memory, with those it keeps for a rank of another host.

    Args:
        state: model state of the rank, in bytes.
        units: units of the model, padded for the ranks.
        settings: settings of the run.
        ranks_per_host: ranks that share out what all of them hold.
        hosts: number of hosts.
    """
    if not settings.memory_copies:
        return 0
    shared = state.frozen - state.frozen_slices
    own = state.frozen_slices
    trained = settings.master_bytes * sum(unit.shard if settings.stage >= 1 else unit.padded for unit in units)
    if settings.stage >= 1:
        own += trained + state.states
    else:
        shared += trained + state.states
    return _GENERATIONS * (own + -(-shared // ranks_per_host)) * (2 if hosts > 1 else 1)
