"""A checkpoint into an engine: first all ranks look at all that can be looked at, then it is taken over.

What a rank finds wrong at first has changed nothing, on any rank; what goes wrong later leaves the engine's state torn,
see [Note: a load that fails halfway] in `zero/access/torn.py`. Which checkpoint is meant is `resume.py`'s business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dsrun.checkpoint_files.blocks.read import check_sizes
from dsrun.checkpoint_files.blocks.shared import SharedBlocks
from dsrun.checkpoint_files.index.value import Index
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.places import Place
from dsrun.errors import CheckpointError, Problem

from ...activation.configured import named_generators
from ...checkpoint.format import client_state as script_state
from ...checkpoint.format.host_blocks import share_blocks
from ...checkpoint.format.json_values import from_json
from ...checkpoint.format.load import check_fit, read, read_whole
from ...mesh.agree.all_or_none import all_or_none
from ...mesh.agree.same import largest
from ...optim.states.histories import names_in
from ...zero.access.torn import StatePart
from ...zero.params.publisher import publish
from ..progress import Counters
from .entries import parameter_entries, stored_names, unit_entries, wanted_tensors, whole_shapes
from .persist import LEFT_OUT, MESH
from .randomness import RandomState, ResumedRank
from .resume_state import RNG_ROLE, random_names, restore_random, saved_random
from .run_state import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What is to be taken over besides parameters and buffers.

    Attributes:
        strict: tensors that the model does not have are an error.
        optimizer: optimizer states and hyperparameters.
        scheduler: the schedule.
        progress: counters and data position.
        random: random numbers; a checkpoint of an earlier version has none to go on with.
    """

    strict: bool
    optimizer: bool
    scheduler: bool
    progress: bool
    random: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCheckpoint:
    """A checkpoint that fits an engine, as far as can be told before its tensors are read.

    Attributes:
        index: index of the checkpoint.
        target: the tag's folder.
        frozen: whether the checkpoint has frozen parameters; if not, the model's frozen ones stay as they are.
        states: optimizer states are taken over.
        schedule: state of the schedule; None where it is not taken over.
        counters: counters of the training progress; None where they are not loaded.
        position: position in the training data; None where it is not loaded.
        random: random-number states that this rank goes on from; None where they are not loaded.
        client_state: client state that the script gave when it saved.
    """

    index: Index
    target: Place
    frozen: bool
    states: bool
    schedule: dict[str, Any] | None
    counters: dict[str, Any] | None
    position: dict[str, Any] | None
    random: Sequence[RandomState] | None
    client_state: dict[str, Any]

    @property
    def parts(self) -> StatePart:
        """What it replaces."""
        replaced = StatePart.PARAMETERS
        for part, is_replaced in (
            (StatePart.FROZEN_PARAMETERS, self.frozen),
            (StatePart.OPTIMIZER_STATES, self.states),
            (StatePart.SCHEDULE, self.schedule is not None),
            (StatePart.PROGRESS, self.counters is not None),
        ):
            if is_replaced:
                replaced |= part
        return replaced


def examine(run: RunState, target: Place, options: LoadOptions, *, copy: Index | None) -> CheckedCheckpoint:
    """Looks at a checkpoint, and changes nothing; enters no collective.

    Files are looked at by one rank each, for their sizes; what is in them is checked when it is read.

    Args:
        run: State that it is to replace.
        target: the tag's folder.
        options: options that say which state is loaded.
        copy: the index of what this host has of a copy in memory, in `target`; None: a checkpoint is read there.

    Raises:
        CheckpointError: it is damaged, or of another model, optimizer or schedule.
    """
    index = read_index(target) if copy is None else copy
    values = index.values
    frozen = bool(values.get("frozen", True))
    states = options.optimizer and run.update.optimizer is not None
    if copy is None:
        shapes = whole_shapes([*run.units, *run.sharded.frozen])
        stored = stored_names(run.module, run.units)
        wanted = wanted_tensors(run.module, whole_shapes=shapes, stored=stored, frozen=frozen)
        check_fit(index, target, wanted, strict=options.strict, elsewhere=run.names.tensors)
        check_sizes(target, index, sorted(index.files)[run.collectives.rank :: run.collectives.size])
    if states:
        _check_optimizer(run, index, target, whole=copy is None)
    schedule: dict[str, Any] | None = (
        values["scheduler"] if options.scheduler and run.update.scheduler is not None else None
    )
    if schedule is not None:
        _check_schedule(run, schedule, target)
        schedule = from_json(schedule["state"])
    position: dict[str, Any] | None = values["data"] if options.progress and run.data.loader is not None else None
    if position is not None and run.data.loader is not None:
        run.data.loader.check_state(position)
    if options.progress:
        Counters().load(values["counters"])
    state = values["client_state"]
    kept = read_whole(index, target, script_state.tensors_in(state), role=script_state.ROLE)
    return CheckedCheckpoint(
        index=index,
        target=target,
        frozen=frozen,
        states=states,
        schedule=schedule,
        counters=values["counters"] if options.progress else None,
        position=position,
        random=_random_numbers(run, index, target) if options.random else None,
        client_state=dict(script_state.put_together(state, kept)),
    )


