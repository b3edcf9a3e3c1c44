"""The composition root: a model, a config and a place in the job become an engine.

The only module that knows every part.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn, optim
from torch.utils.data import Dataset, IterableDataset

from dsrun.checkpoint_files.storage.registry import place_of
from dsrun.config.buckets import tell_auto
from dsrun.config.load import load
from dsrun.config.text.source import ConfigSource
from dsrun.contract.environment import resume_folder
from dsrun.contract.heartbeats import process_writer
from dsrun.direct_io.configured import io_settings
from dsrun.errors import ModelError

from ..activation.activate import activate
from ..activation.configured import is_configured, named_generators
from ..checkpoint.save.fence import Fence
from ..checkpoint.save.saver import Saver
from ..data.loader import LoaderWishes, TrainingLoader
from ..data.stream import StreamLoader
from ..memory.pages import give_freed_pages_back
from ..mesh.agree.same import largest
from ..mesh.host_memory.noticeboard import noticeboard
from ..mesh.join.gpus import choose_device
from ..mesh.join.groups import make_mesh, present_backend, separate_reductions
from ..mesh.spec import DATA_AXIS, MeshSpec
from ..observe.records import RecordWriter
from ..optim.groups import assign_groups, check_trainable
from ..optim.sharded import ShardOptimizer
from ..optim.states.format import FP32_STATES, STATE_FORMATS
from ..precision.built import changed_dtypes
from ..precision.configured import autocast_of, loss_scale_of, policy_of, skips_non_finite
from ..precision.fp8 import use_fp8
from ..precision.kept import cast_at_borders
from ..precision.linear import use_memory_efficient_linear
from ..zero.access.state_dicts import watch_state_dicts
from ..zero.access.whole import ParamAccess
from ..zero.build.construct import outside_of_constructions
from ..zero.hooks.modules import UnitHooks
from ..zero.units.leaves import is_leaf
from .compose.arguments import check_parallelism, config_source
from .compose.comparison import check_same_everywhere
from .compose.distributed import join_job
from .compose.optimizer import OptimizerLike, SchedulerLike, groups_of, make_optimizer, make_scheduler
from .compose.start_report import open_run, records_path, say_once
from .engine import Engine
from .host.build import update_on_host
from .host.disk import counts_of_drives, finder_of, wear_of
from .host.migration import MovingUpdate, moving_update, tell_prediction
from .host.residency import looks_again
from .host.tiers import open_tiers
from .ownership import check_unwrapped
from .parts import SCRIPT_PHASE, EngineParts, Scheduler
from .saving.checkpoints import policy_of_saving
from .saving.memory_copies import memory_copies_of
from .shard import shard_model
from .step import StepParts


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
        distributed_port: without effect, for DeepSpeed's calls: ranks meet where the environment says.
        mpu: groups of a script that has other parallelism; taken where that has size 1, and kept as `engine.mpu`.
        dist_init_required: False: the script has joined its process group already.
        collate_fn: for the loader.
        config: path, dict or text of the config; None: the one given to `dsrun`.
        mesh_param: (ranks, 1), for DeepSpeed's calls.
        config_params: DeepSpeed's older name of `config`.

    Returns:
        (engine, optimizer, training loader or None, schedule or None).

    Raises:
        ConfigError: the config is wrong, or none was given.
        ModelError: nothing is trainable for the optimizer there is, or model, optimizer and data do not go together.
        InputError: the backend cannot be used here, or an argument says something else than the job's environment.
    """
    del distributed_port
    if model is None:
        raise ModelError("dsrun.initialize: model is None", hint="pass model=, a torch.nn.Module")
    check_unwrapped(model)
    source = config_source(args, config, config_params)
    heartbeat = process_writer()
    heartbeat.beat(phase="build")
    groups = groups_of(optimizer)
    argument = "optimizer" if groups else "model_parameters"
    assignment = assign_groups(model, groups or model_parameters, argument=argument)
    info = join_job(dist_init_required=dist_init_required)
    check_parallelism(mpu, mesh_param, world_size=info.world_size)
    settings = load(source, world_size=info.world_size)
    updates = optimizer is not None or settings.optimizer is not None
    if updates:
        check_trainable(model)
    device = choose_device(present_backend(), info)
    mesh = make_mesh(MeshSpec(((DATA_AXIS, info.world_size),)), info, device=device, observer=heartbeat)
    check_same_everywhere(model, settings, assignment, training_data, mesh, updates=updates)
    if updates:
        separate_reductions(mesh)

    stage = settings.zero_optimization.stage
    if settings.fp8.enabled:
        use_fp8(model, settings.fp8, mesh.device)
    precision = policy_of(settings)
    for change in changed_dtypes(model, settings, precision):
        say_once(info)(change)
    data_axis = mesh.axes[DATA_AXIS]
    tiers = open_tiers(model, settings, mesh, optimizer, precision=precision, say=say_once(info))
    fence = Fence()
    sharded = shard_model(
        model,
        settings,
        assignment,
        mesh,
        precision=precision,
        tiers=tiers,
        updates=updates,
        say=say_once(info),
    )
    memory, bus, host, staying = tiers.memory, tiers.bus, tiers.host, tiers.residency
    shard_optimizer = ShardOptimizer(
        [unit.owned_range(assignment.group_of) for unit in sharded.units],
        group_count=len(assignment.options),
        axis=data_axis if sharded.plan.shard_optimizer else None,
        stays=[not unit.is_away for unit in sharded.units],
        fence=fence,
    )
    torch_optimizer = make_optimizer(optimizer, shard_optimizer, settings, assignment)
    away = None
    if torch_optimizer is not None:
        pool = host.pool_of(copied=False) if host is not None and sharded.leaving else None
        form = STATE_FORMATS[settings.zero_optimization.offload_optimizer.state_format]
        shard_optimizer.house_states(
            memory, pool, away=sharded.disk, form=form if sharded.leaving else FP32_STATES, moves=looks_again(settings)
        )
        if host is not None and staying is not None and sharded.leaving:
            on_host = partial(
                update_on_host,
                optimizer=shard_optimizer,
                host=host,
                collectives=data_axis,
                settings=settings,
                memory=memory,
                say=say_once(info),
                fence=fence,
            )
            moves = looks_again(settings)
            away = moving_update(sharded, staying, shard_optimizer, memory, bus, on_host) if moves else on_host(sharded)
    scheduler = make_scheduler(lr_scheduler, torch_optimizer, settings)
    assert settings.batch is not None, "the config was loaded with a world size"
    loading = LoaderWishes(
        end="drop" if settings.dataloader_drop_last else "carry",
        seed=settings.dataloader_seed,
        workers=settings.dataloader_num_workers,
    )
    loader = None
    if isinstance(training_data, IterableDataset):
        loader = StreamLoader(
            training_data,
            micro_batch=settings.batch.micro_batch,
            rank=data_axis.rank,
            size=data_axis.size,
            collate_fn=collate_fn,
            wishes=loading,
        )
    elif training_data is not None:
        loader = TrainingLoader(
            training_data,
            micro_batch=settings.batch.micro_batch,
            rank=data_axis.rank,
            size=data_axis.size,
            collate_fn=collate_fn,
            wishes=loading,
            pin_for=mesh.device,
        )
    predicted = sharded.prediction(torch_optimizer)
    state_bytes = predicted.total_bytes()
    if stage == 3 and settings.torch_autocast.enabled and settings.zero_optimization.memory_efficient_linear:
        use_memory_efficient_linear(model)
    cast_at_borders(model, sharded.kept, precision.compute)
    hooks = UnitHooks(sharded.acquired, sharded.store, sharded.reducer)
    activations = activate(  # after the units' hooks, which stand within its own
        model,
        settings.activation_checkpointing,
        skip=is_leaf,
        script_chooses=is_configured(),
        tracker=named_generators(),
        say=say_once(info),
        io=io_settings(settings.aio),
        rank=info.rank,
        agree=partial(largest, collectives=data_axis, device=mesh.device, of="measured blocks") if stage == 3 else list,
    )
    access = ParamAccess(
        [*sharded.units, *sharded.frozen],
        sharded.plan,
        data_axis,
        device=mesh.device,
        store=sharded.store,
        reducer=sharded.reducer,
        optimizer=shard_optimizer,
        running=hooks.running_unit,
        read_released=hooks.read_released,
        settle=lambda: None if away is None else away.settle(),
        fence=fence,
        compares=settings.zero_optimization.enable_sanity_checks,
    )
    access.settle(model)
    watch_state_dicts(model)
    give_freed_pages_back()  # of the tensors that the model was built with
    records = RecordWriter(records_path(info))
    engine = Engine(
        EngineParts(
            module=model,
            mesh=mesh,
            collectives=data_axis,
            hooks=hooks,
            activations=activations,
            step=StepParts(
                units=sharded.units,
                plan=sharded.plan,
                collectives=data_axis,
                reducer=sharded.reducer,
                optimizer=shard_optimizer,
                store=sharded.store,
                writes=access.writes,
                away=away,
            ),
            memory=memory,
            bus=bus,
            optimizer=torch_optimizer,
            scheduler=scheduler,
            loader=loader,
            loading=loading,
            batch=settings.batch,
            config=settings.raw,
            stage=stage,
            compute=precision.compute,
            clipping=settings.gradient_clipping,
            skip_non_finite=skips_non_finite(settings),
            loss_scale=loss_scale_of(settings),
            cast_inputs=precision.compute if settings.fp16.enabled and settings.fp16.auto_cast else None,
            autocast=autocast_of(settings),
            steps_per_print=settings.steps_per_print,
            records=records,
            heartbeat=heartbeat,
            resume=None if (resume := resume_folder()) is None else place_of(resume),
            predicted_state_bytes=state_bytes,
            predicted_host_bytes=predicted.host_bytes(),
            wear=wear_of(sharded.disk, sharded.slices_on_disk, settings, records, rank=info.rank),
            drives=partial(counts_of_drives, sharded.disk, sharded.slices_on_disk),
            frozen_units=sharded.frozen,
            saver=Saver(
                data_axis,
                noticeboard(),
                device=mesh.device,
                policy=policy_of_saving(settings.checkpoint),
                fence=fence,
            ),
            on_drive=finder_of(sharded.disk, sharded.slices_on_disk),
            copies=memory_copies_of(settings.checkpoint.memory_copy.every, mesh, data_axis),
            torn=access.torn,
        )
    )
    engine.mpu = mpu
    if isinstance(away, MovingUpdate):
        away.moved = tell_prediction(engine, torch_optimizer)
    if settings.checkpoint.save_on_signal is not None:
        engine.save_on_signal(settings.checkpoint.save_on_signal, settings.checkpoint.signals)
    told = tell_auto(settings, sharded.settings)
    open_run(
        model,
        sharded.units,
        mesh,
        records,
        precision=precision,
        stage=stage,
        state_bytes=state_bytes,
        auto_sizes=None if told is None else f"{told}, of {sharded.gathering.slot_count} gather slots",
    )
    heartbeat.beat(step=0, phase=SCRIPT_PHASE)
    return engine, torch_optimizer, loader, scheduler
