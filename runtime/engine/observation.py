"""What is told of a run: its records, the wear of its drives, and the bytes it was predicted to take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dsrun.config.buckets import tell_auto
from dsrun.config.config import Config
from dsrun.contract.environment import training_engines
from dsrun.contract.heartbeats import SCRIPT_PHASE, HeartbeatWriter
from dsrun.direct_io.counts import IoCounts
from dsrun.estimate.model.units import ModelSize

from ..mesh.join.groups import ProcessGroupMesh
from ..observe.flops.peaks import peak_flops
from ..observe.flops.step_profile import ProfileOptions, StepProfile
from ..observe.memory import StatePrediction
from ..observe.records import RecordWriter
from ..observe.wear import DiskWear
from ..precision.configured import product_dtype_of
from .compose.config_notes import record_monitors, record_program_config
from .compose.describe import describe_units
from .compose.start_report import open_run, records_path
from .host.disk import bytes_on_drives, counts_of_drives, wear_of
from .model.sharded import ShardedModel
from .model.stage_report import PIPELINE_EVENT, pipeline_line, pipeline_record


@dataclass(frozen=True, slots=True)
class Observation:
    """What is told of a run.

    Attributes:
        records: Writer of the steps' records.
        wear: Counts of what goes to drives; None where nothing does.
        drives: Function that returns the counts of reads and writes of drives.
        on_drives: Function that returns the bytes of this rank's files on drives.
        predicted: Model state of this rank between steps, as predicted.
    """

    records: RecordWriter
    wear: DiskWear | None
    drives: Callable[[], IoCounts]
    on_drives: Callable[[], int]
    predicted: StatePrediction


def observe(
    sharded: ShardedModel,
    settings: Config,
    mesh: ProcessGroupMesh,
    predicted: StatePrediction,
) -> Observation:
    """Returns what is told of a run; the first rank opens the records.

    Args:
        sharded: the model.
        settings: the config.
        mesh: ranks and device.
        predicted: model state of a rank between steps.
    """
    records = RecordWriter(records_path(mesh.info), engine=training_engines())
    wear = wear_of(sharded.disk, sharded.slices_on_disk, settings, records, rank=mesh.info.rank)
    drives = partial(counts_of_drives, sharded.disk, sharded.slices_on_disk)
    on_drives = partial(bytes_on_drives, sharded.disk, sharded.slices_on_disk)
    return Observation(records, wear, drives, on_drives, predicted)


def tell_start(
    sharded: ShardedModel,
    settings: Config,
    mesh: ProcessGroupMesh,
    observation: Observation,
    *,
    whole: ModelSize | None,
    heartbeat: HeartbeatWriter,
) -> None:
    """Records and prints, on the first rank, what begins; each rank tells the launcher its stage and that it trains.

    Args:
        sharded: the model.
        settings: the config.
        mesh: ranks and device.
        observation: writer of records, and the model state that was predicted.
        whole: description of a model in pipeline stages, on the first rank; None: this rank has the whole model.
        heartbeat: writer of what this rank does.
    """
    if mesh.is_first:
        told = tell_auto(settings, sharded.settings)
        open_run(
            describe_units(sharded.module, sharded.units) if whole is None else whole,
            sharded.units,
            mesh,
            observation.records,
            precision=sharded.precision,
            stage=settings.zero_optimization.stage,
            state_bytes=observation.predicted.total_bytes(),
            auto_sizes=None if told is None else f"{told}, of {sharded.gathering.slot_count} gather slots",
        )
    chunks = sharded.chunks
    if mesh.spec.stages > 1 and chunks.partition is not None:
        record = pipeline_record(chunks.stages, chunks.partition, settings)
        heartbeat.tell_stage(mesh.pipe.rank, mesh.pipe.size, schedule_wait=record["bubble"])
        if mesh.is_first:
            observation.records.write(PIPELINE_EVENT, record)
            print(pipeline_line(record), flush=True)
    else:
        heartbeat.tell_stage(0, 0, schedule_wait=0.0)  # an engine before this one may have had stages
    record_program_config(settings, observation.records)
    if mesh.is_first:
        record_monitors(settings, observation.records, is_recorded=records_path(mesh.info) is not None)
    heartbeat.beat(step=0, phase=SCRIPT_PHASE)


def step_profile(sharded: ShardedModel, settings: Config, mesh: ProcessGroupMesh) -> StepProfile:
    """Returns the profile that the config's `flops_profiler` asks for: of the first rank, which stands for the others.

    Args:
        sharded: the model.
        settings: the config.
        mesh: ranks and device.
    """
    section = settings.flops_profiler
    options = None
    if section.enabled and mesh.is_first:
        options = ProfileOptions(
            step=section.profile_step,
            module_depth=section.module_depth,
            top_modules=section.top_modules,
            detailed=section.detailed,
            output_file=section.output_file,
        )
    facts = {"ranks": str(mesh.info.world_size), "ranks with samples of their own": str(mesh.batch.size)}
    if mesh.tensor.size > 1:
        facts["ranks that share each layer"] = str(mesh.tensor.size)
    if mesh.pipe.size > 1:
        facts["pipeline stage that is profiled"] = f"{mesh.pipe.rank} of {mesh.pipe.size}"
    facts["ZeRO stage"] = str(settings.zero_optimization.stage)
    return StepProfile(
        sharded.module,
        options,
        facts=facts,
        peak=peak_flops(mesh.device, product_dtype_of(settings)) if options is not None else None,
        say=partial(print, flush=True),
    )
