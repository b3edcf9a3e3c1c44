"""An engine's state into a checkpoint and back: which entries and values, in which order; not in which format."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dsrun import __version__
from dsrun.checkpoint_files.index import Index
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage import Place
from dsrun.checkpoint_files.storage_registry import absolute
from dsrun.contract import CHECKPOINT_EVENT
from dsrun.errors import CheckpointError, Problem
from dsrun.units import format_bytes

from ..activation.configured import named_generators
from ..checkpoint import client_state as script_state
from ..checkpoint.json_values import check_json, from_json, to_json
from ..checkpoint.load import check_fit, read, read_whole
from ..checkpoint.sources import AT_ONCE_BYTES, NO_UNIT
from ..checkpoint.under_way import Wanted
from ..mesh.agreement import attempt
from ..protocols import StateEntry
from ..zero.publisher import publish
from .git_state import git_state
from .going_on import RNG_ROLE, Moment, random_entries, random_names, take_over_random
from .parts import EngineParts, Scheduler
from .state import Counters, frozen_entries, parameter_entries, tied_names, unit_entries, wanted_tensors

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
    entries = parameter_entries(
        parts.module, step.units, replicated=whole, frozen=frozen and not apart, frozen_units=parts.frozen_units
    )
    entries += [] if parts.optimizer is None else step.optimizer.saved.state_entries(replicated=whole)
    entries += random_entries(moment.random, rank)
    state, tensors = script_state.take_apart(client_state, stores=stores)
    values = {
        "counters": {**counters.to_json(), "micro_steps": moment.micro_steps},
        "optimizer": {
            "type": type(parts.optimizer).__name__,
            "groups": [] if parts.optimizer is None else step.optimizer.saved.options(),
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


def load_engine(
    parts: EngineParts,
    counters: Counters,
    target: Place,
    *,
    strict: bool,
    optimizer: bool,
    scheduler: bool,
    progress: bool,
    random: bool,
    copy: Index | None = None,
) -> dict[str, Any]:
    """Loads; see `Engine.load_checkpoint`.

    Args:
        parts: whose state is overwritten.
        counters: likewise.
        target: the tag's folder.
        strict: tensors that the model does not have are an error.
        optimizer: take over optimizer states and hyperparameters.
        scheduler: take over the schedule.
        progress: take over counters and data position.
        random: have random numbers go on; a checkpoint of an earlier version has none to go on with.
        copy: the index of what this host has of a copy in memory, in `target`; None: a checkpoint is read there.

    Returns:
        the client state.
    """
    index = read_index(target) if copy is None else copy
    values = index.values
    # A checkpoint without frozen parameters leaves those of the model as they are.
    frozen = bool(values.get("frozen", True))
    with_states = optimizer and parts.optimizer is not None
    schedule: dict[str, Any] | None = values["scheduler"] if scheduler and parts.scheduler is not None else None
    if copy is None:
        check_fit(index, target, wanted_tensors(parts.module, frozen=frozen), strict=strict)
    if with_states:
        _check_optimizer(parts, index, target, whole=copy is None)
    if schedule is not None:
        _check_schedule(parts, schedule, target)
    position: dict[str, Any] | None = values["data"] if progress and parts.loader is not None else None
    if position is not None and parts.loader is not None:
        parts.loader.check_state(position)
    _read_tensors(parts, index, target, states=with_states, frozen=frozen)
    if with_states:
        parts.step.optimizer.saved.set_options(values["optimizer"]["groups"])
        parts.loss_scale.load(values.get("loss_scale"))
    if schedule is not None and parts.scheduler is not None:
        parts.scheduler.load_state_dict(from_json(schedule["state"]))
    if progress:
        counters.load(values["counters"])
        if position is not None and parts.loader is not None:
            parts.loader.load_state_dict(position)
    if random:
        _go_on_with_random_numbers(parts, index, target)
    state = values["client_state"]
    kept = read_whole(index, target, script_state.tensors_in(state), role=script_state.ROLE)
    return dict(script_state.put_together(state, kept))


def _go_on_with_random_numbers(parts: EngineParts, index: Index, target: Place) -> None:
    rank, saved = parts.mesh.info.rank, index.world_size
    names = random_names(rank, saved)
    # Asked on every rank, of its own names: a checkpoint has the states of all ranks or of none.
    if any(index.find(name, RNG_ROLE) is None for name in names):
        return
    failure = attempt(
        lambda: take_over_random(
            read_whole(index, target, names, role=RNG_ROLE),
            rank,
            saved,
            device=parts.mesh.device,
            named=named_generators(),
        ),
        parts.collectives,
        device=parts.mesh.device,
        of="load random numbers",
    )
    if failure is not None:
        raise failure.error or CheckpointError(
            f"{target}: rank {failure.rank} could not take over its random numbers",
            hint="see that rank's error; load another tag, or this one with load_random_state=False",
        )


def _schedule(scheduler: Scheduler) -> dict[str, Any]:
    return {"type": type(scheduler).__name__, "state": to_json(scheduler.state_dict())}


def _check_optimizer(parts: EngineParts, index: Index, target: Place, *, whole: bool) -> None:
    saved, mine = index.values["optimizer"]["type"], type(parts.optimizer).__name__
    hint = "use the same optimizer, or pass load_optimizer_states=False"
    if saved != mine:
        raise CheckpointError(
            f"{target}: its optimizer states are {saved}'s; this run's optimizer is {mine}", hint=hint
        )
    groups, here = len(index.values["optimizer"]["groups"]), len(parts.step.optimizer.saved.options())
    if groups != here:
        raise CheckpointError(f"{target}: its optimizer has {groups} groups; this run's has {here}", hint=hint)
    # Of a copy in memory this host has what its ranks need, which who reads it compares.
    problems = [
        Problem(f"{target}: no {role} of `{name}`, which was not trained then", hint)
        for name, role in parts.step.optimizer.saved.wanted_states(index.state_roles())
        if whole and index.find(name, role) is None
    ]
    if problems:
        raise CheckpointError.of(problems)


def _check_schedule(parts: EngineParts, saved: Mapping[str, Any], target: Place) -> None:
    mine = type(parts.scheduler).__name__
    if saved["type"] != mine:
        raise CheckpointError(
            f"{target}: its schedule is a {saved['type']}; this run's is a {mine}",
            hint="use the same schedule, or pass load_lr_scheduler_states=False",
        )


def _read_tensors(parts: EngineParts, index: Index, target: Place, *, states: bool, frozen: bool) -> None:
    """Reads this rank's pieces, then makes parameters of them; raises on every rank where one could not read."""
    step = parts.step
    whole = not step.plan.shard_optimizer
    split = [unit for unit in step.units if unit.halves is not None]
    entries = parameter_entries(
        parts.module,
        [unit for unit in step.units if unit.halves is None],
        replicated=whole,
        frozen=frozen,
        frozen_units=parts.frozen_units,
    )
    if states:
        entries += step.optimizer.saved.loadable_entries(sorted(index.state_roles()), replicated=whole)

    def fill() -> None:
        fetch = partial(read, index, target, others=parts.collectives.size > 1, progress=parts.heartbeat.beat)
        fetch(entries)
        # What has memory of its own for as long as it is read comes one by one.
        for unit in split:
            master_N = unit.whole_master()
            fetch(unit_entries(unit, master_N, replicated=whole))
            assert unit.halves is not None, "it was asked"
            unit.halves.part(master_N)
        for change in step.optimizer.saved.format_changes() if states else []:
            fetch(change.begin())
            change.end()

    failure = attempt(
        fill,
        parts.collectives,
        device=parts.mesh.device,
        of="load",
    )
    if failure is not None:
        raise failure.error or CheckpointError(
            f"{target}: rank {failure.rank} could not read its part; the engine's state is now a mixture",
            hint="see that rank's error, and load another tag",
        )
    publish(step.units, step.plan, step.collectives, step.store)
    for unit in parts.frozen_units:
        step.store.refresh(unit)
