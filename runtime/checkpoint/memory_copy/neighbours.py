"""Which rank keeps a second copy of which rank's state in memory. Pure arithmetic on where ranks run.

A host's memory outlives its ranks, not the host. So the second copy is on the next host; where there is one host only,
none would outlive what the first does not, and there is none.

Source: Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints" (SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsrun.mesh_spec import MeshSpec

from ...protocols import Holders


@dataclass(frozen=True, slots=True)
class Neighbours:
    """A rank's place among the copies.

    Attributes:
        here: ranks of this host, this one too, in order.
        keeper: the rank that keeps a second copy of this rank's state; None on a lone host.
        kept: ranks whose second copies this rank keeps.
    """

    here: tuple[int, ...]
    keeper: int | None
    kept: tuple[int, ...]


def neighbours_of(rank: int, node_of: Sequence[int]) -> Neighbours:
    """Returns a rank's place.

    Args:
        rank: rank to find the neighbours of.
        node_of: number of the host of each rank.
    """
    kept = tuple(other for other in range(len(node_of)) if keeper_of(other, node_of) == rank)
    return Neighbours(_ranks_of(node_of[rank], node_of), keeper_of(rank, node_of), kept)


def keeper_of(rank: int, node_of: Sequence[int]) -> int | None:
    """Returns who keeps a rank's second copy: the one of the same number on the next host."""
    nodes = sorted(set(node_of))
    if len(nodes) == 1:
        return None
    following = nodes[(nodes.index(node_of[rank]) + 1) % len(nodes)]
    there = _ranks_of(following, node_of)
    return there[_ranks_of(node_of[rank], node_of).index(rank) % len(there)]


def holders_on_host(holders: Holders, spec: MeshSpec, *, rank: int, here: Sequence[int]) -> Holders:
    """Returns the holders of a piece that run on this host.

    Args:
        holders: all holders of a piece that this rank has.
        spec: the grid of all ranks.
        rank: number of this rank in the grid.
        here: ranks of this host, this one too, in order.
    """
    mine = spec.coordinate(rank)
    unknown = set(holders.axes) - set(mine)
    assert not unknown, f"the grid of ranks has no axes {unknown}"
    same = {name: number for name, number in mine.items() if name not in holders.axes}
    found = [
        other
        for other in here
        if same.items() <= spec.coordinate(other).items()
        and (not holders.stages or spec.stage_of(other) in holders.stages)
    ]
    return Holders(holders.axes, found.index(rank), len(found), holders.stages)


def _ranks_of(node: int, node_of: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank, at in enumerate(node_of) if at == node)
