"""Ranks of a host that want the same blocks read each of them once, and need no peer to come to an end."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dsrun.checkpoint_files.blocks.pieces import PIECE_BYTES, Sink
from dsrun.checkpoint_files.blocks.read import BlockReader
from dsrun.checkpoint_files.blocks.shared import SharedBlocks, shared_bytes
from dsrun.checkpoint_files.index.region import Region
from dsrun.checkpoint_files.index.value import BLOCK_BYTES, Index, StoredBox, StoredFile, StoredTensor
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.posix import PosixOpenedFile
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.format.host_blocks import share_blocks
from dsrun.runtime.checkpoint.format.load import read
from dsrun.runtime.mesh.c10d import GlooCollectives
from dsrun.runtime.mesh.step_position import Where
from dsrun.runtime.protocols import SOLE_HOLDER
from support.checkpoints import FILES, sums, tensor_file
from support.entries import all_of, entry_of
from support.ranks import run_ranks
from support.training import config, make_engine, train

#: Of each of two files: two blocks and a bit.
NUMEL = (2 * BLOCK_BYTES + PIECE_BYTES + 4096) // 4
SHAPE = (2, NUMEL)


@pytest.fixture(scope="module")
def tag(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A tensor whose rows are two files."""
    folder = tmp_path_factory.mktemp("shared") / "t"
    folder.mkdir()
    whole = torch.arange(2 * NUMEL, dtype=torch.float32).view(SHAPE)
    stored = StoredTensor(SHAPE, "F32")
    files: dict[str, StoredFile] = {}
    for row, name in enumerate(FILES):
        data = whole[row].numpy().tobytes()
        content = tensor_file({"w": ("F32", [1, NUMEL], data)})
        (folder / name).write_bytes(content)
        files[name] = StoredFile(len(content), sums(content))
        stored.boxes.append(StoredBox(Region((row, 0), (1, NUMEL)), name, len(content) - len(data), len(content)))
    (folder / "index.json").write_bytes(Index(2, {("w", "param"): stored}, {}, files).to_bytes())
    return folder, whole.view(-1)


class Host:
    """Ranks as threads, and what they read from the disk."""

    def __init__(self, folder: Path, size: int, *, patience_s: float = 30.0) -> None:
        self.index = read_index(folder)
        self.folder = folder
        segments = [mmap.mmap(-1, shared_bytes(self.index)) for _ in range(size)]
        self.sharing = [SharedBlocks(segments, rank, self.index, patience_s=patience_s) for rank in range(size)]

    def load(
        self,
        rank: int,
        start: int = 0,
        stop: int = 2 * NUMEL,
        dtype: torch.dtype = torch.float32,
        *,
        replicated: bool = False,
    ) -> Tensor:
        target = torch.full((stop - start,), -1, dtype=dtype)
        entry = entry_of("w", target, shape=SHAPE, start=start, holders=all_of(2, rank) if replicated else SOLE_HOLDER)
        read(self.index, self.folder, [entry], others=True, sharing=self.sharing[rank])
        return target