def check_same(run: RunState, found: CheckedCheckpoint | None, *, where: str) -> None:
    """Raises where ranks have found different checkpoints; one all-reduce of two numbers.

    Args:
        run: State of this rank.
        found: checkpoint that this rank has found; None where it has found none.
        where: folder in which the checkpoint was looked for, for messages.

    Raises:
        CheckpointError: on every rank, where they are not the same.
    """
    number = 0.0 if found is None else float(1 + int.from_bytes(_digest(found.index)[:6], "big"))
    device = run.mesh.device
    most, least = largest([number, -number], run.collectives, device=device, label="checkpoint to load")
    if most != -least:
        here = "none" if found is None else f"{found.target} of step {found.index.values['counters']['global_steps']}"
        raise CheckpointError(
            f"load_checkpoint: the ranks found different checkpoints in {where}: rank {run.collectives.rank} {here}",
            hint="give every rank the same folder, which all hosts share, and name a tag",
        )


def take_over(run: RunState, found: CheckedCheckpoint, *, progress: Callable[[], None]) -> None:
    """Replaces state by what a checkpoint has; every rank must call, with the same one.

    Args:
        run: State that is replaced.
        found: checkpoint as `examine` returned it.
        progress: Function that is called while files are read.

    Raises:
        CheckpointError: on every rank, where one could not: what was to be replaced is torn then.
    """
    together = partial(
        all_or_none, collectives=run.collectives, device=run.mesh.device, label="load", where=str(found.target)
    )
    with run.access.torn.replacing(found.parts, where=str(found.target)):
        sharing = None
        if run.collectives.size > 1:
            sharing = share_blocks(found.index, run.collectives, device=run.mesh.device)
        together(partial(_read_tensors, run, found, sharing, progress=progress))
        publish(run.units, run.sharded.plan, run.sharded.store)
        for unit in run.sharded.frozen:
            run.sharded.store.refresh(unit)
        together(partial(_take_over_values, run, found))


def _take_over_values(run: RunState, found: CheckedCheckpoint) -> None:
    if found.states:
        run.update.shards.saved.set_options(found.index.values["optimizer"]["groups"])
        run.update.shards.take_histories(_left_out(run, found.index))
        run.update.loss_scale.load(found.index.values.get("loss_scale"))
    if found.schedule is not None and run.update.scheduler is not None:
        run.update.scheduler.load_state_dict(found.schedule)
    if found.counters is not None:
        run.progress.counters.load(found.counters)
    if found.position is not None and run.data.loader is not None:
        run.data.loader.load_state_dict(found.position)
    if found.random is not None:
        rank = _resumed_rank(run, found.index)
        restore_random(found.random, rank, device=run.mesh.device, named=named_generators())


def _random_numbers(run: RunState, index: Index, target: Place) -> list[RandomState] | None:
    rank = _resumed_rank(run, index)
    names = random_names(rank)
    # Asked on every rank, of its own names: a checkpoint has the states of all ranks or of none.
    if any(index.find(name, RNG_ROLE) is None for name in names):
        return None
    return saved_random(read_whole(index, target, names, role=RNG_ROLE), rank)


