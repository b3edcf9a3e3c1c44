"""What an engine is made of: a component for each thing that it does, made of the values of `initialize`.

A component knows other components and values that it is given. It never keeps the engine, which ends when nothing
refers to it any more. Those that count share one `Progress`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsrun.config.config import Config

from ..mesh.join.groups import ProcessGroupMesh
from ..observe.allocation_history import wanted_history
from ..observe.flops.peaks import peak_flops
from ..observe.flops.step_flops import StepFlops
from ..observe.flops.step_profile import StepProfile
from ..observe.memory_watch import MemoryWatch
from ..observe.peaks import PeakSummary
from ..observe.steps.figures import StepFigures, memory_by_tier
from ..observe.steps.phase_times import phase_times_of
from ..observe.steps.script_figures import ScriptFigures
from ..observe.steps.spread import SpreadOfSteps
from ..observe.wait_report import STEPS_PER_RECORD, WaitReport
from ..precision.configured import product_dtype_of
from .compose.data import Data
from .compose.hooks import Hooks
from .compose.job import Job
from .compose.saving import Saving
from .compose.start_report import is_recorded_for_all
from .generation import Generation
from .host.disk import finder_of
from .host.tiers import Tiers
from .memory_queries import MemoryQueries
from .model.guard import ModelGuard
from .model.sharded import ShardedModel
from .observation import Observation, step_profile
from .offload_states import OffloadedStates
from .progress import Progress
from .report import StepReport
from .saving.checkpoints import Checkpoints
from .saving.export import WholeWeights
from .saving.memory_copies import CopiesInMemory
from .saving.on_signal import SaveOnSignal
from .saving.over_stages import names_over_stages
from .saving.resume_state import LastMoment
from .saving.run_state import RunState
from .training.backward import Backwards
from .training.check import TrainingCheck
from .training.global_step import GlobalSteps
from .training.scheduled import ScheduledBatches
from .training.script_backward import ScriptBackwards
from .update import Update, step_parts
from .watchers import StepWatcher, make_watchers


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Components of an engine.

    Attributes:
        guard: Guard of the model, which finds parameters that were changed behind the engine's back.
        check_trains: Function that refuses a call while the engine cannot train.
        backwards: Backwards of the engine, and the count of those of scripts.
        script: Backwards that scripts run themselves.
        scheduled: Whole global batches, by a schedule.
        steps: Optimizer steps.
        report: Lines and records of each step.
        script_figures: Figures that the script logs.
        flops: Counter of the operations of forwards; None where the run is not recorded.
        profile: Table of one step's arithmetic, by module.
        memory: Bytes that this rank holds, by owner.
        memory_watch: Samples of memory during steps.
        peaks: Summary of the peaks of memory, told at the end.
        states: States that are in host memory for a while.
        moment: Random numbers and position in the data at the last update.
        checkpoints: Checkpoints on disks and in object stores.
        copies: Copies of the state in memory.
        weights: The weights as a whole, in and out.
        generation: The model's `generate` with the weights as a whole.
        on_signal: The checkpoint and the end that a signal asks for.
        watchers: Watchers of each step.
    """

    guard: ModelGuard
    check_trains: TrainingCheck
    backwards: Backwards
    script: ScriptBackwards
    scheduled: ScheduledBatches
    steps: GlobalSteps
    report: StepReport
    script_figures: ScriptFigures
    flops: StepFlops | None
    profile: StepProfile
    memory: MemoryQueries
    memory_watch: MemoryWatch
    peaks: PeakSummary
    states: OffloadedStates
    moment: LastMoment
    checkpoints: Checkpoints
    copies: CopiesInMemory
    weights: WholeWeights
    generation: Generation
    on_signal: SaveOnSignal
    watchers: tuple[StepWatcher, ...]

    def forget_batch(self) -> None:
        """Forgets what was counted of a global batch that is given up: losses, tokens, operations and forwards."""
        self.report.forget_losses()
        self.backwards.forget_forwards()
        self.script.forget()
        self.profile.forget()
        if self.flops is not None:
            self.flops.take_step()


