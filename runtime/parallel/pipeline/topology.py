"""Ranks as points of a grid with named axes, by DeepSpeed's names. Pure arithmetic: no process group, no rank's own.

The last axis is the fastest: with axes pipe and data, the ranks of a stage are neighbours.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from dsrun.errors import LayoutError


class _NoPlaceError(LayoutError, ValueError, AssertionError):
    """No rank is there; also of the classes by which DeepSpeed's scripts expect it."""


class ProcessTopology:
    """A grid of ranks, numbered from 0 with the last axis fastest.

    Args:
        axes: names of the axes.
        dims: ranks along each axis.

    Attributes:
        axes: names of the axes.
        dims: ranks along each axis.
        ProcessCoord: class of coordinates, a namedtuple of the axes.
        mapping: rank of each coordinate.

    Raises:
        LayoutError: axes and sizes do not go together.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise _NoPlaceError(
                f"ProcessTopology: axes {list(axes)} have sizes {list(dims)}; expected names that differ and a size of "
                "at least 1 for each"
            )
        self.axes = axes
        self.dims = dims
        self.ProcessCoord: Any = namedtuple("ProcessCoord", axes)  # pyright: ignore[reportUntypedNamedTuple]
        points = product(*map(range, dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*point): rank for rank, point in enumerate(points)}
        self._coords: list[Any] = list(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """Returns the rank at a place.

        Args:
            coord_kwargs: place along each axis, by its name; none may be left out.

        Raises:
            LayoutError: an axis is left out or unknown, or no rank is there.
        """
        if set(coord_kwargs) != set(self.axes):
            raise _NoPlaceError(
                f"ProcessTopology.get_rank: {sorted(coord_kwargs)} are given; expected one place on each of "
                f"{list(self.axes)}",
                hint="filter_match finds ranks by some of their places",
            )
        coord = self.ProcessCoord(**coord_kwargs)
        if coord not in self.mapping:
            raise _NoPlaceError(f"ProcessTopology.get_rank: no rank is at {coord_kwargs}; sizes are {self._sizes()}")
        return self.mapping[coord]

    def get_coord(self, rank: int) -> Any:
        """Returns the places of a rank, a namedtuple with the axes' names.

        Args:
            rank: number of the rank.

        Raises:
            LayoutError: there is no such rank.
        """
        if not 0 <= rank < len(self._coords):
            raise _NoPlaceError(f"ProcessTopology.get_coord: there is no rank {rank} of {len(self._coords)}")
        return self._coords[rank]

    def get_dim(self, axis: str) -> int:
        """Returns the ranks along an axis, 0 where there is no such axis.

        Args:
            axis: name of the axis.
        """
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_axis_names(self) -> Sequence[str]:
        """Returns the names of the axes, the slowest first."""
        return self.axes

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Returns the ranks of each line along an axis; none where there is no such axis.

        Args:
            axis: name of the axis.
        """
        if axis not in self.axes:
            return []
        at = self.axes.index(axis)
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, coord in enumerate(self._coords):
            lines.setdefault((*coord[:at], *coord[at + 1 :]), []).append(rank)
        return list(lines.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Returns the ranks at some places, ascending.

        Args:
            filter_kwargs: place along each axis that counts, by its name.
        """
        return [
            rank
            for rank, coord in enumerate(self._coords)
            if all(getattr(coord, axis) == place for axis, place in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Returns the ranks that have one place along an axis, ascending.

        Args:
            axis: name of the axis.
            idx: place along it.

        Raises:
            LayoutError: there is no such axis.
        """
        if axis not in self.axes:
            raise _NoPlaceError(f"ProcessTopology.get_axis_list: there is no axis {axis!r}; there are {self._sizes()}")
        return self.filter_match(**{axis: idx})

    def get_rank_repr(
        self, rank: int, omit_axes: Iterable[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Returns the places of a rank as text: `a_01-b_00`.

        Args:
            rank: number of the rank.
            omit_axes: names of axes that are left out.
            inner_sep: text between an axis and the place on it.
            outer_sep: text between axes.
        """
        left_out = set(omit_axes)
        pairs = zip(self.axes, self.get_coord(rank), strict=True)
        return outer_sep.join(f"{axis}{inner_sep}{place:02d}" for axis, place in pairs if axis not in left_out)

    def world_size(self) -> int:
        """Returns the number of ranks."""
        return len(self._coords)

    def __str__(self) -> str:
        """Returns the rank of each coordinate."""
        return str(self.mapping)

    def _sizes(self) -> dict[str, int]:
        return dict(zip(self.axes, self.dims, strict=True))


class PipeDataParallelTopology(ProcessTopology):
    """Stages, and ranks that share one; the ranks of a stage are neighbours.

    Args:
        num_pp: stages.
        num_dp: ranks that have the same stage.
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, ranks that share one, and ranks that share a layer; the last are neighbours.

    Args:
        num_pp: stages.
        num_mp: ranks that share a layer.
        num_dp: ranks that have the same stage.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def topology_of(*, stages: int, tensor: int, ranks: int) -> ProcessTopology:
    """Returns the grid of a job's ranks in the order in which the engine divides them.

    Args:
        stages: pipeline stages.
        tensor: ranks that share each layer.
        ranks: ranks of the job.
    """
    copies = ranks // (stages * tensor)
    return (
        PipeDataParallelTopology(stages, copies)
        if tensor == 1
        else PipeModelDataParallelTopology(stages, tensor, copies)
    )
