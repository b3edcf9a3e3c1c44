"""Schedules of an engine's global batches, with their communication: of training as configured, and of evaluation."""

from __future__ import annotations

from dsrun.errors import ModelError
from dsrun.pipeline_schedules.actions import Action, Kind, Schedule
from dsrun.pipeline_schedules.communication import with_communication
from dsrun.pipeline_schedules.generate import ScheduleName, make_schedule
from dsrun.pipeline_schedules.zero_actions import with_zero


def computations(name: ScheduleName, rank_of: tuple[int, ...], micros: int) -> Schedule:
    """Returns what is computed in a global batch that trains, without messages and without what ZeRO does.

    Args:
        name: name of the schedule; `zbv`, which takes two chunks a rank, is 1f1b for a model that is not cut.
        rank_of: stage of each chunk of the model.
        micros: number of micro batches.

    Raises:
        ModelError: the schedule wants the chunks on other stages.
    """
    ranks = max(rank_of) + 1
    name = "1f1b" if name == "zbv" and rank_of == (0,) else name
    made = make_schedule(name, ranks=ranks, micros=micros, virtual=len(rank_of) // ranks)
    if made.rank_of != rank_of:
        raise ModelError(
            f"model: its chunks lie on stages {list(rank_of)}, and the schedule `{name}` wants them on "
            f"{list(made.rank_of)}",
            hint="give PipelineModule the virtual_stages and the placement of the schedule",
        )
    return made


def training_schedule(name: ScheduleName, rank_of: tuple[int, ...], micros: int, *, gather_sets: int = 0) -> Schedule:
    """Returns the schedule of a global batch that trains.

    Args:
        name: name of the schedule.
        rank_of: stage of each chunk of the model.
        micros: number of micro batches.
        gather_sets: chunks of a rank whose parameters may be gathered at once, each for its forwards and again for its
            backwards; 0: parameters are there.

    Raises:
        ModelError: the schedule wants the chunks on other stages.
    """
    made = computations(name, rank_of, micros)
    return with_communication(with_zero(made, parameters="phases" if gather_sets else "never", ahead=gather_sets > 1))


def evaluation_schedule(rank_of: tuple[int, ...], micros: int, *, gather_sets: int = 0) -> Schedule:
    """Returns forwards alone: each chunk takes all micro batches, one after the other.

    Args:
        rank_of: stage of each chunk of the model.
        micros: number of micro batches.
        gather_sets: chunks of a rank whose parameters may be gathered at once; 0: parameters are there.
    """
    actions = tuple(
        tuple(
            Action(Kind.FORWARD, chunk, micro)
            for chunk, owner in enumerate(rank_of)
            if owner == rank
            for micro in range(micros)
        )
        for rank in range(max(rank_of) + 1)
    )
    made = Schedule("forward", micros, rank_of, actions)
    if gather_sets:
        made = with_zero(made, parameters="phases", ahead=gather_sets > 1, reduces=False)
    return with_communication(made)
