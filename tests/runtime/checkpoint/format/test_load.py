"""A rank reads the blocks that hold what it wants, in any cut, dtype and order, and no others."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsrun.checkpoint_files.index.region import Region
from dsrun.checkpoint_files.index.value import BLOCK_BYTES, Index, StoredBox, StoredFile, StoredTensor
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.format.load import check_fit, read, read_whole
from support.checkpoints import FILES, sums, tensor_file, write_first_format
from support.entries import entry_of
from support.ranks import run_ranks


def written(folder: Path, whole: Tensor, boxes: list[Region]) -> Index:
    """Writes boxes of one tensor, alternately to two files."""
    folder.mkdir(exist_ok=True)
    dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}[whole.dtype]
    stored = StoredTensor(tuple(whole.shape), dtype)
    files: dict[str, StoredFile] = {}
    for number, name in enumerate(FILES):
        mine = boxes[number::2]
        data = [bytes(whole[box.slices].contiguous().view(-1).view(torch.uint8).numpy()) for box in mine]
        entries = {
            str(n): (dtype, list(box.shape), values) for n, (box, values) in enumerate(zip(mine, data, strict=True))
        }
        content = tensor_file(entries)
        first = len(content) - sum(map(len, data))
        for box, values in zip(mine, data, strict=True):
            stored.boxes.append(StoredBox(box, name, first, first + len(values)))
            first += len(values)
        (folder / name).write_bytes(content)
        files[name] = StoredFile(len(content), sums(content))
    return Index(2, {("w", "param"): stored}, {}, files)


def loaded(index: Index, folder: Path, start: int, stop: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    shape = index.tensors["w", "param"].shape
    target = torch.full((stop - start,), -1, dtype=dtype)
    read(index, folder, [entry_of("w", target, shape=shape, start=start)])
    return target


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_is_loaded_by_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dim = data.draw(st.integers(0, len(shape) - 1))
    marks = sorted({0, shape[dim], *data.draw(st.lists(st.integers(0, shape[dim]), max_size=2))})
    boxes = [
        Region(
            tuple(a if d == dim else 0 for d in range(len(shape))),
            tuple(b - a if d == dim else n for d, n in enumerate(shape)),
        )
        for a, b in pairwise(marks)
    ]
    whole = torch.arange(int(torch.tensor(shape).prod()), dtype=torch.float32).view(shape)
    folder = tmp_path_factory.getbasetemp() / "cuts"
    index = written(folder, whole, boxes)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    assert torch.equal(loaded(index, folder, start, stop), whole.view(-1)[start:stop])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_converted(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    whole = torch.arange(12).view(3, 4).to(stored)
    index = written(tmp_path, whole, [Region((0, 0), (2, 4)), Region((2, 0), (1, 4))])
    assert torch.equal(loaded(index, tmp_path, 2, 11, dtype=dtype), whole.view(-1)[2:11].to(dtype))


def test_runs_over_several_blocks_come_together(tmp_path: Path) -> None:
    numel = 2 * BLOCK_BYTES // 4 + 1000
    whole = torch.arange(numel, dtype=torch.float32)
    index = written(tmp_path, whole, [Region((0,), (numel - 5,)), Region((numel - 5,), (5,))])
    for start, stop in ((0, numel), (BLOCK_BYTES // 4 - 40, BLOCK_BYTES // 4 + 3), (7, numel - 2)):
        assert torch.equal(loaded(index, tmp_path, start, stop), whole[start:stop])
        assert torch.equal(loaded(index, tmp_path, start, stop, dtype=torch.float64), whole[start:stop].double())


def test_only_the_blocks_that_are_needed_are_read(tmp_path: Path) -> None:
    numel = 3 * BLOCK_BYTES // 4
    whole = torch.arange(numel, dtype=torch.float32)
    index = written(tmp_path, whole, [Region((0,), (numel,))])
    path = tmp_path / FILES[0]
    with path.open("r+b") as file:  # damage in the second block, and the other file is gone
        file.seek(BLOCK_BYTES + 8)
        file.write(b"\xff\xff")
    (tmp_path / FILES[1]).unlink()
    assert torch.equal(loaded(index, tmp_path, 0, 1000), whole[:1000])
    assert torch.equal(loaded(index, tmp_path, numel - 1000, numel), whole[-1000:])
    with pytest.raises(CheckpointError, match=rf"{FILES[0]}: bytes 16777216 to 33554432 are damaged, of param of `w`"):
        loaded(index, tmp_path, 0, numel)


def test_checkpoints_of_format_1_are_loaded(tmp_path: Path) -> None:
    from dsrun.checkpoint_files.parse import read_index

    write_first_format(tmp_path / "old")
    index = read_index(tmp_path / "old")
    assert loaded(index, tmp_path / "old", 2, 9).tolist() == [2.0, 3.0, 10.0, 11.0, 12.0, 13.0, 20.0]
    assert read_whole(index, tmp_path / "old", ["s"], role="buffer")["s"].item() == 2.5
    with pytest.raises(CheckpointError, match="no client of `x`"):
        read_whole(index, tmp_path / "old", ["x"], role="client")


def test_a_tied_name_is_loaded_from_the_one_it_is_stored_under(tmp_path: Path) -> None:
    whole = torch.arange(6, dtype=torch.float32)
    index = written(tmp_path, whole, [Region((0,), (6,))])
    index.aliases["head"] = "w"
    assert torch.equal(read_whole(index, tmp_path, ["head"], role="param")["head"], whole)
    check_fit(index, tmp_path, [("head", "param", (6,))], strict=True)
    with pytest.raises(CheckpointError, match="no param of `other`"):
        check_fit(index, tmp_path, [("other", "param", (6,))], strict=False)


_MIB = 1 << 20


def _load_much(folder: str) -> tuple[float, float]:
    """Bytes of this rank's state and the growth of its peak while it loads, in MiB."""
    import resource

    from dsrun.checkpoint_files.parse import read_index

    index = read_index(Path(folder))
    shape = index.tensors["w", "param"].shape
    numel = shape[0] // 4
    target = torch.zeros(numel)
    small = torch.zeros(10)
    read(index, Path(folder), [entry_of("w", small, shape=shape)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read(index, Path(folder), [entry_of("w", target, shape=shape, start=numel)])
    assert target[5] == numel + 5
    return numel * 4 / _MIB, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def test_a_rank_holds_its_own_state_and_a_few_blocks(tmp_path: Path) -> None:
    numel = 40 * _MIB // 4 * 4
    whole = torch.arange(numel, dtype=torch.float32)
    index = written(tmp_path / "t", whole, [Region((0,), (numel,))])
    (tmp_path / "t" / "index.json").write_bytes(index.to_bytes())
    del whole
    ((own, growth),) = run_ranks(1, _load_much, str(tmp_path / "t"))
    assert own == 40
    assert growth < 4 * BLOCK_BYTES / _MIB + 8, "the model has 160 MiB"


@pytest.mark.cuda
@pytest.mark.gpu_seconds(0.6)
def test_what_a_script_reads_on_a_stream_of_its_own_is_of_before_the_load(tmp_path: Path) -> None:
    whole = torch.arange(1 << 16, dtype=torch.float32).view(4, 1 << 14)
    index = written(tmp_path, whole, [Region((0, 0), (4, 1 << 14))])
    target = torch.full((whole.numel(),), -1.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1 << 29)
        before = target.clone()
        read(index, tmp_path, [entry_of("w", target, shape=(4, 1 << 14))])
        after = target.clone()
    torch.cuda.synchronize()
    assert bool((before == -1).all())
    assert torch.equal(after.cpu(), whole.view(-1))
