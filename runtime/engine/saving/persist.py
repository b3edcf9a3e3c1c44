"""An engine's state into a checkpoint: which entries and values, in which order; not in which format.

Back into an engine it comes by `load.py`.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dsrun import __version__
from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.storage.registry import absolute
from dsrun.contract.environment import CHECKPOINT_EVENT
from dsrun.units import format_bytes

from ...checkpoint.format import client_state as script_state
from ...checkpoint.format.json_values import check_json, to_json
from ...checkpoint.save.request import Wanted
from ...checkpoint.staging.sources import AT_ONCE_BYTES, NO_UNIT
from ...optim.states.option_values import plain_option
from ...protocols import StateEntry
from ..parts import EngineParts, Scheduler
from ..state import Counters, frozen_entries, parameter_entries, tied_names
from .git_state import git_state
from .resume_state import RNG_ROLE, Moment, random_entries

#: Roles of what is copied at once: forward and the script change it.
_AT_ONCE = {"buffer", RNG_ROLE, script_state.ROLE}


def save_engine(
    parts: EngineParts,
    counters: Counters,
    folder: Place,
    *,
    tag: str,
    moment: Moment,
    client_state: Mapping[str, Any],
    save_latest: bool,
    frozen: bool,
) -> None:
    """Saves; see `Engine.save_checkpoint`."""
    parts.saver.save(
        folder,
        tag,
        lambda: _wanted(parts, counters, folder / tag, moment, client_state, save_latest=save_latest, frozen=frozen),
        progress=parts.heartbeat.beat,
    )


def _wanted(
    parts: EngineParts,
    counters: Counters,
    target: Place,
    moment: Moment,
    client_state: Mapping[str, Any],
    *,
    save_latest: bool,
    frozen: bool,
) -> Wanted:
    apart = frozen and parts.saver.policy.frozen_by_reference
    stores = parts.mesh.info.rank == 0
    wanted = _state(parts, counters, moment, client_state, frozen=frozen, apart=apart, stores=stores)
    return replace(wanted, save_latest=save_latest, when_saved=partial(_tell, parts, target, counters.global_steps))


def state_for_memory(parts: EngineParts, counters: Counters, moment: Moment, client_state: Mapping[str, Any]) -> Wanted:
    """Returns what a copy in memory holds: all that a checkpoint does; tensors of the client state once a host."""
    stores = parts.mesh.info.local_rank == 0
    wanted = _state(parts, counters, moment, client_state, frozen=True, apart=False, stores=stores)
    if parts.optimizer is None:
        return wanted
    whole = not parts.step.plan.shard_optimizer
    return replace(wanted, entries=[*wanted.entries, *parts.step.optimizer.saved.leading_scalars(replicated=whole)])


def _state(
    parts: EngineParts,
    counters: Counters,
    moment: Moment,
    client_state: Mapping[str, Any],
    *,
    frozen: bool,
    apart: bool,
    stores: bool,
) -> Wanted:
    step = parts.step
    rank = parts.mesh.info.rank
    whole = not step.plan.shard_optimizer
    if step.writes is not None:
        step.writes.take_over()
    entries = parameter_entries(
        parts.module, step.units, replicated=whole, frozen=frozen and not apart, frozen_units=parts.frozen_units
    )
    entries += [] if parts.optimizer is None else step.optimizer.saved.state_entries(replicated=whole)
    entries += random_entries(moment.random, rank)
    state, tensors = script_state.take_apart(client_state, stores=stores)
    left_out = step.optimizer.histories.to_json()
    values = {
        "counters": {**counters.to_json(), "micro_steps": moment.micro_steps},
        "optimizer": {
            "type": type(parts.optimizer).__name__,
            "groups": [] if parts.optimizer is None else step.optimizer.saved.options(),
            **({"left_out": left_out} if left_out else {}),
        },
        "scheduler": None if parts.scheduler is None else _schedule(parts.scheduler),
        "loss_scale": parts.loss_scale.to_json(),
        "data": moment.data,
        "client_state": state,
        "frozen": frozen,
        "config": parts.config,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "dsrun": __version__},
        "git": git_state() if rank == 0 else None,
    }
    check_json(values)
    entries += tensors
    return Wanted(
        entries=entries,
        values=values,
        rank_values={},
        aliases=tied_names(parts.module, frozen=frozen),
        save_latest=False,
        when_saved=_nobody,
        frozen=frozen_entries(parts.module, replicated=whole, frozen_units=parts.frozen_units) if apart else None,
        units=_units_of(parts, entries),
        order=[*_next_updates(parts), *(unit.index for unit in parts.frozen_units)],
        watched=list(parts.module.named_parameters()),
        on_drive=parts.on_drive,
    )


def _units_of(parts: EngineParts, entries: Sequence[StateEntry]) -> list[int | None]:
    """Returns for each entry the number of the unit whose update changes it; see `Wanted`."""
    units = {e.name: unit.index for unit in (*parts.step.units, *parts.frozen_units) for e in unit.layout.extents}
    return [
        # Forward changes buffers, and what is small is not worth a wait.
        None
        if entry.role in _AT_ONCE
        else units.get(entry.name, NO_UNIT if entry.tensor.nbytes >= AT_ONCE_BYTES else None)
        for entry in entries
    ]


def _next_updates(parts: EngineParts) -> Sequence[int]:
    """Returns the numbers of units in the order in which the next step will update them."""
    return range(len(parts.step.units)) if parts.step.away is None else parts.step.away.order


def _nobody(nbytes: int, seconds: float) -> None:
    """Hears of a copy that is in memory alone."""


def _tell(parts: EngineParts, target: Place, step: int, nbytes: int, seconds: float) -> None:
    """Records and prints on rank 0 that a checkpoint is there, in whatever thread has seen it."""
    fields = {"path": absolute(target), "tag": target.name, "step": step}
    parts.records.write(CHECKPOINT_EVENT, {**fields, "seconds": round(seconds, 6), "bytes": nbytes})
    # In one piece: the script may print meanwhile, in its own thread.
    print(f"saved {target} ({format_bytes(nbytes)}, {seconds:.1f} s)\n", end="", flush=True)


def _schedule(scheduler: Scheduler) -> dict[str, Any]:
    return {"type": type(scheduler).__name__, "state": to_json(plain_option(scheduler.state_dict()))}
