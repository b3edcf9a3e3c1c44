"""The composition root: a model, a config and a place in the job become an engine.

The only module that knows every part.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn, optim
from torch.utils.data import Dataset

from dsrun.config.buckets import gather_budgets, resolve_buckets, tell_auto
from dsrun.config.config import Config
from dsrun.config.load import load
from dsrun.contract import BACKEND_ENV, CONFIG_ENV, RECORDS_FILE, RUN_DIR_ENV, RankInfo, resume_folder, store_nonce
from dsrun.errors import InputError, ModelError
from dsrun.heartbeats import process_writer
from dsrun.units import format_bytes, format_count

from ..activation.activate import activate
from ..activation.configured import is_configured, named_generators
from ..data.loader import TrainingLoader
from ..memory.arenas import Arenas
from ..memory.pages import give_freed_pages_back
from ..mesh.agreement import check_agreement
from ..mesh.groups import ProcessGroupMesh, choose_backend, choose_device, join, make_mesh, present_backend
from ..mesh.spec import DATA_AXIS, MeshSpec
from ..observe.memory import StatePrediction
from ..observe.records import RecordWriter
from ..optim.groups import GroupAssignment, assign_groups, check_trainable
from ..optim.registry import adopt, check_elementwise, factory_of, states_per_element
from ..optim.schedules import SCHEDULES
from ..optim.sharded import ShardOptimizer
from ..precision.configured import autocast_of, loss_scale_of, policy_of, skips_non_finite
from ..precision.policy import DTYPES, PrecisionPolicy
from ..zero.access import ParamAccess
from ..zero.build import build_store, build_units
from ..zero.frozen import join_frozen, place_frozen, whole_bytes
from ..zero.hooks import UnitHooks
from ..zero.leaves import is_leaf, mark_leaves
from ..zero.meta import has_meta, materialise
from ..zero.partition_parameters import home_of
from ..zero.plan import ZeroPlan
from ..zero.reducer import GradReducer
from ..zero.seeds import Nursery
from ..zero.slots import turns_of
from ..zero.state_dicts import watch_state_dicts
from ..zero.unit import ParamUnit
from ..zero.units import find_units
from .arguments import check_joined, check_parallelism, check_place
from .describe import hidden_size, start_record
from .engine import SCRIPT_PHASE, Engine
from .parts import EngineParts, Scheduler
from .step import StepParts
from .wrapping import check_unwrapped

_TIMEOUT_S = 1800.0

OptimizerLike = optim.Optimizer | Callable[[Any], optim.Optimizer]
SchedulerLike = Scheduler | Callable[[optim.Optimizer], Scheduler]


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
    *,
    timeout_s: float | None = None,
) -> RankInfo:
    """Joins the job's process group, unless that has happened; every rank must call.

    Args:
        dist_backend: `nccl` or `gloo`; None: what `dsrun --backend` said, else NCCL where there is a GPU.
        auto_mpi_discovery: without effect, for DeepSpeed's calls: below mpirun and srun, ranks find their place always.
        distributed_port: without effect: ranks meet where the environment says.
        verbose: without effect.
        timeout: DeepSpeed's form of `timeout_s`.
        init_method: None or `env://`.
        dist_init_required: False: the script has joined already.
        config: without effect.
        rank: -1, or what the environment says.
        world_size: -1, or what the environment says.
        timeout_s: how long to wait for the other ranks, here and in each later collective; 30 minutes by default.

    Returns:
        this process's place in the job.

    Raises:
        InputError: the backend cannot be used here, the environment is incomplete, or an argument says otherwise.
        LaunchError: the other ranks cannot be reached.
    """
    del auto_mpi_discovery, distributed_port, verbose, config
    info = RankInfo.from_env()
    check_place(info, init_method=init_method, rank=rank, world_size=world_size)
    check_joined(dist_init_required)
    if timeout_s is None:
        timeout_s = _TIMEOUT_S if timeout is None else timeout.total_seconds()
    backend = choose_backend(dist_backend or os.environ.get(BACKEND_ENV))
    join(info, backend=backend, device=choose_device(backend, info), timeout_s=timeout_s, nonce=store_nonce())
    return info


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
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Sequence[int] | None = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
) -> tuple[Engine, optim.Optimizer | None, TrainingLoader | None, Scheduler | None]:
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
        training_data: a map-style dataset to make a loader of.
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
    source = _config_source(args, config, config_params)
    heartbeat = process_writer()
    heartbeat.beat(phase="build")
    assignment = assign_groups(model, _groups_of(optimizer) or model_parameters)
    info = init_distributed(dist_init_required=dist_init_required)
    check_parallelism(mpu, mesh_param, world_size=info.world_size)
    settings = load(source, world_size=info.world_size)
    if optimizer is not None or settings.optimizer is not None:
        check_trainable(model)
    device = choose_device(present_backend(), info)
    mesh = make_mesh(MeshSpec(((DATA_AXIS, info.world_size),)), info, device=device, observer=heartbeat)
    _check_same_everywhere(model, settings, assignment, training_data, mesh)

    stage = settings.zero_optimization.stage
    plan = ZeroPlan.of_stage(stage)
    precision = policy_of(settings)
    data_axis = mesh.axes[DATA_AXIS]
    leaves = settings.zero_optimization.leaf_module
    mark_leaves(model, classes=leaves.classes, names=leaves.names, name_suffixes=leaves.name_suffixes)
    if has_meta(model):
        materialise(model, Nursery(data_axis, device=mesh.device))
    memory = Arenas()
    units = build_units(
        find_units(model),
        plan,
        data_axis,
        precision=precision,
        device=mesh.device,
        group_of=assignment.group_of,
        memory=memory,
    )
    hidden = hidden_size(model, units)
    resolved = settings if hidden is None else resolve_buckets(settings, hidden)
    budgets = gather_budgets(resolved)
    gathered = join_frozen(
        model, units, plan, budgets, data_axis, precision=precision, device=mesh.device, memory=memory
    )
    place_frozen(model, data_axis, precision=precision, device=mesh.device, cut=gathered.frozen)
    gathering = turns_of(gathered.acquired, budgets)
    store = build_store(gathered.acquired, plan, data_axis, gathering=gathering, memory=memory)
    wire = settings.communication_data_type
    reducer = GradReducer(
        units,
        data_axis,
        shard_optimizer=plan.shard_optimizer,
        shard_gradients=plan.shard_gradients,
        divide_before=float(data_axis.size) if settings.prescale_gradients else settings.gradient_predivide_factor,
        wire=None if wire is None else DTYPES[wire],
        memory=memory,
    )
    shard_optimizer = ShardOptimizer(
        [unit.owned_range(assignment.group_of) for unit in units],
        group_count=len(assignment.options),
        axis=data_axis if plan.shard_optimizer else None,
    )
    torch_optimizer = _make_optimizer(optimizer, shard_optimizer, settings, assignment)
    if torch_optimizer is not None:
        shard_optimizer.house_states(memory)
    scheduler = _make_scheduler(lr_scheduler, torch_optimizer, settings)
    assert settings.batch is not None, "the config was loaded with a world size"
    loader = None
    if training_data is not None:
        loader = TrainingLoader(
            training_data,
            micro_batch=settings.batch.micro_batch,
            rank=data_axis.rank,
            size=data_axis.size,
            collate_fn=collate_fn,
            drop_last=settings.dataloader_drop_last,
        )
    prediction = StatePrediction(
        layouts=[unit.layout for unit in units],
        has_module=[unit.module is not None for unit in units],
        compute=precision.compute,
        master=precision.master,
        states_per_element=states_per_element(torch_optimizer),
        shard_optimizer=plan.shard_optimizer,
        shard_gradients=plan.shard_gradients,
        shard_parameters=plan.shard_parameters,
        gathering=gathering,
        frozen_layouts=[unit.layout for unit in gathered.frozen],
        whole_frozen_bytes=whole_bytes(model, cut=gathered.frozen),
    )
    hooks = UnitHooks(gathered.acquired, store, reducer)
    activations = activate(  # after the units' hooks, which stand within its own
        model,
        settings.activation_checkpointing,
        skip=is_leaf,
        script_chooses=is_configured(),
        tracker=named_generators(),
        say=partial(print, flush=True) if info.rank == 0 else _say_nothing,
    )
    access = ParamAccess(
        [*units, *gathered.frozen],
        plan,
        data_axis,
        device=mesh.device,
        store=store,
        reducer=reducer,
        optimizer=shard_optimizer,
        running=hooks.running_unit,
    )
    access.settle(model)
    watch_state_dicts(model)
    give_freed_pages_back()  # of the tensors that the model was built with
    records = RecordWriter(_records_path(info))
    engine = Engine(
        EngineParts(
            module=model,
            mesh=mesh,
            collectives=data_axis,
            hooks=hooks,
            activations=activations,
            step=StepParts(
                units=units,
                plan=plan,
                collectives=data_axis,
                reducer=reducer,
                optimizer=shard_optimizer,
                store=store,
            ),
            memory=memory,
            optimizer=torch_optimizer,
            scheduler=scheduler,
            loader=loader,
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
            resume=resume_folder(),
            predicted_state_bytes=prediction.total_bytes(),
            frozen_units=gathered.frozen,
        )
    )
    engine.mpu = mpu
    if info.rank == 0:
        records.write("start", start_record(model, units, world_size=info.world_size, stage=stage))
        print(_describe(units, mesh, precision, stage=stage, state_bytes=prediction.total_bytes()), flush=True)
        if (told := tell_auto(settings, resolved)) is not None:
            print(f"dsrun: {told}, of {gathering.slot_count} gather slots", flush=True)
    heartbeat.beat(step=0, phase=SCRIPT_PHASE)
    return engine, torch_optimizer, loader, scheduler


def _config_source(
    args: Namespace | Mapping[str, Any] | None,
    config: str | Path | Mapping[str, Any] | None,
    config_params: str | Path | Mapping[str, Any] | None,
) -> str | Path | Mapping[str, Any]:
    """Returns the one config that was given, in the script, in its arguments or to the launcher."""
    words = args if isinstance(args, Mapping) else vars(args) if args is not None else {}
    given = [source for source in (config, config_params, words.get("deepspeed_config")) if source is not None]
    if len(given) > 1 and any(source != given[0] for source in given[1:]):
        raise InputError(
            f"dsrun.initialize: {len(given)} different configs were given: {', '.join(str(s)[:80] for s in given)}",
            hint="give one: config=, config_params= or args.deepspeed_config",
        )
    source = given[0] if given else os.environ.get(CONFIG_ENV)
    if source is None:
        raise InputError(
            "dsrun.initialize: no config was given",
            hint="pass config=, or start the script with `dsrun SCRIPT --config FILE`",
        )
    return source


def _groups_of(optimizer: OptimizerLike | None) -> list[dict[str, Any]] | None:
    return optimizer.param_groups if isinstance(optimizer, optim.Optimizer) else None


def _check_same_everywhere(
    model: nn.Module,
    settings: Config,
    assignment: GroupAssignment,
    training_data: Dataset[Any] | None,
    mesh: ProcessGroupMesh,
) -> None:
    params, buffers = list(model.named_parameters()), list(model.named_buffers())
    facts = {
        "the model's parameters": [
            (name, {"shape": list(p.shape), "dtype": str(p.dtype), "requires_grad": p.requires_grad})
            for name, p in params
        ],
        "where the parameters' values come from": [
            (name, {"is_meta": p.is_meta, "home": type(home_of(p)).__name__}) for name, p in params
        ],
        "the model's buffers": [(name, {"shape": list(b.shape), "dtype": str(b.dtype)}) for name, b in buffers],
        "the optimizer's groups": [(name, {"group": assignment.group_of.get(id(p))}) for name, p in params],
        "the length of training_data": len(training_data) if isinstance(training_data, Sized) else None,
        "the config": settings.raw,
    }
    check_agreement(facts, mesh.axes[DATA_AXIS], device=mesh.device)


def _make_optimizer(
    given: OptimizerLike | None, shards: ShardOptimizer, settings: Config, assignment: GroupAssignment
) -> optim.Optimizer | None:
    """Returns the optimizer over the shards: the script's, the one its function makes, or the config's."""
    if isinstance(given, optim.Optimizer):
        check_elementwise(given, allow_untested=settings.zero_allow_untested_optimizer)
        adopt(given, shards.shards_by_group())
        shards.drive(given)
        return given
    section = settings.optimizer
    if given is None and section is None:
        return None
    factory = given
    if factory is None:
        assert section is not None, "checked above"
        factory = factory_of(section.type, section.params.model_dump())
    groups = [
        {"params": params, **options}
        for params, options in zip(shards.shards_by_group(), assignment.options, strict=True)
    ]
    optimizer = factory(groups)
    check_elementwise(optimizer, allow_untested=settings.zero_allow_untested_optimizer)
    shards.drive(optimizer)
    return optimizer


def _make_scheduler(
    given: SchedulerLike | None, optimizer: optim.Optimizer | None, settings: Config
) -> Scheduler | None:
    section = settings.scheduler
    if given is None and section is None:
        return None
    if optimizer is None:
        raise ModelError(
            "lr_scheduler: there is a schedule, and no optimizer for it",
            hint="add an `optimizer` section, or pass optimizer=",
        )
    if given is None:
        assert section is not None, "checked above"
        return SCHEDULES[section.type](optimizer, **section.params.model_dump())
    return given(optimizer) if callable(given) else given


def _say_nothing(text: str) -> None:
    """What is said once for all ranks is the first one's to say."""


def _records_path(info: RankInfo) -> Path | None:
    folder = os.environ.get(RUN_DIR_ENV)
    return Path(folder) / RECORDS_FILE if folder and info.rank == 0 else None


def _describe(
    units: list[ParamUnit], mesh: ProcessGroupMesh, precision: PrecisionPolicy, *, stage: int, state_bytes: int
) -> str:
    numel = sum(param.numel() for unit in units for param in unit.params)
    ranks = f"{mesh.info.world_size} rank" + ("s" if mesh.info.world_size > 1 else "")
    dtype = str(precision.compute).removeprefix("torch.")
    return (
        f"dsrun: {ranks} ({mesh.backend}), ZeRO stage {stage}, {format_count(numel)} parameters in {len(units)} units, "
        f"{dtype}, {format_bytes(state_bytes)} of model state a rank"
    )
