"""The job that a rank joins, and the ranks that share its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsrun.config.config import Config
from dsrun.contract.environment import RankInfo
from dsrun.contract.heartbeats import HeartbeatWriter

from ...mesh.join.gpus import choose_device
from ...mesh.join.groups import ProcessGroupMesh, make_mesh, present_backend, separate_reductions
from ...mesh.spec import DATA_AXIS, MeshSpec
from ...optim.groups import check_trainable
from .arguments import check_parallelism
from .comparison import check_same_everywhere
from .distributed import join_job
from .request import Request
from .start_report import say_once


@dataclass(frozen=True, slots=True)
class Job:
    """This process's place in the job.

    Attributes:
        info: Rank, local rank and sizes.
        heartbeat: Where this rank says what it does, for the launcher that watches it.
        say: Says something once for the whole job: the first rank does.
    """

    info: RankInfo
    heartbeat: HeartbeatWriter
    say: Callable[[str], None]


def join(request: Request) -> Job:
    """Joins the job's process group, unless that has happened.

    Raises:
        InputError: an argument says something else than the job's environment.
    """
    info = join_job(dist_init_required=request.dist_init_required)
    check_parallelism(request.mpu, request.mesh_param, world_size=info.world_size)
    return Job(info, request.heartbeat, say_once(info))


def mesh_of(request: Request, settings: Config, job: Job) -> ProcessGroupMesh:
    """Returns the ranks that share the model, which all have been given the same one.

    Enters the collectives of the agreement, and makes process groups.

    Raises:
        InputError: the backend cannot be used here.
        ModelError: nothing is trainable for the optimizer there is, or ranks were given something else.
    """
    updates = request.updates(settings)
    if updates:
        check_trainable(request.model)
    device = choose_device(present_backend(), job.info)
    spec = MeshSpec(((DATA_AXIS, job.info.world_size),))
    mesh = make_mesh(spec, job.info, device=device, observer=job.heartbeat)
    check_same_everywhere(request.model, settings, request.assignment, request.training_data, mesh, updates=updates)
    if updates:
        separate_reductions(mesh)
    return mesh
