"""What an engine saves with: its checkpoints, its copies in memory, and where a job that was started again goes on."""

from __future__ import annotations

from dataclasses import dataclass

from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.storage.registry import place_of
from dsrun.config.config import Config
from dsrun.contract.environment import resume_folder

from ...checkpoint.memory_copy.copies import MemoryCopies
from ...checkpoint.save.fence import Fence
from ...checkpoint.save.saver import Saver
from ...mesh.host_memory.noticeboard import noticeboard
from ...mesh.join.groups import ProcessGroupMesh
from ...mesh.spec import DATA_AXIS
from ..saving.checkpoints import policy_of_saving
from ..saving.memory_copies import memory_copies_of


@dataclass(frozen=True, slots=True)
class Saving:
    """What state is written with.

    Attributes:
        saver: Writer of checkpoints, beside training or in it.
        copies: Copies in memory; None where none are wanted, or of use.
        resume: Checkpoint that a job which was started again goes on from; None at first.
    """

    saver: Saver
    copies: MemoryCopies | None
    resume: Place | None


def make_saving(settings: Config, mesh: ProcessGroupMesh, fence: Fence) -> Saving:
    """Returns what state is written with; enters the collectives of `memory_copies_of`.

    Args:
        settings: the config.
        mesh: ranks and device.
        fence: keeps state as it is while a checkpoint copies it.

    Raises:
        CheckpointError: the folder for copies is another user's.
    """
    axis, folder = mesh.axes[DATA_AXIS], resume_folder()
    resume = None if folder is None else place_of(folder)
    saver = Saver(
        axis,
        noticeboard(),
        device=mesh.device,
        policy=policy_of_saving(settings.checkpoint),
        fence=fence,
    )
    copies = memory_copies_of(settings.checkpoint.memory_copy.every, mesh, axis)
    return Saving(saver, copies, resume)