def make_components(
    settings: Config,
    job: Job,
    mesh: ProcessGroupMesh,
    observation: Observation,
    saving: Saving,
    *,
    progress: Progress,
    tiers: Tiers,
    sharded: ShardedModel,
    update: Update,
    data: Data,
    hooks: Hooks,
) -> Components:
    """Returns the components of an engine; enters one all-reduce of 8 bytes over the world.

    Args:
        settings: the config.
        job: this process's place in the job.
        mesh: ranks and device.
        observation: records, and the bytes that were predicted.
        saving: writer of checkpoints and of copies in memory.
        progress: place in training of this rank; components that count share it.
        tiers: memory that state lives in.
        sharded: the model.
        update: the optimizer, the schedule and the loss scale.
        data: batches of this rank.
        hooks: hooks on the model.
    """
    device, records, access, heartbeat = mesh.device, observation.records, hooks.access, job.heartbeat
    guard = ModelGuard(sharded.module)
    states = OffloadedStates(
        device, tiers, update, reducer=sharded.reducer, writes=access.writes, fence=saving.saver.fence
    )
    check_trains = TrainingCheck(update, access.torn, states)

    # What is saved and loaded.
    ties = sharded.chunks.ties
    names = names_over_stages(sharded.module, sharded.units, mesh, further=ties.names, frozen=ties.frozen)
    run = RunState(
        mesh=mesh,
        sharded=sharded,
        names=names,
        update=update,
        data=data,
        access=access,
        progress=progress,
        config=settings.raw,
        on_drive=finder_of(sharded.disk, sharded.slices_on_disk),
    )
    moment = LastMoment(device, data.loader, progress)
    copies = CopiesInMemory(run, saving.copies, moment, heartbeat=heartbeat, records=records)
    checkpoints = Checkpoints(
        run,
        saving,
        moment,
        copies,
        hooks=hooks.units,
        guard=guard,
        heartbeat=heartbeat,
        records=records,
        check_states=states.check_here,
    )

    # What is told.
    memory = MemoryQueries(
        mesh, tiers, sharded, update, observation.predicted, saver=saving.saver, copies=copies, states=states
    )
    memory_watch = MemoryWatch(
        records,
        rank=mesh.info.rank,
        device=device,
        history=wanted_history(device=device, rank=mesh.info.rank),
    )
    peaks = PeakSummary(
        records, rank=mesh.info.rank, device=device, predicted_state_bytes=observation.predicted.total_bytes()
    )
    is_recorded = is_recorded_for_all(mesh)
    flops = _step_flops(job, mesh, sharded, hooks) if is_recorded else None
    figures_of_script = ScriptFigures(records, is_first=mesh.is_first)
    report = _step_report(
        settings,
        job,
        mesh,
        observation,
        sharded=sharded,
        update=update,
        hooks=hooks,
        script=figures_of_script,
        is_recorded=is_recorded,
    )
    profile = step_profile(sharded, settings, mesh)

    watchers = make_watchers(settings, job, mesh, update, kinds=memory.kinds)

    # What trains.
    step = step_parts(sharded, update, mesh, writes=access.writes, same=hooks.same)
    backwards = Backwards(
        mesh,
        step,
        hooks.units,
        update,
        progress,
        guard=guard,
        memory=memory,
        memory_watch=memory_watch,
        report=report,
        heartbeat=heartbeat,
    )
    steps = GlobalSteps(
        mesh,
        step,
        update,
        progress,
        guard=guard,
        arenas=tiers.memory,
        memory=memory,
        memory_watch=memory_watch,
        peaks=peaks,
        report=report,
        flops=flops,
        profile=profile,
        watchers=watchers,
    )
    return Components(
        guard=guard,
        check_trains=check_trains,
        backwards=backwards,
        script=ScriptBackwards(
            mesh, hooks.units, sharded.reducer, backwards, progress, report=report, check=check_trains
        ),
        scheduled=ScheduledBatches(
            sharded,
            settings,
            mesh,
            backwards=backwards,
            guard=guard,
            progress=progress,
            report=report,
            profile=profile,
            memory=memory,
            memory_watch=memory_watch,
            heartbeat=heartbeat,
            hooks=hooks.units,
            check=check_trains,
            flops=flops,
        ),
        steps=steps,
        report=report,
        script_figures=figures_of_script,
        flops=flops,
        profile=profile,
        memory=memory,
        memory_watch=memory_watch,
        peaks=peaks,
        states=states,
        moment=moment,
        checkpoints=checkpoints,
        copies=copies,
        weights=WholeWeights(mesh, sharded, access, names),
        generation=Generation(sharded, mesh, hooks.units),
        on_signal=SaveOnSignal(mesh, progress),
        watchers=watchers,
    )


def _step_flops(job: Job, mesh: ProcessGroupMesh, sharded: ShardedModel, hooks: Hooks) -> StepFlops:
    """Returns what counts the operations of this rank's forwards."""
    return StepFlops(
        sharded.chunks.stages.modules_of,
        say=job.say,
        tensor_ranks=mesh.tensor.size,
        plan_of=lambda: None if hooks.activations is None else hooks.activations.solution,
    )


def _step_report(
    settings: Config,
    job: Job,
    mesh: ProcessGroupMesh,
    observation: Observation,
    *,
    sharded: ShardedModel,
    update: Update,
    hooks: Hooks,
    script: ScriptFigures,
    is_recorded: bool,
) -> StepReport:
    """Returns what tells of each step; it follows the phases of this rank.

    Args:
        settings: the config.
        job: this process's place in the job.
        mesh: ranks and device.
        observation: records, and the bytes on drives.
        sharded: the model.
        update: the schedule, which may know the steps of the run.
        hooks: hooks on the model.
        script: figures that the script logs.
        is_recorded: whether the run is recorded; the same on every rank.
    """
    device, records = mesh.device, observation.records
    phases = phase_times_of(device)
    job.heartbeat.follow_phases(phases.enter)
    spread = None
    if is_recorded:
        spread = SpreadOfSteps(
            STEPS_PER_RECORD, records, memory=lambda: memory_by_tier(device, on_drives=observation.on_drives())[1]
        )
    peak = peak_flops(device, product_dtype_of(settings))
    has_losses = mesh.counts_samples(sharded.chunks.stages.rank_of[-1])
    return StepReport(
        records,
        data_ranks=mesh.batch.size,
        # Only for the records.
        counts_tokens=is_recorded and mesh.counts_samples(sharded.chunks.stages.rank_of[0]),
        counts_labels=is_recorded and has_losses,
        counts_losses=has_losses,
        tells=mesh.is_first,
        steps_per_print=settings.steps_per_print,
        device=device,
        on_drives=observation.on_drives,
        total_steps=getattr(update.scheduler, "total_num_steps", None),
        figures=StepFigures(phases, job.waits, moved=mesh.bytes_by_axis, spread=spread),
        script=script,
        peak_flops=None if peak is None else peak * mesh.info.world_size,
        times_steps=settings.wall_clock_breakdown,
        wear=observation.wear,
        waits=WaitReport(job.waits, mesh.world, records, device=device, is_recorded=is_recorded, spread=spread),
        same=hooks.same,
    )
