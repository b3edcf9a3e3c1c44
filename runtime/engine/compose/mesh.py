"""The ranks that share a model, in their roles, agreed on what they were given."""

from __future__ import annotations

from dsrun.config.axes import axes_of
from dsrun.config.config import Config

from ...mesh.join.gpus import choose_device
from ...mesh.join.groups import ProcessGroupMesh, make_mesh, present_backend, separate_reductions
from ...optim.groups import check_trainable
from .comparison import check_same_everywhere
from .job import Job
from .request import Request


def mesh_of(request: Request, settings: Config, job: Job) -> ProcessGroupMesh:
    """Returns the ranks that share the model, which all have been given the same one.

    Enters the collectives of the agreement, and makes process groups.

    Raises:
        InputError: the backend cannot be used here.
        ModelError: nothing is trainable for the optimizer there is, or ranks were given something else.
    """
    updates = request.updates(settings)
    if updates:
        check_trainable(request.model, trains_none=request.trains_none)
    device = choose_device(present_backend(), job.info)
    mesh = make_mesh(
        axes_of(settings, job.info.world_size),
        job.info,
        device=device,
        observer=job.waits,
        stage_observer=job.waits.between_stages(),
    )
    check_same_everywhere(request.model, settings, request.assignment, request.training_data, mesh, updates=updates)
    if updates:
        separate_reductions(mesh)
    return mesh
