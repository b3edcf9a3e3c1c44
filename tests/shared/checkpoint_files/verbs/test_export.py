"""Weights go from a checkpoint to files that Hugging Face's and torch's loaders read, in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from dsrun.checkpoint_files.index.dtypes import ITEMSIZE
from dsrun.checkpoint_files.index.region import Region
from dsrun.checkpoint_files.index.value import BLOCK_BYTES, Index, StoredBox, StoredFile, StoredTensor
from dsrun.checkpoint_files.storage.calls import FileCalls
from dsrun.checkpoint_files.tensors.runs import runs_of
from dsrun.checkpoint_files.verbs.export import Weight, cut_shards, export
from dsrun.errors import CheckpointError
from support.checkpoints import FILES, ROWS, sums, tensor_file, write_first_format, write_two_files
from support.ranks import run_ranks

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8", torch.float16: "F16"}


def written(folder: Path, tensors: dict[str, Tensor], *, role: str = "param") -> Index:
    """One file that holds whole tensors, one behind the other as they come, with nothing aligned."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {name: bytes(t.contiguous().view(-1).view(torch.uint8).numpy()) for name, t in tensors.items()}
    content = tensor_file({name: (NAMES[t.dtype], list(t.shape), data[name]) for name, t in tensors.items()})
    first = len(content) - sum(map(len, data.values()))
    index = Index(1, {}, {}, {FILES[0]: StoredFile(len(content), sums(content))})
    for name, t in tensors.items():
        box = StoredBox(Region((0,) * t.ndim, tuple(t.shape)), FILES[0], first, first + len(data[name]))
        index.tensors[name, role] = StoredTensor(tuple(t.shape), NAMES[t.dtype], [box])
        first += len(data[name])
    (folder / FILES[0]).write_bytes(content)
    return index


def exported(folder: Path, index: Index, out: Path, *, dtype: str | None, shard_bytes: int | None = None) -> list[Path]:
    return export(folder, index, out, dtype=dtype, shard_bytes=shard_bytes, calls=FileCalls())


def test_pieces_of_two_ranks_become_whole_tensors(tmp_path: Path) -> None:
    for kind, write in (("second", write_two_files), ("first", write_first_format)):
        write(tmp_path / kind)
        from dsrun.checkpoint_files.parse import read_index

        (file,) = exported(tmp_path / kind, read_index(tmp_path / kind), tmp_path / f"{kind}_out", dtype="F32")
        assert file.name == "model.safetensors"
        found = load_file(file)
        assert found["w"].tolist() == ROWS
        assert found["s"].item() == 2.5
    with safe_open(tmp_path / "second_out" / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "tied": "w"}
    assert "none" in load_file(tmp_path / "second_out" / "model.safetensors"), "a tensor without elements too"


def test_bf16_has_torchs_bits_across_blocks_and_at_any_alignment(tmp_path: Path) -> None:
    values = torch.randn(BLOCK_BYTES // 4 + 77_777, generator=torch.Generator().manual_seed(3))
    tensors = {"odd": torch.tensor([1, 2, 3], dtype=torch.uint8), "w": values, "n": torch.tensor([5, -6])}
    index = written(tmp_path / "tag", tensors)
    (file,) = exported(tmp_path / "tag", index, tmp_path / "out", dtype="BF16")
    found = load_file(file)
    assert torch.equal(found["w"].view(torch.int16), values.bfloat16().view(torch.int16))
    assert torch.equal(found["odd"], tensors["odd"])
    assert torch.equal(found["n"], tensors["n"])


def test_buffers_stay_as_they_are_stored(tmp_path: Path) -> None:
    values = torch.randn(7, generator=torch.Generator().manual_seed(4))
    index = written(tmp_path / "tag", {"mean": values}, role="buffer")
    (file,) = exported(tmp_path / "tag", index, tmp_path / "out", dtype="BF16")
    assert torch.equal(load_file(file)["mean"], values)
    states = written(tmp_path / "states", {"w": values}, role="exp_avg")
    with pytest.raises(CheckpointError, match="no parameters"):
        exported(tmp_path / "states", states, tmp_path / "none", dtype="BF16")
    assert not (tmp_path / "none").exists()


def test_shards_have_an_index_that_says_where_each_tensor_is(tmp_path: Path) -> None:
    tensors = {name: torch.full((100,), float(n)) for n, name in enumerate("abcde")}
    index = written(tmp_path / "tag", tensors)
    files = exported(tmp_path / "tag", index, tmp_path / "out", dtype="BF16", shard_bytes=450)
    assert [file.name for file in files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    body = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert body["metadata"] == {"total_size": 1000}
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / "out" / body["weight_map"][name])[name].float(), tensor)


