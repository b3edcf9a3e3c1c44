"""An engine's state into a checkpoint and back: which entries and values, in which order; not in which format."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dsrun.errors import CheckpointError
from dsrun.units import format_bytes

from ..checkpoint.index import Index, read_index
from ..checkpoint.load import check_fit, read
from ..checkpoint.save import save
from ..zero.publisher import publish
from .parts import EngineParts
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
    entries = parameter_entries(parts.module, step.units, replicated=whole, frozen=frozen)
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
            "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
            "data": None if parts.loader is None else parts.loader.state_dict(),
            "client_state": dict(client_state),
            "config": parts.config,
            "torch": torch.__version__,
        },
        collectives=parts.collectives,
        device=parts.mesh.device,
        save_latest=save_latest,
    )
    if parts.mesh.info.rank == 0:
        seconds = time.perf_counter() - started
        size = sum(path.stat().st_size for path in target.iterdir())
        fields = {"step": counters.global_steps, "path": str(target), "seconds": round(seconds, 6), "bytes": size}
        parts.records.write("checkpoint", fields)
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
    check_fit(index, target, wanted_tensors(parts.module), strict=strict)
    with_states = optimizer and parts.optimizer is not None
    if with_states:
        _check_optimizer(parts, values, target)
    _read_tensors(parts, index, target, states=with_states)
    if with_states:
        parts.step.optimizer.set_options(values["optimizer"]["groups"])
    if scheduler and parts.scheduler is not None and values["scheduler"] is not None:
        parts.scheduler.load_state_dict(values["scheduler"])
    if progress:
        counters.load(values["counters"])
        if parts.loader is not None and values["data"] is not None:
            parts.loader.load_state_dict(values["data"])
    return dict(values["client_state"])


def _check_optimizer(parts: EngineParts, values: Mapping[str, Any], target: Path) -> None:
    saved, mine = values["optimizer"]["type"], type(parts.optimizer).__name__
    if saved != mine:
        raise CheckpointError(
            f"{target}: its optimizer states are {saved}'s; this run's optimizer is {mine}",
            hint="use the same optimizer, or pass load_optimizer_states=False",
        )


def _read_tensors(parts: EngineParts, index: Index, target: Path, *, states: bool) -> None:
    step = parts.step
    whole = not step.plan.shard_optimizer
    entries = parameter_entries(parts.module, step.units, replicated=whole)
    if states:
        roles = sorted(index.roles() - {"param", "buffer"})
        entries += step.optimizer.loadable_entries(roles, replicated=whole)
    read(index, target, entries)
    publish(step.units, step.plan, step.collectives, step.store)
