"""Axes of the rank grid and coordinates in it. Pure arithmetic for any world size: no process group here."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dsrun.errors import LayoutError

#: Ranks that hold copies, or ZeRO slices, of the same parameters.
DATA_AXIS = "data"


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """Named axes of the rank grid, slowest first: the last axis runs over neighbouring ranks.

    Raises:
        LayoutError: an axis has no rank, or a name twice.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names) or any(size < 1 for _, size in self.axes):
            raise LayoutError(f"mesh axes are {self.axes}; expected distinct names and sizes of at least 1")

    @property
    def world_size(self) -> int:
        """Ranks of the grid."""
        return prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Returns the number of ranks along `axis`."""
        return dict(self.axes)[axis]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Returns where `rank` stands on each axis."""
        coordinate: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, coordinate[name] = divmod(rank, size)
        assert rank == 0, "rank outside the mesh"
        return coordinate

    def rank(self, coordinate: dict[str, int]) -> int:
        """Returns the rank at a coordinate; the inverse of `coordinate`."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinate[name]
        return rank

    def peers(self, rank: int, axis: str) -> list[int]:
        """Returns the ranks that differ from `rank` on `axis` alone, `rank` included, in order of that axis."""
        here = self.coordinate(rank)
        return [self.rank({**here, axis: index}) for index in range(self.size(axis))]

    def groups(self, axis: str) -> list[list[int]]:
        """Returns every group of `axis`, in the same order on every rank."""
        return [self.peers(rank, axis) for rank in range(self.world_size) if self.coordinate(rank)[axis] == 0]
