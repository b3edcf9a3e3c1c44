"""An engine's state into a checkpoint and back: which entries and values, in which order; not in which format."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dsrun.contract import CHECKPOINT_EVENT
from dsrun.errors import CheckpointError, Problem
from dsrun.units import format_bytes

from ..checkpoint.index import Index, read_index
from ..checkpoint.json_values import from_json, to_json
from ..checkpoint.load import check_fit, read
from ..checkpoint.save import save
from ..mesh.agreement import attempt
from ..zero.publisher import publish
from .parts import EngineParts, Scheduler
from .state import Counters, parameter_entries, wanted_tensors


def save_engine(
    parts: EngineParts,
    counters: Counters,
    folder: Path,
    *,
    tag: str,
    client_state: Mapping[str, Any],
    save_latest: bool,
    frozen: bool,
) -> None:
    """Saves; see `Engine.save_checkpoint`."""
    step = parts.step
    whole = not step.plan.shard_optimizer
    entries = parameter_entries(
        parts.module, step.units, replicated=whole, frozen=frozen, frozen_units=parts.frozen_units
    )
    entries += [] if parts.optimizer is None else step.optimizer.state_entries(replicated=whole)
    started = time.perf_counter()
    target = save(
        folder,
        tag,
        entries,
        {
            "counters": counters.to_json(),
            "optimizer": {
                "type": type(parts.optimizer).__name__,
                "groups": [] if parts.optimizer is None else step.optimizer.options(),
            },
            "scheduler": None if parts.scheduler is None else _schedule(parts.scheduler),
            "loss_scale": parts.loss_scale.to_json(),
            "data": None if parts.loader is None else parts.loader.state_dict(),
            "client_state": dict(client_state),
            "frozen": frozen,
            "config": parts.config,
            "torch": torch.__version__,
        },
        collectives=parts.collectives,
        device=parts.mesh.device,
        save_latest=save_latest,
        progress=parts.heartbeat.beat,
    )
    if parts.mesh.info.rank == 0:
        seconds = time.perf_counter() - started
        size = sum(path.stat().st_size for path in target.iterdir())
        fields = {"path": str(target.absolute()), "tag": tag, "step": counters.global_steps}
        parts.records.write(CHECKPOINT_EVENT, {**fields, "seconds": round(seconds, 6), "bytes": size})
        print(f"saved {target} ({format_bytes(size)}, {seconds:.1f} s)", flush=True)


def load_engine(
    parts: EngineParts,
    counters: Counters,
    target: Path,
    *,
    strict: bool,
    optimizer: bool,
    scheduler: bool,
    progress: bool,
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

    Returns:
        the client state.
    """
    index = read_index(target)
    values = index.values
    # A checkpoint without frozen parameters leaves those of the model as they are.
    frozen = bool(values.get("frozen", True))
    with_states = optimizer and parts.optimizer is not None
    schedule: dict[str, Any] | None = values["scheduler"] if scheduler and parts.scheduler is not None else None
    check_fit(index, target, wanted_tensors(parts.module, frozen=frozen), strict=strict)
    if with_states:
        _check_optimizer(parts, index, target)
    if schedule is not None:
        _check_schedule(parts, schedule, target)
    _read_tensors(parts, index, target, states=with_states, frozen=frozen)
    if with_states:
        parts.step.optimizer.set_options(values["optimizer"]["groups"])
        parts.loss_scale.load(values.get("loss_scale"))
    if schedule is not None and parts.scheduler is not None:
        parts.scheduler.load_state_dict(from_json(schedule["state"]))
    if progress:
        counters.load(values["counters"])
        if parts.loader is not None and values["data"] is not None:
            parts.loader.load_state_dict(values["data"])
    return dict(values["client_state"])


def _schedule(scheduler: Scheduler) -> dict[str, Any]:
    return {"type": type(scheduler).__name__, "state": to_json(scheduler.state_dict())}


def _check_optimizer(parts: EngineParts, index: Index, target: Path) -> None:
    saved, mine = index.values["optimizer"]["type"], type(parts.optimizer).__name__
    hint = "use the same optimizer, or pass load_optimizer_states=False"
    if saved != mine:
        raise CheckpointError(
            f"{target}: its optimizer states are {saved}'s; this run's optimizer is {mine}", hint=hint
        )
    groups, here = len(index.values["optimizer"]["groups"]), len(parts.step.optimizer.options())
    if groups != here:
        raise CheckpointError(f"{target}: its optimizer has {groups} groups; this run's has {here}", hint=hint)
    problems = [
        Problem(f"{target}: no {role} of `{name}`, which was not trained then", hint)
        for name, role in parts.step.optimizer.wanted_states(index.state_roles())
        if (name, role) not in index.tensors
    ]
    if problems:
        raise CheckpointError.of(problems)


def _check_schedule(parts: EngineParts, saved: Mapping[str, Any], target: Path) -> None:
    mine = type(parts.scheduler).__name__
    if saved["type"] != mine:
        raise CheckpointError(
            f"{target}: its schedule is a {saved['type']}; this run's is a {mine}",
            hint="use the same schedule, or pass load_lr_scheduler_states=False",
        )


def _read_tensors(parts: EngineParts, index: Index, target: Path, *, states: bool, frozen: bool) -> None:
    """Reads this rank's pieces, then makes parameters of them; raises on every rank where one could not read."""
    step = parts.step
    whole = not step.plan.shard_optimizer
    entries = parameter_entries(
        parts.module, step.units, replicated=whole, frozen=frozen, frozen_units=parts.frozen_units
    )
    if states:
        entries += step.optimizer.loadable_entries(sorted(index.state_roles()), replicated=whole)
    failure = attempt(
        lambda: read(index, target, entries, progress=parts.heartbeat.beat),
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
