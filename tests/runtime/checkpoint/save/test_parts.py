"""State that is cut over one axis of ranks and repeats over another is saved once, and loaded in any other cut."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch

from dsrun.checkpoint_files.index.region import TensorBoxes
from dsrun.checkpoint_files.index.value import Index
from dsrun.checkpoint_files.parse import read_index
from dsrun.runtime.checkpoint.format.load import read, read_whole
from dsrun.runtime.checkpoint.save.saver import Saver
from dsrun.runtime.protocols import SOLE_HOLDER, Holders
from support.entries import column, empty_like, entry_of, row
from support.rank_grids import TENSOR, WEIGHTS, Grid, Weights, entries_of, values_of
from support.savers import nothing, wanted, with_savers

GRIDS = [
    Grid(1, 1, slices=False, whole_slices=False),
    Grid(2, 2, slices=False, whole_slices=False),
    Grid(2, 2, slices=True, whole_slices=True),
    Grid(2, 2, slices=False, whole_slices=True),
    Grid(2, 2, slices=True, whole_slices=False),
    Grid(1, 4, slices=True, whole_slices=True),
    Grid(4, 1, slices=False, whole_slices=False),
    Grid(4, 1, slices=True, whole_slices=True),
]
LOADED = [*GRIDS[:3], Grid(1, 2, slices=False, whole_slices=False), Grid(3, 1, slices=True, whole_slices=True),
          Grid(1, 3, slices=True, whole_slices=True), Grid(2, 3, slices=True, whole_slices=True)]  # fmt: skip


def saved(folder: Path, grid: Grid, weights: Weights = WEIGHTS) -> tuple[Index, Path]:
    """Saves on every rank of a grid; publishing has compared the boxes of all files with the whole tensors."""

    def body(saver: Saver, rank: int) -> None:
        entries = entries_of(grid, rank, weights)
        saver.save(
            folder, "t", lambda: wanted(0.0, rank=rank, size=grid.size, entries=entries, aliases={}), progress=nothing
        )

    with_savers(grid.size, body, asynchronous=False)
    return read_index(folder / "t"), folder / "t"


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_each_element_is_saved_once_and_loaded_in_any_other_cut(tmp_path: Path, grid: Grid) -> None:
    index, target = saved(tmp_path, grid)
    for name, (shape, _) in WEIGHTS.items():
        for role in ("param", "exp_avg"):
            stored = index.tensors[name, role]
            assert stored.shape == shape
            assert sum(box.region.numel for box in stored.boxes) == prod(shape)
    values = values_of(WEIGHTS)
    found = read_whole(index, target, list(WEIGHTS), role="param")
    assert all(torch.equal(found[name], values[name]) for name in WEIGHTS)
    for other in LOADED:
        for rank in range(other.size):
            expected = entries_of(other, rank, WEIGHTS)
            loaded = [empty_like(entry) for entry in expected]
            read(index, target, loaded)
            for one, entry in zip(loaded, expected, strict=True):
                assert torch.equal(one.tensor, entry.tensor), (other, rank, entry.name)


@pytest.mark.parametrize("grid", GRIDS[1:5], ids=str)
def test_what_several_ranks_hold_is_shared_out_among_them_alone(tmp_path: Path, grid: Grid) -> None:
    # 4 MiB and more each, so that the shares of two and of four holders are more than the least that is cut.
    weights: Weights = {
        "up": ((1030, 1030), column),
        "down": ((1026, 1030), row),
        "norm": ((1030, 1031), None),
    }
    index, target = saved(tmp_path, grid, weights)
    sizes = [file.nbytes for file in index.files.values()]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 4 << 20
    written = {
        name: {box.file.split("-")[1] for box in index.tensors[name, "param"].boxes} for name in ("up", "down", "norm")
    }
    assert all(len(files) >= 2 for files in written.values())
    found = read_whole(index, target, list(weights), role="param")
    values = values_of(weights)
    assert all(torch.equal(found[name], values[name]) for name in weights)


def test_two_axes_of_one_size_are_not_mixed_up(tmp_path: Path) -> None:
    """Each rank is another number among the holders of one piece than among those of the other."""
    over_data, over_tensor = torch.arange(5.0), torch.arange(3.0)

    def body(saver: Saver, rank: int) -> None:
        data, tensor = divmod(rank, 2)
        halves = TensorBoxes((10,), (column((10,), tensor, 2).boxes[0],))
        entries = [
            entry_of("a", over_data + 5 * tensor, whole=halves, holders=Holders(("data",), data, 2)),
            entry_of("b", over_tensor + 3 * data, shape=(6,), start=3 * data, holders=Holders((TENSOR,), tensor, 2)),
        ]
        request = wanted(0.0, rank=rank, size=4, entries=entries, aliases={})
        saver.save(tmp_path, "t", lambda: request, progress=nothing)

    with_savers(4, body, asynchronous=False)
    index = read_index(tmp_path / "t")
    found = read_whole(index, tmp_path / "t", ["a", "b"], role="param")
    assert torch.equal(found["a"], torch.arange(10.0))
    assert torch.equal(found["b"], torch.arange(6.0))
    boxes = {name: [box.file.split("-")[1] for box in index.tensors[name, "param"].boxes] for name in ("a", "b")}
    assert boxes == {"a": ["00000", "00001"], "b": ["00000", "00002"]}


def test_a_rank_alone_saves_all_that_it_has(tmp_path: Path) -> None:
    def body(saver: Saver, rank: int) -> None:
        entries = [entry_of(f"w{rank}", torch.ones(4), holders=SOLE_HOLDER)]
        saver.save(tmp_path, "t", lambda: wanted(0.0, rank=rank, size=3, entries=entries, aliases={}), progress=nothing)

    with_savers(3, body, asynchronous=False)
    assert {name for name, _ in read_index(tmp_path / "t").tensors} == {"w0", "w1", "w2"}
