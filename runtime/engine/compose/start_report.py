"""The first record of a run and the first lines of its first rank. Later ones: `engine/report.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path

from dsrun.contract.environment import RUN_DIR_ENV, RankInfo
from dsrun.contract.job_paths import JobPaths
from dsrun.estimate.model.units import ModelSize
from dsrun.units import format_bytes, format_count

from ...mesh.agree.same import largest
from ...mesh.join.groups import ProcessGroupMesh
from ...observe.records import RecordWriter
from ...precision.policy import PrecisionPolicy
from ...zero.units.unit import ParamUnit
from .describe import start_record


def say_once(info: RankInfo) -> Callable[[str], None]:
    """Returns what says something on behalf of all ranks: `print` on the first one, nothing on the others."""
    return partial(print, flush=True) if info.rank == 0 else _say_nothing


def say_once_a_stage(mesh: ProcessGroupMesh, say: Callable[[str], None]) -> Callable[[str], None]:
    """Returns what says something on behalf of the ranks of this pipeline stage, and which it is.

    Args:
        mesh: ranks in their stages.
        say: function that says it where there is one stage.
    """
    if mesh.spec.stages == 1:
        return say
    stage = mesh.pipe.rank
    return (lambda text: print(f"stage {stage}: {text}", flush=True)) if mesh.replicas().rank == 0 else _say_nothing


def records_path(info: RankInfo) -> Path | None:
    """Returns where a run is recorded: in the job's folder, by the first rank; None where nothing is."""
    folder = os.environ.get(RUN_DIR_ENV)
    return JobPaths(Path(folder)).records if folder and info.rank == 0 else None


def is_recorded_for_all(mesh: ProcessGroupMesh) -> bool:
    """Whether every rank knows that the run is recorded; one all-reduce of 8 bytes, which every rank must call.

    The launcher says so to each of them, and a script may have changed the environment of one.
    """
    lacks = 0.0 if os.environ.get(RUN_DIR_ENV) else 1.0
    return largest([lacks], mesh.world, device=mesh.device, label="whether the run is recorded") == [0.0]


def open_run(
    size: ModelSize,
    units: Sequence[ParamUnit],
    mesh: ProcessGroupMesh,
    records: RecordWriter,
    *,
    precision: PrecisionPolicy,
    stage: int,
    state_bytes: int,
    auto_sizes: str | None,
) -> None:
    """Records and prints what begins; the first rank calls.

    Args:
        size: the model, with all pipeline stages.
        units: trained parameters of this rank's stage.
        mesh: the ranks.
        records: writer of the run's records, which gets the first one.
        precision: dtypes of the engine; the dtype of parameters is printed.
        stage: ZeRO stage.
        state_bytes: model state of a rank, as predicted.
        auto_sizes: text on what became of the sizes that were `"auto"`; None where no size was.
    """
    records.write("start", start_record(size, world_size=mesh.info.world_size, stage=stage))
    print(_describe(units, mesh, precision, stage=stage, state_bytes=state_bytes), flush=True)
    if auto_sizes is not None:
        print(f"dsrun: {auto_sizes}", flush=True)


def whole_numel(units: Sequence[ParamUnit]) -> int:
    """Returns the parameters of units, those whole that ranks have parts of.

    Args:
        units: trained parameters of this rank's stage.
    """
    return sum(prod(extent.whole.shape) for unit in units for extent in unit.layout.extents)


def _say_nothing(text: str) -> None:
    """What is said once for all ranks is the first one's to say."""


def _describe(
    units: Sequence[ParamUnit], mesh: ProcessGroupMesh, precision: PrecisionPolicy, *, stage: int, state_bytes: int
) -> str:
    numel = sum(param.numel() for unit in units for param in unit.params)
    whole = whole_numel(units)
    count = format_count(numel) if whole == numel else f"{format_count(numel)} of {format_count(whole)}"
    parts = f", layers cut over {mesh.tensor.size} ranks" if mesh.tensor.size > 1 else ""
    ranks = f"{mesh.info.world_size} rank" + ("s" if mesh.info.world_size > 1 else "")
    stages = f" of the first of {mesh.spec.stages} pipeline stages" if mesh.spec.stages > 1 else ""
    cut = f"{len(units)} unit" + ("s" if len(units) != 1 else "")
    dtype = str(precision.compute).removeprefix("torch.")
    return (
        f"dsrun: {ranks} ({mesh.backend}), ZeRO stage {stage}, {count} parameters{stages} "
        f"in {cut}{parts}, {dtype}, {format_bytes(state_bytes)} of model state a rank"
    )
