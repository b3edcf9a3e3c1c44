"""Which rank gets dsrun's own stdin, and why another has none. Pure: opens nothing; `own_stdin` is what it gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsrun.errors import UsageError

from ..number_ranges import named_ranks
from .host_placement import Placement

#: `--stdin`: a rank; `none`; or nothing said, which means the only rank of a job, and none of several.
StdinWish = int | Literal["none"] | None


@dataclass(frozen=True, slots=True)
class StdinObstacle:
    """Why dsrun's own stdin cannot be a rank's.

    Attributes:
        reason: reason in words why dsrun's own stdin cannot be a rank's.
        way_out: advice in words on what would help.
    """

    reason: str
    way_out: str


def choose_stdin_rank(wish: StdinWish, placement: Placement, *, taken: StdinObstacle | None) -> int | None:
    """Returns the rank that gets it; None for none.

    Args:
        wish: value of `--stdin`: a rank or `none`; None where the user said nothing.
        placement: hosts and slots that the ranks go to.
        taken: reason why no rank at all can have dsrun's own stdin; None if there is no such reason.

    Raises:
        UsageError: the rank that was named cannot have it.
    """
    if wish == "none" or (wish is None and placement.world_size > 1):
        return None
    rank = wish or 0
    refusal = taken or _refusal(rank, placement)
    if wish is not None and refusal is not None:
        raise UsageError(f"`--stdin {rank}`: {refusal.reason}", hint=refusal.way_out)
    return rank if refusal is None else None


def why_no_stdin(rank: int, given_to: int | None, placement: Placement, *, taken: StdinObstacle | None) -> str:
    """Says why a rank finds an empty stdin, and what gives it dsrun's own.

    Args:
        rank: rank that finds an empty stdin.
        given_to: the rank that has it, if one has.
        placement: hosts and slots that the ranks go to.
        taken: reason why no rank at all can have dsrun's own stdin; None if there is no such reason.
    """
    refusal = taken or _refusal(rank, placement)
    if refusal is not None:
        return f"{refusal.reason}; {refusal.way_out}"
    if given_to is not None:
        return f"rank {given_to} has dsrun's own; `--stdin {rank}` gives it to rank {rank}"
    return f"`--stdin {rank}` gives it dsrun's own"


def _refusal(rank: int, placement: Placement) -> StdinObstacle | None:
    """Returns why this rank cannot have it; None where it can."""
    hosts = [host.name for host in placement.allocation.hosts for _ in range(host.slots)]
    first = 0 if placement.static is None else placement.static.node_rank * len(hosts)
    here = range(first, first + len(hosts))
    if rank not in here:
        reason = f"there is no such rank among {placement.world_size}"
        if rank < placement.world_size:
            reason = "another dsrun starts that rank"
        return StdinObstacle(reason, f"this one starts {named_ranks(here)}")
    host = hosts[rank - first]
    if host not in placement.local_hosts:
        reason = f"rank {rank} runs on host {host}, and only ranks of this machine can have dsrun's own"
        return StdinObstacle(reason, "have the script read a file, or run it here")
    return None
