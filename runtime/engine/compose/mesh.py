"""The ranks that share a model, in their roles, agreed on what they were given."""

from __future__ import annotations

from dsrun.config.axes import axes_of, coordinate_text
from dsrun.config.config import Config

from ...mesh.comms_log import CommsLog, follow_mesh
from ...mesh.join.gpus import choose_device
from ...mesh.join.groups import ProcessGroupMesh, make_mesh, present_backend, separate_reductions
from ...optim.groups import check_trainable
from ..model.tensor_request import check_group, request_of
from .arguments import check_parallelism
from .comparison import check_same_everywhere
from .job import Job
from .request import Request


def mesh_of(request: Request, settings: Config, job: Job) -> ProcessGroupMesh:
    """Returns the ranks that share the model, which all have been given the same one.

    Enters the collectives of the agreement, and makes process groups.

    Raises:
        InputError: the backend cannot be used here, or the script's own groups divide the ranks in another way.
        ModelError: nothing is trainable for the optimizer there is, or ranks were given something else.
    """
    updates = request.updates(settings)
    if updates:
        check_trainable(request.model, trains_none=request.trains_none)
    spec, rank = axes_of(settings, job.info.world_size), job.info.rank
    job.heartbeat.tell_coordinate(coordinate_text(spec, rank))
    check_parallelism(request.mpu, request.mesh_param, spec, rank=rank)
    check_group(request_of(request.model), spec, rank=rank, has_mpu=request.mpu is not None)
    device = choose_device(present_backend(), job.info)
    mesh = make_mesh(
        spec,
        job.info,
        device=device,
        observer=job.waits,
        stage_observer=job.waits.between_stages(),
    )
    check_same_everywhere(request.model, settings, request.assignment, request.training_data, mesh, updates=updates)
    if updates:
        separate_reductions(mesh)
    section = settings.comms_logger
    if not section.enabled:
        return mesh
    return follow_mesh(
        mesh,
        CommsLog(
            job.waits,
            kinds=section.kinds(),
            say=job.say if section.verbose and mesh.is_first else None,
            names_callers=section.debug,
        ),
    )
