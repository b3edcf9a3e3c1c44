"""The composition root: a model, a config and a place in the job become an engine.

Each line of `initialize` is a step that returns a value; what a step does stands in its own module.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn, optim
from torch.utils.data import Dataset

from dsrun.config.config import Config
from dsrun.config.load import load
from dsrun.config.text.source import ConfigSource
from dsrun.contract.environment import planned_axes, stands_for_deepspeed

from ..checkpoint.save.fence import Fence
from ..data.loader import TrainingLoader
from ..data.stream import StreamLoader
from ..layout.cuts import Cuts
from ..mesh.join.groups import ProcessGroupMesh
from ..protocols import Scheduler
from ..zero.creation.construct import outside_of_constructions
from .compose.config_notes import tell_program_config
from .compose.data import make_data
from .compose.describe import describe_before_cut
from .compose.hooks import attach
from .compose.job import Job, join
from .compose.mesh import mesh_of
from .compose.optimizer import OptimizerLike, SchedulerLike
from .compose.precision import apply_precision, cast_around_modules
from .compose.request import Request, read_request
from .compose.saving import make_saving
from .engine import Engine
from .host.tiers import open_tiers
from .model.ownership import end_earlier_engines
from .model.parts import cut_over_tensor
from .model.stages import cut_into_stages, note_class, stages_of_script, tie_uses
from .model.state_dump import tell_state
from .model.tensor_request import request_of
from .observation import observe, tell_start
from .shard import shard_model
from .update import make_update

#: What cuts a model along the axes of ranks, before units are found; it returns the parameters that it has changed. A
#: parameter stays the object that it is, for optimizers and groups know it: it gets other memory.
CUT_BY_AXES: tuple[Callable[[nn.Module, Config, ProcessGroupMesh, Callable[[str], None]], Cuts], ...] = (
    cut_over_tensor,
)


@outside_of_constructions()  # a script may call it inside `zero.Init`
def initialize(
    args: Namespace | Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: SchedulerLike | None = None,
    distributed_port: int | None = None,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: Sequence[int] | None = None,
    config_params: ConfigSource | None = None,
) -> tuple[Engine, optim.Optimizer | None, TrainingLoader | StreamLoader | None, Scheduler | None]:
    """Makes an engine that trains `model`; every rank must call with the same model and config.

    Without an optimizer it evaluates: a reference or reward model, which may be frozen as a whole, is cut at stage 3
    all the same.

    The model's parameters are taken over: they move to this rank's device, take rank 0's values, and become views of
    flat buffers. A model that was built inside `dsrun.zero.Init` or on the meta device is never whole on a rank.

    Args:
        args: a script's arguments, of which `deepspeed_config` is read.
        model: the model, built alike on every rank.
        optimizer: a torch optimizer over the model's parameters, or a function that makes one of group dicts; goes
            before the config's.
        model_parameters: parameters or group dicts for the optimizer; all trainable ones by default.
        training_data: a map-style dataset to make a loader of; or a stream, whose order is kept.
        lr_scheduler: a schedule, or a function that makes one of the optimizer; goes before the config's.
        distributed_port: DeepSpeed's argument, without effect: ranks meet at the address in the environment.
        mpu: groups of a script's parallelism; taken where its sizes are the config's, and kept as `engine.mpu`.
        dist_init_required: False: the script has joined its process group already.
        collate_fn: function that makes a batch of a list of samples, for the training loader; None for the default.
        config: path, dict or text of the config; None: the one given to `dsrun`.
        mesh_param: (ranks with samples of their own, ranks that share a sequence), for DeepSpeed's calls.
        config_params: DeepSpeed's older name of `config`.

    Returns:
        (engine, optimizer, training loader or None, schedule or None).

    Raises:
        ConfigError: the config is wrong, or none was given.
        ModelError: nothing is trainable for the optimizer there is, or model, optimizer and data do not go together.
        InputError: the backend cannot be used here, or an argument says something else than the job's environment.
    """
    del distributed_port
    request = read_request(  # every mistake that a rank finds alone
        args,
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        config=config,
        config_params=config_params,
        collate_fn=collate_fn,
        mpu=mpu,
        mesh_param=mesh_param,
        dist_init_required=dist_init_required,
    )
    job = join(request)
    settings = _settings_of(request, job)
    mesh = mesh_of(request, settings, job)  # from here on every rank has the same model and config
    end_earlier_engines(request.model)
    whole = describe_before_cut(request.model, request.assignment, settings, mesh)
    stages, partition = cut_into_stages(request.model, settings, mesh)
    precision = apply_precision(request.model, settings, mesh.device, job.say)
    chunks, cuts = tie_uses(stages, partition, settings, mesh, _parts_of(request.model, settings, mesh, job.say))
    turns = chunks.gather_turns
    tiers = open_tiers(request.model, settings, mesh, optimizer, chunk_of=turns, precision=precision, say=job.say)
    fence = Fence()
    sharded = shard_model(request, settings, mesh, cuts, chunks, precision=precision, tiers=tiers, say=job.say)
    update = make_update(request, settings, mesh, sharded, tiers, fence=fence, say=job.say)
    data = make_data(request, settings, mesh)
    predicted = sharded.prediction(update.optimizer)
    cast_around_modules(sharded)
    hooks = attach(sharded, settings, mesh, optimizer=update.shards, away=update.away, fence=fence, say=job.say)
    observation = observe(sharded, settings, mesh, predicted)
    saving = make_saving(settings, mesh, fence)
    engine = Engine(
        settings, job, mesh, observation, saving, tiers=tiers, sharded=sharded, update=update, data=data, hooks=hooks
    )
    engine.mpu = mpu
    note_class(engine, chunks)
    _save_on_signal(engine, settings)
    tell_start(sharded, settings, mesh, observation, whole=whole, heartbeat=job.heartbeat)
    tell_state(sharded, mesh, update.optimizer, predicted=predicted, say=job.say)
    return engine, update.optimizer, data.loader, update.scheduler


def _settings_of(request: Request, job: Job) -> Config:
    asked = request_of(request.model)
    settings = load(
        request.source,
        world_size=job.info.world_size,
        as_deepspeed=stands_for_deepspeed(),
        pipeline_stages=stages_of_script(request.model),
        tensor_parallel=None if asked is None else asked.terms,
        planned=planned_axes(),
    )
    tell_program_config(settings, job.info)
    return settings


def _save_on_signal(engine: Engine, settings: Config) -> None:
    if settings.checkpoint.save_on_signal is not None:
        engine.save_on_signal(settings.checkpoint.save_on_signal, settings.checkpoint.signals)


def _parts_of(model: nn.Module, settings: Config, mesh: ProcessGroupMesh, say: Callable[[str], None]) -> Cuts:
    """Returns the parameters that axes of ranks have changed."""
    return dict(chain.from_iterable(cut(model, settings, mesh, say).items() for cut in CUT_BY_AXES))
