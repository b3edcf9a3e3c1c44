"""What an engine is made of: values and seams only. `initialize` fills them in, the engine orders them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn, optim

from dsrun.checkpoint_files.storage.places import Place
from dsrun.config.batch import BatchSizes
from dsrun.contract.heartbeats import HeartbeatWriter
from dsrun.direct_io.counts import IoCounts

from ..activation.activate import Activations
from ..checkpoint.memory_copy.copies import MemoryCopies
from ..checkpoint.save.saver import Saver
from ..checkpoint.staging.sources import OnDrive
from ..data.loader import LoaderWishes, TrainingLoader
from ..data.stream import StreamLoader
from ..memory.arenas import Arenas
from ..memory.bus import Bus
from ..mesh.collectives import Collectives
from ..mesh.join.groups import ProcessGroupMesh
from ..observe.records import RecordWriter
from ..observe.wear import DiskWear
from ..precision.loss_scale import LossScale
from ..zero.access.torn import TornState
from ..zero.hooks.modules import UnitHooks
from ..zero.units.unit import ParamUnit
from .step import StepParts

#: Phase between calls of the engine: the script loads data, computes its loss or does what the engine does not see.
SCRIPT_PHASE = "script"


class Scheduler(Protocol):
    """What the engine asks of a learning-rate schedule: torch's, ours or the script's."""

    def step(self) -> None:
        """Counts one applied update."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns its state, for a checkpoint."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over state from a checkpoint."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What `initialize` hands to an engine.

    Attributes:
        module: the model; its parameters are views of the units' buffers.
        mesh: ranks and device.
        collectives: the data axis.
        hooks: of the units, on the module.
        step: what an optimizer step works on.
        activations: what becomes of blocks' activations; None where they are kept.
        memory: arenas of the long-lived buffers.
        bus: between the device and its host's memory; counts what crosses it.
        optimizer: torch's, over the shards; None for an engine that only evaluates.
        scheduler: stepped after each applied update.
        loader: of the training data, if it was given.
        loading: what the config wants of loaders.
        batch: micro batch, accumulation steps and their product with the ranks.
        config: the config as a plain dict.
        stage: ZeRO stage, for those who ask.
        compute: dtype of parameters, likewise.
        clipping: largest gradient norm; 0 for none.
        skip_non_finite: leave an update out where a gradient is inf or nan.
        loss_scale: by which losses are multiplied before their backward.
        cast_inputs: dtype that floating-point inputs of the module are cast to; None: they stay as they are.
        autocast: dtype of `torch.autocast` around the module's forward; None: the script's own holds.
        steps_per_print: optimizer steps between printed lines; None for none.
        records: where steps are recorded.
        heartbeat: told where this rank is, for the launcher that watches it.
        resume: checkpoint that a job which was started again goes on from; None at first.
        predicted_state_bytes: model state of this rank, as predicted.
        wear: counts what goes to disks; None where nothing does.
        drives: returns what was read from disks and written there.
        predicted_host_bytes: what of it lies in host memory, apart from the device's.
        frozen_units: units of frozen parameters; empty where every rank has them whole.
        saver: writes checkpoints, beside training or in it.
        on_drive: finds state that lies on a drive, which checkpoints take from there.
        copies: makes copies in memory; None where none are wanted, or of use.
        torn: what a load that failed has left of the state.
    """

    module: nn.Module
    mesh: ProcessGroupMesh
    collectives: Collectives
    hooks: UnitHooks
    step: StepParts
    activations: Activations | None
    memory: Arenas
    bus: Bus
    optimizer: optim.Optimizer | None
    scheduler: Scheduler | None
    loader: TrainingLoader | StreamLoader | None
    loading: LoaderWishes
    batch: BatchSizes
    config: dict[str, Any]
    stage: int
    compute: torch.dtype
    clipping: float
    skip_non_finite: bool
    loss_scale: LossScale
    cast_inputs: torch.dtype | None
    autocast: torch.dtype | None
    steps_per_print: int | None
    records: RecordWriter
    heartbeat: HeartbeatWriter
    resume: Place | None
    predicted_state_bytes: int
    predicted_host_bytes: int
    wear: DiskWear | None
    drives: Callable[[], IoCounts]
    frozen_units: Sequence[ParamUnit]
    saver: Saver
    on_drive: OnDrive
    copies: MemoryCopies | None = None
    torn: TornState = field(default_factory=TornState)