def test_a_tensor_larger_than_a_shard_has_a_file_of_its_own() -> None:
    weights = [Weight(name, "param", "F32", "F32", (size,)) for name, size in (("a", 1), ("b", 100), ("c", 1))]
    assert [[w.name for w in shard] for shard in cut_shards(weights, 40)] == [["a"], ["b"], ["c"]]
    assert [[w.name for w in shard] for shard in cut_shards(weights, None)] == [["a", "b", "c"]]


def test_damage_and_a_model_that_is_there_leave_nothing_behind(tmp_path: Path) -> None:
    index = written(tmp_path / "tag", {"w": torch.arange(50.0)})
    path = tmp_path / "tag" / FILES[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\xee")
    with pytest.raises(CheckpointError, match="are damaged, of the header, param of `w`"):
        exported(tmp_path / "tag", index, tmp_path / "out", dtype="F32")
    assert list((tmp_path / "out").iterdir()) == []
    path.write_bytes(whole)
    exported(tmp_path / "tag", index, tmp_path / "out", dtype="F32")
    with pytest.raises(CheckpointError, match=r"a model is there already: model\.safetensors"):
        exported(tmp_path / "tag", index, tmp_path / "out", dtype="BF16")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_runs_of_any_box_are_its_elements_in_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, size - o)) for size, o in zip(shape, offset, strict=True))
    region = Region(offset, sizes)
    stored = StoredTensor(shape, "I64", [StoredBox(region, "f", 16, 16 + 8 * region.numel)])
    numbers = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    expected = numbers[region.slices].reshape(-1).tolist()
    found: dict[int, int] = {}
    for run in runs_of(stored):
        for n in range(run.numel):
            found[(run.first - 16) // ITEMSIZE["I64"] + n] = run.start + n
    assert [found[n] for n in range(region.numel)] == expected


MIB = 1 << 20


def _export_much(folder: str) -> float:
    """How far the peak of memory grows while much is exported, in MiB."""
    import resource

    index = written(Path(folder) / "tag", {"w": torch.zeros(1000)})
    exported(Path(folder) / "tag", index, Path(folder) / "warm", dtype="BF16")
    nbytes = 160 * MIB
    path = Path(folder) / "tag" / FILES[0]
    text = path.read_bytes()[: 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    with path.open("wb") as file:  # holes: nothing but zeros behind a header
        file.write(text)
        file.truncate(len(text) + nbytes)
    box = StoredBox(Region((0,), (nbytes // 4,)), FILES[0], len(text), len(text) + nbytes)
    index.tensors["w", "param"] = StoredTensor((nbytes // 4,), "F32", [box])
    index.files[FILES[0]] = StoredFile(len(text) + nbytes, None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (file,) = exported(Path(folder) / "tag", index, Path(folder) / "out", dtype="BF16")
    assert file.stat().st_size > nbytes // 2
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def test_memory_is_some_blocks_whatever_the_model_has(tmp_path: Path) -> None:
    (grown,) = run_ranks(1, _export_much, str(tmp_path))
    assert grown < 100
