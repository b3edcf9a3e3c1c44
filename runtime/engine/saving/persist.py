"""An engine's state into a checkpoint: which entries and values, in which order; not in which format.

Back into an engine it comes by `load.py`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dsrun import __version__
from dsrun.as_deepspeed.weights_script import leave_script
from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.storage.registry import absolute
from dsrun.contract.environment import CHECKPOINT_EVENT, stands_for_deepspeed
from dsrun.units import format_bytes

from ...checkpoint.format import client_state as script_state
from ...checkpoint.format.json_values import check_json, to_json
from ...checkpoint.save.request import SaveRequest
from ...checkpoint.save.saver import Saver
from ...checkpoint.staging.sources import AT_ONCE_BYTES, NO_UNIT
from ...observe.records import RecordWriter
from ...optim.states.option_values import plain_option
from ...protocols import Scheduler, StateEntry
from .entries import frozen_entries, parameter_entries
from .git_state import git_state
from .resume_state import RNG_ROLE, ResumeState, random_entries
from .run_state import RunState

#: What a checkpoint has of the parameters that steps have left out: among its optimizer's values those of the first
#: pipeline stage, and of a later one those of its first rank.
LEFT_OUT = "left_out"
#: What a checkpoint has of the ranks' roles: how many share layers, which their random numbers depend on.
MESH = "mesh"
#: Roles of what is copied at once: forward and the script change it.
_AT_ONCE = {"buffer", RNG_ROLE, script_state.ROLE}


def save_engine(
    run: RunState,
    saver: Saver,
    records: RecordWriter,
    folder: Place,
    *,
    tag: str,
    moment: ResumeState,
    client_state: Mapping[str, Any],
    save_latest: bool,
    frozen: bool,
    progress: Callable[[], None],
) -> None:
    """Saves a checkpoint, see `Engine.save_checkpoint`.

    Args:
        run: State that is saved.
        saver: Writer of checkpoints.
        records: Writer of records, for the saved checkpoint.
        folder: Checkpoint folder.
        tag: Name of the checkpoint in it.
        moment: Random numbers and position in the data.
        client_state: Values and tensors of the script.
        save_latest: Whether `latest` names this tag.
        frozen: Whether parameters that are not trained are saved.
        progress: Function that is called while ranks wait.
    """

    def wanted() -> SaveRequest:
        if run.mesh.info.rank == 0 and isinstance(folder, Path) and stands_for_deepspeed():
            leave_script(folder)
        request = _state(
            run,
            moment,
            client_state,
            frozen=frozen,
            apart=frozen and saver.policy.frozen_by_reference,
            stores=run.mesh.info.rank == 0,
            elsewhere=run.sharded.chunks.ties.frozen,
        )
        tell = partial(_tell, records, folder / tag, run.progress.counters.global_steps)
        return replace(request, save_latest=save_latest, when_saved=tell)

    saver.save(folder, tag, wanted, progress=progress)


def state_for_memory(run: RunState, moment: ResumeState, client_state: Mapping[str, Any]) -> SaveRequest:
    """Returns what a copy in memory holds: all that a checkpoint does; tensors of the client state once a host."""
    stores = run.mesh.info.local_rank == 0
    wanted = _state(run, moment, client_state, frozen=True, apart=False, stores=stores)
    if run.update.optimizer is None:
        return wanted
    scalars = run.update.shards.saved.leading_scalars()
    return replace(wanted, entries=[*wanted.entries, *scalars])


def _state(
    run: RunState,
    moment: ResumeState,
    client_state: Mapping[str, Any],
    *,
    frozen: bool,
    apart: bool,
    stores: bool,
    elsewhere: Collection[str] = (),
) -> SaveRequest:
    update, module, frozen_units = run.update, run.module, run.sharded.frozen
    rank = run.mesh.info.rank
    run.access.writes.take_over()
    entries = parameter_entries(
        module,
        run.units,
        everyone=run.everyone,
        frozen=frozen and not apart,
        frozen_units=frozen_units,
        elsewhere=elsewhere,
    )
    trains = update.optimizer is not None
    entries += update.shards.saved.state_entries() if trains else []
    entries += random_entries(moment.random, rank)
    state, tensors = script_state.take_apart(client_state, stores=stores)
    left_out = update.shards.histories.to_json()
    values = {
        "counters": {**run.progress.counters.to_json(), "micro_steps": moment.micro_steps},
        "optimizer": {
            "type": type(update.optimizer).__name__,
            "groups": update.shards.saved.options() if trains else [],
            **({LEFT_OUT: left_out} if left_out else {}),
        },
        "scheduler": None if update.scheduler is None else _schedule(update.scheduler),
        "loss_scale": update.loss_scale.to_json(),
        "data": moment.data,
        "client_state": state,
        "frozen": frozen,
        "config": run.config,
        MESH: {"tensor": run.mesh.spec.role_size("tensor")},
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "dsrun": __version__},
        "git": git_state() if rank == 0 else None,
    }
    check_json(values)
    entries += tensors
    return SaveRequest(
        entries=entries,
        values=values,
        rank_values={LEFT_OUT: left_out} if left_out and _speaks_for_later_stage(run) else {},
        aliases=run.names.aliases_of(frozen=frozen),
        save_latest=False,
        when_saved=_nobody,
        frozen=frozen_entries(module, everyone=run.everyone, frozen_units=frozen_units, elsewhere=elsewhere)
        if apart
        else None,
        units=_units_of(run, entries),
        order=[*_next_updates(run), *(unit.index for unit in frozen_units)],
        watched=list(module.named_parameters()),
        on_drive=run.on_drive,
    )


def _speaks_for_later_stage(run: RunState) -> bool:
    """Whether this rank is the first of a stage whose parameters rank 0 does not have."""
    return run.mesh.spec.stage_of(run.mesh.info.rank) > 0 and run.mesh.replicas().rank == 0


def _units_of(run: RunState, entries: Sequence[StateEntry]) -> list[int | None]:
    """Returns for each entry the number of the unit whose update changes it; see `SaveRequest`."""
    units = {e.name: unit.index for unit in (*run.units, *run.sharded.frozen) for e in unit.layout.extents}
    return [
        # Forward changes buffers, and what is small is not worth a wait.
        None
        if entry.role in _AT_ONCE
        else units.get(entry.name, NO_UNIT if entry.tensor.nbytes >= AT_ONCE_BYTES else None)
        for entry in entries
    ]


def _next_updates(run: RunState) -> Sequence[int]:
    """Returns the numbers of units in the order in which the next step will update them."""
    return range(len(run.units)) if run.update.away is None else run.update.away.order


def _nobody(nbytes: int, seconds: float) -> None:
    """Hears of a copy that is in memory alone."""


def _tell(records: RecordWriter, target: Place, step: int, nbytes: int, seconds: float) -> None:
    """Records and prints on rank 0 that a checkpoint is there, in whatever thread has seen it."""
    fields = {"path": absolute(target), "tag": target.name, "step": step}
    is_recorded = records.write(CHECKPOINT_EVENT, {**fields, "seconds": round(seconds, 6), "bytes": nbytes})
    doubt = "" if is_recorded else "; not recorded: a restart goes on from the checkpoint that was recorded before"
    # In one piece: the script may print meanwhile, in its own thread.
    print(f"saved {target} ({format_bytes(nbytes)}, {seconds:.1f} s){doubt}\n", end="", flush=True)


def _schedule(scheduler: Scheduler) -> dict[str, Any]:
    return {"type": type(scheduler).__name__, "state": to_json(plain_option(scheduler.state_dict()))}