@pytest.fixture
def read_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each call has read of any file."""
    found: list[int] = []
    really = PosixOpenedFile.read_into

    def note(file: PosixOpenedFile, buffer: memoryview, first: int) -> int:
        count = really(file, buffer, first)
        found.append(count)
        return count

    monkeypatch.setattr(PosixOpenedFile, "read_into", note)
    return found


def together(*work: Callable[[], Tensor]) -> list[Tensor | Exception]:
    """What threads give, or raise."""
    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(one) for one in work]
    return [error if isinstance(error := f.exception(), Exception) else f.result() for f in futures]


def test_each_block_is_read_once_and_comes_to_all_in_their_dtype(tag: tuple[Path, Tensor], read_at: list[int]) -> None:
    folder, whole = tag
    host = Host(folder, 3)
    read_at.clear()  # the index
    one, other, third = together(
        lambda: host.load(0),
        lambda: host.load(1, dtype=torch.float64),
        lambda: host.load(2, NUMEL - 5, 2 * NUMEL - 7),
    )
    assert isinstance(one, Tensor)
    assert isinstance(other, Tensor)
    assert isinstance(third, Tensor)
    assert torch.equal(one, whole)
    assert torch.equal(other, whole.double())
    assert torch.equal(third, whole[NUMEL - 5 : 2 * NUMEL - 7])
    assert sum(read_at) == sum(file.nbytes for file in host.index.files.values())


def test_what_came_wrong_from_a_peer_is_read_again_and_is_no_damage(
    tag: tuple[Path, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = tag
    host = Host(folder, 2)
    really, wrong = SharedBlocks.take, memoryview(bytearray(PIECE_BYTES))
    taken: list[int] = []

    def take(sharing: SharedBlocks, name: str, number: int, piece: int) -> memoryview | None:
        taken.append(number)
        return None if really(sharing, name, number, piece) is None else wrong

    monkeypatch.setattr(SharedBlocks, "take", take)
    one, other = together(lambda: host.load(0), lambda: host.load(1))
    assert taken
    assert isinstance(one, Tensor)
    assert isinstance(other, Tensor)
    assert torch.equal(one, whole)
    assert torch.equal(other, whole)


def test_blocks_without_checksums_come_by_way_of_the_page_cache(
    tag: tuple[Path, Tensor], read_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = tag
    cached: list[bool | None] = []
    pour = BlockReader.pour

    def note(
        reader: BlockReader, name: str, numbers: Sequence[int], sink: Sink, *, shared: bool | None = None
    ) -> Generator[int]:
        cached.append(shared)
        return pour(reader, name, numbers, sink, shared=shared)

    monkeypatch.setattr(BlockReader, "pour", note)
    host = Host(folder, 2)
    host.index.files.update({name: StoredFile(file.nbytes, None) for name, file in host.index.files.items()})
    read_at.clear()
    one, other = together(lambda: host.load(0, replicated=True), lambda: host.load(1, replicated=True))
    assert isinstance(one, Tensor)
    assert isinstance(other, Tensor)
    assert torch.equal(one, whole)
    assert torch.equal(other, whole)
    assert cached == [True] * 4
    assert sum(read_at) == 2 * sum(file.nbytes for file in host.index.files.values())


def test_blocks_that_one_rank_wants_are_its_own_matter(tag: tuple[Path, Tensor], read_at: list[int]) -> None:
    folder, whole = tag
    host = Host(folder, 2)
    read_at.clear()
    one, other = together(lambda: host.load(0, 0, NUMEL), lambda: host.load(1, NUMEL, 2 * NUMEL))
    assert isinstance(one, Tensor)
    assert isinstance(other, Tensor)
    assert torch.equal(torch.cat([one, other]), whole)
    assert sum(read_at) == sum(file.nbytes for file in host.index.files.values())


@pytest.mark.parametrize("block", [0, 1])
def test_a_damaged_block_is_named_on_every_rank(tag: tuple[Path, Tensor], block: int) -> None:
    folder, _ = tag
    at = block * BLOCK_BYTES + PIECE_BYTES + 9
    with (folder / FILES[1]).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    host = Host(folder, 2)
    try:
        for found in together(lambda: host.load(0), lambda: host.load(1)):
            assert isinstance(found, CheckpointError)
            first = block * BLOCK_BYTES
            assert f"{FILES[1]}: bytes {first} to {first + BLOCK_BYTES} are damaged, of" in str(found)
    finally:
        with (folder / FILES[1]).open("r+b") as file:
            file.seek(at)
            file.write(byte)


def test_a_rank_that_cannot_read_leaves_its_blocks_to_the_others(
    tag: tuple[Path, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = tag
    host = Host(folder, 2)
    give = host.sharing[0].give

    def fail(name: str, number: int, piece: int, data: memoryview) -> None:
        if piece == 1:
            raise RuntimeError("no more")
        give(name, number, piece, data)

    monkeypatch.setattr(host.sharing[0], "give", fail)
    one, other = together(lambda: host.load(0), lambda: host.load(1))
    assert str(one) == "no more"
    assert isinstance(other, Tensor)
    assert torch.equal(other, whole)


class _ReadByNobody:
    def take(self, first: int, data: memoryview) -> None:
        raise AssertionError("nothing is read")


def test_of_the_blocks_that_a_rank_gives_up_none_comes_before_one_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a block may wait for a peer that waits for one that is given up."""
    count = 64
    with (tmp_path / FILES[0]).open("wb") as file:
        file.truncate(count * BLOCK_BYTES)
    reader = BlockReader(tmp_path, Index(1, {}, {}, {FILES[0]: StoredFile(count * BLOCK_BYTES, None)}))
    begun: list[int] = []
    really = Future[None].cancel

    def pour(file: object, name: str, number: int, *rest: object) -> None:
        begun.append(number)
        time.sleep(0.005)
        if number == 0:
            raise RuntimeError("no more")

    def cancel(future: Future[None]) -> bool:
        time.sleep(0.001)
        return really(future)

    monkeypatch.setattr(reader, "_pour", pour)
    monkeypatch.setattr(Future, "cancel", cancel)
    with pytest.raises(RuntimeError, match="no more"):
        list(reader.pour(FILES[0], range(count), _ReadByNobody()))
    assert len(begun) < count
    assert sorted(begun) == list(range(len(begun)))