def _resumed_rank(run: RunState, index: Index) -> ResumedRank:
    # Checkpoints of earlier versions do not say it; nothing shared layers then.
    saved_tensor = index.values.get(MESH, {}).get("tensor", 1)
    return ResumedRank(run.mesh.info.rank, run.mesh.spec.role_size("tensor"), index.world_size, saved_tensor)


def _digest(index: Index) -> bytes:
    """Returns what tells a checkpoint from all others: what is in its files, by their checksums."""
    return hashlib.sha256(repr((sorted(index.files.items()), index.values["counters"])).encode()).digest()


def _check_optimizer(run: RunState, index: Index, target: Place, *, whole: bool) -> None:
    saved, mine = index.values["optimizer"]["type"], type(run.update.optimizer).__name__
    hint = "use the same optimizer, or pass load_optimizer_states=False"
    # A universal checkpoint of DeepSpeed's does not say; its states have to be this optimizer's, which is seen below.
    if saved not in (mine, None):
        raise CheckpointError(
            f"{target}: its optimizer states are {saved}'s; this run's optimizer is {mine}", hint=hint
        )
    groups, here = len(index.values["optimizer"]["groups"]), len(run.update.shards.saved.options())
    if groups != here:
        raise CheckpointError(f"{target}: its optimizer has {groups} groups; this run's has {here}", hint=hint)
    run.update.shards.saved.check_codes(index.state_roles())
    # Of a copy in memory this host has what its ranks need, which who reads it compares.
    without = _without_states(run, index)
    problems = [
        Problem(f"{target}: no {role} of `{name}`, which was not trained then", hint)
        for name, role in run.update.shards.saved.wanted_states(index.state_roles())
        if whole and name not in without and index.find(name, role) is None
    ]
    if problems:
        raise CheckpointError.of(problems)


def _left_out(run: RunState, index: Index) -> list[dict[str, Any]]:
    """Returns which of this rank's parameters steps have left out, see `Histories`; none in earlier versions' files."""
    saved = list(index.values["optimizer"].get(LEFT_OUT, []))
    for values in index.ranks:
        saved += values.get(LEFT_OUT, [])
    own = {extent.name for unit in run.units for extent in unit.layout.extents}
    here = [{**entry, "names": [name for name in entry["names"] if name in own]} for entry in saved]
    return [entry for entry in here if entry["names"]]


def _without_states(run: RunState, index: Index) -> set[str]:
    """Returns the parameters that no step has used so far, which may have no states yet."""
    roles = index.state_roles()
    return {name for name in names_in(_left_out(run, index)) if all(index.find(name, role) is None for role in roles)}


def _check_schedule(run: RunState, saved: Mapping[str, Any], target: Place) -> None:
    mine = type(run.update.scheduler).__name__
    if saved["type"] not in (mine, None):
        raise CheckpointError(
            f"{target}: its schedule is a {saved['type']}; this run's is a {mine}",
            hint="use the same schedule, or pass load_lr_scheduler_states=False",
        )


def _read_tensors(
    run: RunState, found: CheckedCheckpoint, sharing: SharedBlocks | None, *, progress: Callable[[], None]
) -> None:
    """Reads this rank's pieces of parameters, buffers and states to where they stay; `sharing` serves one reading."""
    shards = run.update.shards
    split = [unit for unit in run.units if unit.halves is not None]
    entries = parameter_entries(
        run.module,
        [unit for unit in run.units if unit.halves is None],
        everyone=run.everyone,
        frozen=found.frozen,
        frozen_units=run.sharded.frozen,
    )
    saved = shards.saved if found.states else None
    if saved is not None:
        shards.cut_as(_left_out(run, found.index))
        roles, without = sorted(found.index.state_roles()), _without_states(run, found.index)
        entries += saved.loadable_entries(roles, without=without)
    several = run.collectives.size > 1
    fetch = partial(read, found.index, found.target, others=several, progress=progress)
    fetch(entries, sharing=sharing)
    # What has memory of its own for as long as it is read comes one by one.
    for unit in split:
        master_N = unit.whole_master()
        fetch(unit_entries(unit, master_N))
        assert unit.halves is not None, "it was asked"
        unit.halves.part(master_N)
    for change in [] if saved is None else saved.format_changes():
        fetch(change.begin())
        change.end()
