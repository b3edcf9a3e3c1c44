"""The grid of a job's ranks: its axes, the roles that they play, and who is whose peer. Pure arithmetic, for any size.

[Note: roles] Whoever asks for ranks asks by what they have in common, never by an axis:
- `world`: all ranks of the job. Agreement, the norm, publishing; its first rank speaks for the job.
- `replica`: ranks that hold a parameter which no axis cuts. A pipeline stage has other parameters than the next one.
- `batch`: ranks with samples of their own. The loader, the mean of losses, samples a second.
- `shard`: ranks that share out the state of a parameter which the tensor axis cuts.
- `tensor`, `pipe`, `context`, `expert`: ranks that share a layer, the layers, a sequence, the experts.
A role is a set of axes, and the peers of a rank in it are the ranks that differ from it on these axes alone. With all
axes but one of size 1, roles coincide: size 1 is a case like any other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from math import prod
from typing import Literal, get_args

from dsrun.errors import LayoutError

#: See [Note: roles]; `world` is every axis's.
Role = Literal["world", "replica", "batch", "shard", "tensor", "pipe", "context", "expert"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the grid.

    Attributes:
        name: name of the axis.
        size: ranks along it.
        roles: roles that it plays beside `world`.
        cuts: whether some parameters are cut along it: its ranks hold different elements of these.
    """

    name: str
    size: int
    roles: tuple[Role, ...] = ()
    cuts: bool = False


@dataclass(frozen=True)
class MeshSpec:
    """The grid of ranks, its slowest axis first: the last axis runs over neighbouring ranks.

    Raises:
        LayoutError: an axis has no rank, or a name twice.
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names) or any(axis.size < 1 for axis in self.axes):
            sizes = ", ".join(f"{axis.name} {axis.size}" for axis in self.axes)
            raise LayoutError(f"mesh axes are {sizes}; expected distinct names and sizes of at least 1")

    @cached_property
    def world_size(self) -> int:
        """Ranks of the grid."""
        return prod(axis.size for axis in self.axes)

    def role_axes(self, role: Role) -> tuple[str, ...]:
        """Returns the names of the axes that play a role, see [Note: roles]."""
        return tuple(axis.name for axis in self.axes if role == "world" or role in axis.roles)

    def size(self, axes: Collection[str]) -> int:
        """Returns how many ranks differ on these axes alone."""
        return prod(axis.size for axis in self.axes if axis.name in axes)

    def role_size(self, role: Role) -> int:
        """Returns how many ranks are peers in a role."""
        return self.size(self.role_axes(role))

    def wide(self, axes: Collection[str]) -> tuple[str, ...]:
        """Returns those of the axes that have several ranks, in the grid's order: views with the same are the same."""
        return tuple(axis.name for axis in self.axes if axis.size > 1 and axis.name in axes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Returns where `rank` stands on each axis."""
        coordinate: dict[str, int] = {}
        for axis in reversed(self.axes):
            rank, coordinate[axis.name] = divmod(rank, axis.size)
        assert rank == 0, "rank outside the mesh"
        return coordinate

    def rank(self, coordinate: dict[str, int]) -> int:
        """Returns the rank at a coordinate; the inverse of `coordinate`."""
        return sum(coordinate[name] * stride for name, stride in self._strides.items())

    def peers(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """Returns the ranks that differ from `rank` on these axes alone, `rank` included, ascending."""
        assert 0 <= rank < self.world_size, "rank outside the mesh"
        along = [axis for axis in self.axes if axis.name in axes]
        first = rank - sum(rank // self._strides[a.name] % a.size * self._strides[a.name] for a in along)
        steps = [range(0, axis.size * self._strides[axis.name], self._strides[axis.name]) for axis in along]
        return tuple(first + sum(step) for step in product(*steps))

    def groups(self, axes: Collection[str]) -> list[tuple[int, ...]]:
        """Returns the peers of every rank, each group once, in the same order on every rank."""
        across = [axis.name for axis in self.axes if axis.name not in axes]
        return [self.peers(rank, axes) for rank in self.peers(0, across)]

    def replica_axes(self, cut_over: Collection[str] = ()) -> tuple[str, ...]:
        """Returns the axes along which ranks hold the same elements of a parameter.

        Args:
            cut_over: axes along which they hold different ones.
        """
        return tuple(name for name in self.role_axes("replica") if name not in cut_over)

    @property
    def stages(self) -> int:
        """Number of stages that the layers are shared out to; 1 without a pipe axis."""
        return self.role_size("pipe")

    def stage_of(self, rank: int) -> int:
        """Returns the number of a rank's pipeline stage, the first layers' being 0."""
        stage, here = 0, self.coordinate(rank)
        for name in self.role_axes("pipe"):
            stage = stage * self.size((name,)) + here[name]
        return stage

    def replicas_over(self, rank: int, cut_over: Collection[str], stages: Collection[int]) -> tuple[int, ...]:
        """Returns the ranks that hold the same elements of a parameter that several stages use, ascending.

        Args:
            rank: rank that holds it.
            cut_over: axes along which ranks hold different ones.
            stages: stages that use it, the rank's own among them.
        """
        axes = (*self.replica_axes(cut_over), *self.role_axes("pipe"))
        return tuple(peer for peer in self.peers(rank, axes) if self.stage_of(peer) in stages)

    def replica_views(self) -> list[tuple[str, ...]]:
        """Returns the sets of axes whose peers hold the same elements of some parameter, as `wide` gives them.

        One for what no axis cuts, and one for each choice of axes that may.
        """
        cutting = [axis.name for axis in self.axes if axis.cuts and axis.size > 1]
        choices = [names for count in range(len(cutting) + 1) for names in combinations(cutting, count)]
        return list(dict.fromkeys(self.wide(self.replica_axes(names)) for names in choices))

    def views(self) -> list[tuple[str, ...]]:
        """Returns the sets of axes whose peers a rank meets, each once, as `wide` gives them: one group each."""
        roles = [self.wide(self.role_axes(role)) for role in ROLES]
        return list(dict.fromkeys([*roles, *self.replica_views()]))

    @cached_property
    def _strides(self) -> dict[str, int]:
        """How far apart neighbours on each axis are."""
        strides: dict[str, int] = {}
        stride = 1
        for axis in reversed(self.axes):
            strides[axis.name] = stride
            stride *= axis.size
        return strides
