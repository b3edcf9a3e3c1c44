"""What an engine saves with: its checkpoints, its copies in memory, and where a job that was started again goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import torch

from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.storage.registry import place_of
from dsrun.config.config import Config
from dsrun.config.sections.checkpoint import Checkpoint
from dsrun.contract.environment import memory_copy_folder, resume_folder

from ...checkpoint.format.policy import SavePolicy
from ...checkpoint.memory_copy.copies import MemoryCopies
from ...checkpoint.memory_copy.files import CopyFiles
from ...checkpoint.save.fence import Fence
from ...checkpoint.save.saver import Saver
from ...mesh.collectives import Collectives
from ...mesh.host_memory.noticeboard import noticeboard
from ...mesh.join.groups import ProcessGroupMesh
from ...mesh.join.mail import GlooMail

#: How long a copy on its way waits for another rank: less than training itself does.
_MAIL_TIMEOUT_S = 600.0
#: Of the engines of this process that are not over yet. Each has a folder of its own, or one would go on from another's
#: state; a script that is started again makes them in the same order.
_PRESENT: WeakValueDictionary[int, MemoryCopies] = WeakValueDictionary()


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
        fence: fence that keeps state unchanged while a checkpoint copies it.

    Raises:
        CheckpointError: the folder for copies is another user's.
    """
    axis, folder = mesh.world, resume_folder()
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


def policy_of_saving(section: Checkpoint) -> SavePolicy:
    """Returns what a config's section says of saving."""
    return SavePolicy(
        asynchronous=section.asynchronous,
        later=section.asynchronous and section.when_copied == "behind",
        when_busy=section.when_busy,
        keep_last=section.keep_last,
        keep_every=section.keep_every,
        timeout_s=section.timeout,
        where_tags_differ=section.tag_validation,
        frozen_by_reference=section.frozen_parameters == "reference",
    )


def memory_copies_of(every: int | None, mesh: ProcessGroupMesh, collectives: Collectives) -> MemoryCopies | None:
    """Returns what makes copies in memory, where they are wanted and of use; every rank must call.

    Enters an all-reduce of two numbers a rank; on several hosts, makes a group of all ranks.

    Args:
        every: optimizer steps between two copies; None for no copies.
        mesh: ranks and device.
        collectives: all ranks.

    Raises:
        CheckpointError: the folder for copies is another user's.
    """
    if every is None:
        return None
    folder = memory_copy_folder()
    if folder is None:
        if mesh.info.rank == 0:
            print(
                "dsrun: no copies in memory are made: nobody starts this job again (`dsrun --max-restarts N` does)",
                flush=True,
            )
        return None
    taken = [number for number, one in _PRESENT.items() if not one.is_closed]
    told = torch.zeros((2, collectives.size), dtype=torch.int64, device=mesh.device)
    told[0, collectives.rank], told[1, collectives.rank] = mesh.info.node_rank, max(taken, default=-1) + 1
    collectives.all_reduce(told.view(-1), label="hosts of the ranks").wait()
    with collectives.reading("hosts of the ranks"):
        node_of, free = told.tolist()
    number = max(free)
    mail = GlooMail(timeout_s=_MAIL_TIMEOUT_S) if len(set(node_of)) > 1 else None
    files = CopyFiles(Path(folder))
    if number:
        files = CopyFiles(files.folder / f"engine-{number}")
    copies = MemoryCopies(files, collectives, mail, spec=mesh.spec, node_of=node_of, device=mesh.device, every=every)
    _PRESENT[number] = copies
    return copies
