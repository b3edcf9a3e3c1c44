"""What is on disk and is not what was saved is refused by who loads it, with the file's name; nothing of it is run."""

from __future__ import annotations

import pickle
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsrun.checkpoint_files.index.region import Region
from dsrun.checkpoint_files.index.value import INDEX_FILE
from dsrun.checkpoint_files.parse import parse_index, read_index
from dsrun.checkpoint_files.storage.tags import latest_tag, tag_to_load, tag_to_save
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.format.load import read_whole
from dsrun.runtime.engine.saving.resume import choose_checkpoint
from support.checkpoints import write_two_files
from support.odd_files import KINDS, put_in_place
from support.savers import save_one, value_of

TAG = "global_step1"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    save_one(tmp_path, TAG, 1.0, size=2)
    return tmp_path / TAG


def data_files(target: Path) -> list[Path]:
    return sorted(target.glob("rank-*.safetensors"))


def refusal(target: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        value_of(target)
    return str(caught.value)


def test_C8_every_flipped_bit_of_every_file_is_found_where_it_is_loaded(target: Path) -> None:
    chance = random.Random(8)
    files = [*data_files(target), target / INDEX_FILE]
    assert len(files) == 3
    for path in files:
        content = path.read_bytes()
        for bit in [0, 8 * len(content) - 1, *(chance.randrange(8 * len(content)) for _ in range(20))]:
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            assert str(path) in refusal(target), bit
        path.write_bytes(content)
    assert value_of(target) == 1.0


def cut(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def lose(path: Path, other: Path) -> None:
    path.unlink()


def swap(path: Path, other: Path) -> None:
    kept = path.read_bytes()
    shutil.copy(other, path)
    other.write_bytes(kept)


def link(path: Path, other: Path) -> None:
    moved = path.rename(path.parent.parent / "moved")
    path.symlink_to(moved)


@pytest.mark.parametrize("harm", [cut, empty, lose, swap, link])
def test_C9_a_file_that_is_cut_empty_gone_swapped_or_a_link_is_named(
    target: Path, harm: Callable[[Path, Path], None]
) -> None:
    first, second = data_files(target)
    harm(second, first)
    message = refusal(target)
    assert str(first) in message or str(second) in message


def test_C9_a_file_of_an_older_step_is_no_file_of_this_one(target: Path) -> None:
    save_one(target.parent, "global_step2", 2.0, size=2)
    older, newer = data_files(target)[1], data_files(target.parent / "global_step2")[1]
    assert older.stat().st_size == newer.stat().st_size
    shutil.copy(older, newer)
    assert f"{newer}: bytes 0 to" in refusal(target.parent / "global_step2")
    assert value_of(target) == 1.0, "the one it was taken from is whole"


@pytest.mark.parametrize("kind", KINDS)
def test_C9_what_is_no_file_is_named_by_what_it_is_and_not_waited_for(target: Path, kind: str) -> None:
    index, data, latest = target / INDEX_FILE, data_files(target)[1], target.parent / "latest"
    kept = {path: path.read_bytes() for path in (index, data, latest)}
    said = "symbolic link" if kind == "device" else f"{kind}.*; expected a regular file"
    for path in (index, data):
        put_in_place(path, kind)
        assert re.search(f"{path}: .*{said}", refusal(target))
        put_back(path, kept[path])
    put_in_place(latest, kind)
    with pytest.raises(CheckpointError, match=f"{latest}: .*{kind}.*; expected a regular file; complete tags here: "):
        choose_checkpoint(target.parent, None, resume=None, missing_ok=True)


def put_back(path: Path, content: bytes) -> None:
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"\xff\x00garbage", b"global_step9", b"../global_step1", b"/etc", b"global_step1\0", b"x" * 2**20],
)
def test_C10_a_latest_that_names_no_checkpoint_is_refused_with_those_there_are(target: Path, content: bytes) -> None:
    (target.parent / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"complete tags here: {TAG}") as caught:
        choose_checkpoint(target.parent, None, resume=None, missing_ok=True)
    assert len(str(caught.value)) < 1000
    assert choose_checkpoint(target.parent, TAG, resume=None, missing_ok=False) == target


def test_C11_no_checkpoint_at_all_is_an_error_or_none_where_the_script_allows_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint here: there is no file `latest`"):
        choose_checkpoint(tmp_path, None, resume=None, missing_ok=False)
    assert choose_checkpoint(tmp_path, None, resume=None, missing_ok=True) is None


@pytest.mark.parametrize("tag", ["../out", "/tmp/out", "a\0b", "a\nb", "a" * 300, "..", "", "latest"])
def test_C12_a_tag_that_leaves_its_folder_is_refused_before_anything_is_written(tmp_path: Path, tag: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(CheckpointError, match="checkpoint tag is"):
        save_one(run, tag, 1.0)
    with pytest.raises(CheckpointError, match="checkpoint tag is"):
        tag_to_load(run, tag)
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]


def test_C12_a_tag_that_is_a_link_is_not_written_through(target: Path) -> None:
    outside = target.parent / "outside"
    outside.mkdir()
    link_to = target.parent / "t"
    link_to.symlink_to(outside)
    with pytest.raises(CheckpointError, match="it is a link to"):
        tag_to_save(target.parent, "t")
    with pytest.raises(CheckpointError, match="it is a link to"):
        save_one(target.parent, "t", 2.0)
    assert not list(outside.iterdir())


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("saved_by", ["pickle", "torch"])
def test_C13_a_pickle_in_place_of_any_file_is_refused_and_not_run(target: Path, tmp_path: Path, saved_by: str) -> None:
    mark = tmp_path / "it ran"
    evil = tmp_path / "evil"
    if saved_by == "pickle":
        evil.write_bytes(pickle.dumps(Payload(mark)))
    else:
        torch.save(Payload(mark), evil)
    for path in [*data_files(target), target / INDEX_FILE]:
        content = path.read_bytes()
        for payload in (evil.read_bytes(), evil.read_bytes().ljust(len(content), b"\0")):
            path.write_bytes(payload)
            assert str(path) in refusal(target)
        path.write_bytes(content)
    (target.parent / "latest").write_bytes(evil.read_bytes())
    with pytest.raises(CheckpointError, match="which is no complete checkpoint"):
        latest_tag(target.parent)
    assert not mark.exists()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_C18_any_index_that_is_accepted_is_loaded_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    target = tmp_path_factory.getbasetemp() / "changed" / "t"
    index = write_two_files(target) if not target.exists() else read_index(target)
    stored = index.tensors["w", "param"]
    number = data.draw(st.integers(0, len(stored.boxes) - 1))
    box = stored.boxes[number]
    small = st.integers(0, 6)
    region = Region(data.draw(st.tuples(small, small)), data.draw(st.tuples(small, small)))
    first = data.draw(st.integers(0, 200))
    changes = {
        "region": region,
        "first": first,
        "last": first + data.draw(st.sampled_from([16, 32, 48])),
        "file": data.draw(st.sampled_from([*index.files, "rank-00002-0a0a0a0a.safetensors"])),
    }
    kept = data.draw(st.sets(st.sampled_from(sorted(changes)), min_size=1))
    stored.boxes[number] = replace(box, **{key: changes[key] for key in kept})
    stored.dtype = data.draw(st.sampled_from(["F32", "F32", "BF16", "I64"]))
    stored.shape = data.draw(st.just(stored.shape) | st.tuples(small, small))
    try:
        found = read_whole(parse_index(index.to_bytes(), target), target, ["w"], role="param")["w"]
    except CheckpointError:
        return
    assert tuple(found.shape) == stored.shape
