"""Parts of parameters: put together over ranks, and read out of whole ones; any boxes, any ranges."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from dsrun.checkpoint_files.index.region import TensorBoxes
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.styles import Deal, boxes
from dsrun.runtime.zero.access.over_axes import joined, read_part

#: Shape of a whole tensor, dim that is cut, and how its length is dealt to the ranks.
CUTS = [
    pytest.param((7,), 0, Deal(), id="bias"),
    pytest.param((7, 5), 0, Deal(), id="column"),
    pytest.param((5, 7), 1, Deal(), id="row"),
    pytest.param((16, 5), 0, Deal(2), id="packed column"),
    pytest.param((5, 16), 1, Deal(2), id="packed row"),
    pytest.param((14, 3), 0, Deal((8, 3, 3)), id="queries, keys and values"),
    pytest.param((3, 12, 5), 1, Deal(2), id="packed experts"),
    pytest.param((3, 5, 7), 2, Deal(), id="experts by row"),
    pytest.param((12, 5), 0, Deal(1, groups=4), id="heads"),
]


def whole_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    numel = int(torch.tensor(shape).prod())
    return torch.arange(numel, dtype=torch.float32).to(dtype).view(shape)


def parts_of(shape: tuple[int, ...], dim: int, deal: Deal, *, size: int) -> tuple[list[TensorBoxes], list[Tensor]]:
    """Returns each rank's boxes, and its part as a model has it."""
    runs = [deal.runs(shape[dim], rank=rank, size=size) for rank in range(size)]
    whole = whole_of(shape)
    parts = [torch.cat([whole.narrow(dim, a, b - a) for a, b in found], dim) for found in runs]
    return [boxes(shape, dim, found) for found in runs], parts


@pytest.mark.parametrize(("shape", "dim", "deal"), CUTS)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_make_the_whole_again(
    shape: tuple[int, ...], dim: int, deal: Deal, size: int, dtype: torch.dtype
) -> None:
    found, parts = parts_of(shape, dim, deal, size=size)

    def rank(axis: LoopbackCollectives) -> tuple[Tensor, int, int]:
        whole = joined(parts[axis.rank].to(dtype), found, axis, label="`x`")
        return whole, axis.traffic.calls["all_gather"], axis.traffic.bytes["all_gather"]

    longest = max(part.numel() for part in parts)
    for whole, calls, sent in LoopbackWorld(size).run(rank):
        assert torch.equal(whole, whole_of(shape, dtype))
        assert whole.is_contiguous()
        assert (calls, sent) == (1, size * longest * dtype.itemsize)


def test_ranks_may_have_the_same_part() -> None:
    """Heads of keys that several ranks use."""
    whole = whole_of((6, 2))
    found = [boxes((6, 2), 0, [(0, 3)]), boxes((6, 2), 0, [(0, 3)]), boxes((6, 2), 0, [(3, 6)])]

    def rank(axis: LoopbackCollectives) -> Tensor:
        return joined(whole[3:] if axis.rank == 2 else whole[:3], found, axis, label="`x`")

    assert all(torch.equal(one, whole) for one in LoopbackWorld(3).run(rank))


@pytest.mark.parametrize("second", [(4, 6), (2, 6)])
def test_parts_that_make_no_whole_are_found(second: tuple[int, int]) -> None:
    found = [boxes((6, 2), 0, [(0, 3)]), boxes((6, 2), 0, [second])]

    def rank(axis: LoopbackCollectives) -> None:
        with pytest.raises(AssertionError, match="parts of `x` make no whole"):
            joined(torch.zeros(found[axis.rank].numel), found, axis, label="`x`")

    LoopbackWorld(2).run(rank)


@pytest.mark.parametrize(("shape", "dim", "deal"), CUTS)
def test_any_range_of_a_part_is_read_out_of_the_whole(shape: tuple[int, ...], dim: int, deal: Deal) -> None:
    flat = whole_of(shape).reshape(-1)
    for found, part in zip(*parts_of(shape, dim, deal, size=2), strict=True):
        expected = part.reshape(-1)
        for start in range(found.numel + 1):
            for stop in range(start, found.numel + 1):
                values = read_part(lambda first, last: flat[first:last], found, start, stop)
                assert torch.equal(values, expected[start:stop]), (start, stop)


def test_a_part_is_read_in_few_calls_and_rows_alone() -> None:
    """A file has other layers around, and each call is one of the operating system."""
    shape = (100, 10)
    flat = whole_of(shape).reshape(-1)
    (found, _), _ = parts_of(shape, 1, Deal(), size=2)
    asked: list[tuple[int, int]] = []

    def read(first: int, last: int) -> Tensor:
        asked.append((first, last))
        return flat[first:last]

    read_part(read, found, 0, found.numel)
    assert asked == [(0, 1000)]
    asked.clear()
    # The second half of row 10, rows 11 to 19, and three elements of row 20.
    bounds = list(accumulate([52, 3 + 45 + 3]))
    ((start, stop),) = pairwise(bounds)
    read_part(read, found, start, stop)
    assert asked == [(102, 105), (110, 200), (200, 203)]