def test_a_peer_that_reads_blocks_of_its_own_is_at_work(
    tag: tuple[Path, Tensor], read_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = tag
    host = Host(folder, 2, patience_s=0.3)
    really, own = PosixOpenedFile.read_into, (folder / FILES[0]).stat().st_ino

    def dally(file: PosixOpenedFile, buffer: memoryview, first: int) -> int:
        if os.fstat(file.descriptor).st_ino == own:
            time.sleep(0.1)
        return really(file, buffer, first)

    monkeypatch.setattr(PosixOpenedFile, "read_into", dally)
    read_at.clear()
    one, other = together(lambda: host.load(0), lambda: host.load(1, NUMEL, 2 * NUMEL))
    assert isinstance(one, Tensor)
    assert isinstance(other, Tensor)
    assert torch.equal(one, whole)
    assert torch.equal(other, whole[NUMEL:])
    assert sum(read_at) == sum(file.nbytes for file in host.index.files.values())


@pytest.mark.parametrize("begins", [False, True])
def test_a_peer_that_is_gone_keeps_nobody(
    tag: tuple[Path, Tensor], begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = tag
    host = Host(folder, 2, patience_s=0.2)
    if begins:

        def wait_for_nobody(peer: int, is_there: Callable[[], bool]) -> bool:
            return True

        monkeypatch.setattr(host.sharing[0], "_wait", wait_for_nobody)
        host.sharing[0].begin({name: range(3) for name in FILES})
    began = time.monotonic()
    assert torch.equal(host.load(1), whole)
    assert time.monotonic() - began > 0.2, "it was waited for"


def _load_on_two(folder: str) -> tuple[bool, bool]:
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    collectives = GlooCollectives(world, None, reductions=world, where=Where())
    index = read_index(Path(folder))
    sharing = share_blocks(index, collectives, device=torch.device("cpu"))
    target = torch.zeros(2 * NUMEL)
    read(index, Path(folder), [entry_of("w", target, shape=SHAPE, holders=all_of(2))], sharing=sharing)
    dist.barrier()
    dist.destroy_process_group()
    return sharing is not None, torch.equal(target, torch.arange(2 * NUMEL, dtype=torch.float32))


def test_processes_of_a_host_find_each_others_memory(tag: tuple[Path, Tensor]) -> None:
    assert run_ranks(2, _load_on_two, str(tag[0])) == [(True, True)] * 2


def _resume_on_two(folder: str) -> tuple[int, int]:
    """Bytes of the files, and what this rank has read of them."""
    engine = make_engine(config(0, micro=2))
    train(engine, range(1), samples=2 * engine.world_size)
    engine.save_checkpoint(folder, "here")
    engine.wait_for_checkpoint()
    sizes = {file.stat().st_ino: file.stat().st_size for file in Path(folder, "here").glob("rank-*")}
    found: list[int] = []
    really = PosixOpenedFile.read_into

    def note(file: PosixOpenedFile, buffer: memoryview, first: int) -> int:
        count = really(file, buffer, first)
        found.append(count if os.fstat(file.descriptor).st_ino in sizes else 0)
        return count

    pytest.MonkeyPatch().setattr(PosixOpenedFile, "read_into", note)  # in a process of its own
    engine.load_checkpoint(folder, "here")
    engine.destroy()
    return sum(sizes.values()), sum(found)


def test_an_engine_on_two_ranks_reads_what_both_hold_once(tmp_path: Path) -> None:
    (nbytes, one), (_, other) = run_ranks(2, _resume_on_two, str(tmp_path))
    # Before that, each of them has read the block of its own file that has its random numbers.
    assert one + other == 2 * nbytes
