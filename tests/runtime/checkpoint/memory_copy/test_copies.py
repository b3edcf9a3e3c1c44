"""Copies in memory: whole or not there, of one moment on all ranks, and brought back from a neighbour where lost."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dsrun.checkpoint_files.index.region import uncut
from dsrun.errors import CheckpointError
from dsrun.mesh_spec import Axis, MeshSpec
from dsrun.runtime.checkpoint.format.load import read
from dsrun.runtime.checkpoint.memory_copy.copies import MemoryCopies
from dsrun.runtime.checkpoint.memory_copy.files import CopyFiles
from dsrun.runtime.checkpoint.memory_copy.moments import newest_common
from dsrun.runtime.checkpoint.save.request import SaveRequest
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.protocols import SOLE_HOLDER, StateEntry
from support.entries import all_of, empty_like, entry_of
from support.loopback_mail import LoopbackMail, PostOffice
from support.rank_grids import TENSOR, WEIGHTS, Grid
from support.rank_grids import entries_of as entries_of_grid
from support.savers import CPU, entries_of, wanted

ONE_HOST = [0, 0, 0]
TWO_HOSTS = [0, 0, 1, 1]
UNEVEN = [0, 0, 1]


@dataclass
class Rank:
    """A rank of a job whose hosts are folders."""

    copies: MemoryCopies
    rank: int
    size: int
    mail: LoopbackMail | None
    said: list[str] = field(default_factory=list)

    def take(self, step: int) -> None:
        def want() -> SaveRequest:
            return wanted(float(step), rank=self.rank, size=self.size)

        assert self.copies.take(step, want)
        self.join()

    def join(self) -> None:
        thread = self.copies._thread
        if thread is not None:
            thread.join()
        assert self.copies._error is None


def copies_of(
    files: CopyFiles, collectives: LoopbackCollectives, mail: LoopbackMail | None, node_of: Sequence[int]
) -> MemoryCopies:
    spec = MeshSpec((Axis("data", len(node_of)),))
    return MemoryCopies(files, collectives, mail, spec=spec, node_of=node_of, device=CPU, every=1)


def with_ranks(hosts: Path, node_of: Sequence[int], body: Callable[[Rank], Any]) -> list[Any]:
    """Runs `body` once a rank; what ranks leave in the folders of their hosts outlives them."""
    office = PostOffice(len(node_of)) if len(set(node_of)) > 1 else None

    def run(collectives: LoopbackCollectives) -> Any:
        rank = collectives.rank
        mail = None if office is None else LoopbackMail(office, rank)
        files = CopyFiles(hosts / f"host{node_of[rank]}")
        copies = copies_of(files, collectives, mail, node_of)
        try:
            return body(Rank(copies, rank, len(node_of), mail))
        finally:
            copies.close()

    return LoopbackWorld(len(node_of)).run(run)


def restored(rank: Rank, *, newer_than: int = -1) -> tuple[int, tuple[int, ...]] | None:
    """Restores, and checks that what this rank needs of it is there to the last bit; returns step and who was lost."""
    found = rank.copies.restore(newer_than=newer_than)
    if found is None:
        return None
    expected = entries_of(float(found.step), rank=rank.rank, size=rank.size)
    entries = [empty_like(entry) for entry in expected]
    read(found.index, found.folder, entries)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(entries, expected, strict=True))
    assert found.index.values["value"] == found.step
    assert found.index.aliases == {"tied": "w"}
    return found.step, found.fetched


def take_steps(*steps: int) -> Callable[[Rank], None]:
    def body(rank: Rank) -> None:
        for step in steps:
            rank.take(step)

    return body


@pytest.mark.parametrize("node_of", [[0], ONE_HOST, TWO_HOSTS, UNEVEN, [1, 0]])
def test_ranks_that_are_started_again_find_the_newest_copy_in_their_hosts_memory(
    tmp_path: Path, node_of: list[int]
) -> None:
    with_ranks(tmp_path, node_of, take_steps(10, 20, 30))
    assert with_ranks(tmp_path, node_of, restored) == [(30, ())] * len(node_of)
    # And go on from it: the next copy leaves this one until it is whole itself.
    with_ranks(tmp_path, node_of, lambda rank: (restored(rank), rank.take(40)))
    assert with_ranks(tmp_path, node_of, restored) == [(40, ())] * len(node_of)


def test_a_copy_on_the_disk_that_is_as_new_is_read_instead(tmp_path: Path) -> None:
    with_ranks(tmp_path, ONE_HOST, take_steps(10, 20))
    assert with_ranks(tmp_path, ONE_HOST, lambda rank: restored(rank, newer_than=20)) == [None] * 3
    assert with_ranks(tmp_path, ONE_HOST, lambda rank: restored(rank, newer_than=19)) == [(20, ())] * 3


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("node_of", [TWO_HOSTS, UNEVEN])
def test_a_host_that_came_back_empty_gets_its_copies_from_the_next_one(
    tmp_path: Path, node_of: list[int], lost: int
) -> None:
    with_ranks(tmp_path, node_of, take_steps(10, 20))
    shutil.rmtree(tmp_path / f"host{lost}")
    gone = tuple(rank for rank, node in enumerate(node_of) if node == lost)
    assert with_ranks(tmp_path, node_of, restored) == [(20, gone)] * len(node_of)
    # What it got is its own again.
    assert with_ranks(tmp_path, node_of, restored) == [(20, ())] * len(node_of)


def test_where_all_copies_of_a_rank_are_lost_the_disk_is_read_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_ranks(tmp_path, TWO_HOSTS, take_steps(10, 20))
    for path in (tmp_path / "host0").glob("rank-00001*"):
        path.unlink()
    for path in (tmp_path / "host1").glob("rank-00001*"):
        path.unlink()
    assert with_ranks(tmp_path, TWO_HOSTS, lambda rank: restored(rank, newer_than=5)) == [None] * 4
    assert capsys.readouterr().out == (
        "dsrun: the copy in memory of step 20 is not whole (none of rank 1): going on from the checkpoint of step 5\n"
    )
    shutil.rmtree(tmp_path / "host0")
    shutil.rmtree(tmp_path / "host1")
    assert with_ranks(tmp_path, TWO_HOSTS, restored) == [None] * 4
    assert capsys.readouterr().out == "dsrun: no copy in memory is left: going on from the start\n"


@pytest.mark.parametrize("what", ["image", "label", "cut off"])
def test_a_damaged_copy_is_none(tmp_path: Path, what: str) -> None:
    with_ranks(tmp_path, TWO_HOSTS, take_steps(10, 20))
    path = tmp_path / "host0" / ("rank-00001.1.json" if what == "label" else "rank-00001.1")
    if what == "cut off":
        path.write_bytes(path.read_bytes()[:100])
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 4] ^= 1
        path.write_bytes(bytes(content))
    assert with_ranks(tmp_path, TWO_HOSTS, restored) == [(20, (1,))] * 4


def test_a_copy_that_was_being_made_when_the_job_died_leaves_the_one_before(tmp_path: Path) -> None:
    with_ranks(tmp_path, ONE_HOST, take_steps(10, 20))

    def die_half_way(rank: Rank) -> None:
        assert restored(rank) == (20, ())
        if rank.rank == 0:
            rank.copies._files.image(0, 0, 100).fill_(7)  # what `take` does first, of the generation before

    with_ranks(tmp_path, ONE_HOST, die_half_way)
    assert with_ranks(tmp_path, ONE_HOST, restored) == [(20, ())] * 3


def test_ranks_that_lie_otherwise_than_before_take_no_copies(tmp_path: Path) -> None:
    with_ranks(tmp_path, TWO_HOSTS, take_steps(10))
    assert with_ranks(tmp_path, [0, 1, 0, 1], restored) == [None] * 4


def test_the_moments_of_two_attempts_are_never_mixed() -> None:
    # Rank 0 has the second attempt's copy of step 40 in place of the first's, rank 1 the first's.
    first, second = (40 << 31) | 5, (40 << 31) | 6
    before = (30 << 31) | 9
    assert newest_common([[second, before], [first, before]], [[-1, -1]] * 2) == (before, 1)
    assert newest_common([[second, -1], [first, -1]], [[-1, -1]] * 2) is None
    assert newest_common([[second, -1], [-1, -1]], [[-1, -1], [second, -1]]) == (second, 0)


def test_a_copy_that_is_not_there_yet_has_the_next_one_left_out_on_every_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    office = PostOffice(2)
    gate = threading.Event()

    def run(collectives: LoopbackCollectives) -> list[bool]:
        rank = collectives.rank
        mail = LoopbackMail(office, rank)
        exchange = mail.exchange

        def late(sends: Any, receives: Any) -> None:
            assert gate.wait(60)
            exchange(sends, receives)

        mail.exchange = late  # type: ignore[method-assign]
        copies = copies_of(CopyFiles(tmp_path / f"host{rank}"), collectives, mail, [0, 1])
        took = [copies.take(step, lambda step=step: wanted(float(step), rank=rank, size=2)) for step in (1, 2)]
        gate.set()
        Rank(copies, rank, 2, mail).join()
        took.append(copies.take(3, lambda: wanted(3.0, rank=rank, size=2)))
        copies.close()
        return took

    assert LoopbackWorld(2).run(run) == [[True, False, True]] * 2
    assert caplog.text.count("step 2 has no copy in memory: the one before is still on its way") == 1
    assert with_ranks(tmp_path, [0, 1], restored) == [(3, ()), (3, ())]


def test_a_copy_that_failed_on_one_rank_does_not_hide_that_anothers_is_on_its_way(tmp_path: Path) -> None:
    office = PostOffice(2)
    gate = threading.Event()

    def run(collectives: LoopbackCollectives) -> list[bool]:
        rank = collectives.rank
        mail = LoopbackMail(office, rank)
        exchange = mail.exchange

        def fail(sends: Any, receives: Any) -> None:
            assert rank == 0 or gate.wait(60)
            raise RuntimeError("the neighbour is gone")

        mail.exchange = fail  # type: ignore[method-assign]
        copies = copies_of(CopyFiles(tmp_path / f"host{rank}"), collectives, mail, [0, 1])
        took = [copies.take(1, lambda: wanted(1.0, rank=rank, size=2))]
        if rank == 0:
            copies.wait()
        took.append(copies.take(2, lambda: wanted(2.0, rank=rank, size=2)))
        gate.set()
        copies.wait()
        mail.exchange = exchange  # type: ignore[method-assign]
        took.append(copies.take(3, lambda: wanted(3.0, rank=rank, size=2)))
        Rank(copies, rank, 2, mail).join()
        copies.close()
        return took

    assert LoopbackWorld(2).run(run) == [[True, False, True]] * 2
    assert with_ranks(tmp_path, [0, 1], restored) == [(3, ()), (3, ())]


def test_every_host_holds_what_all_ranks_hold_once_and_sends_each_state_once(tmp_path: Path) -> None:
    def body(rank: Rank) -> tuple[int, int]:
        entries = [entry_of("w", torch.ones(1 << 20), holders=all_of(4, rank.rank))]
        rank.copies.take(1, lambda: wanted(1.0, rank=rank.rank, size=4, entries=entries))
        rank.join()
        assert rank.mail is not None
        return rank.copies.held_bytes, rank.mail.sent_bytes

    for held, sent in with_ranks(tmp_path, TWO_HOSTS, body):
        share = 2 << 20  # half of 4 MiB: there are two ranks a host
        assert 2 * share < held < 2 * share + (1 << 15), "its own, and one that it keeps"
        assert share < sent < share + (1 << 14)


def test_a_host_without_room_is_named_on_every_rank_before_anything_is_copied(tmp_path: Path) -> None:
    def body(rank: Rank) -> str:
        huge = torch.empty(1, dtype=torch.uint8).expand(1)
        numel = 1 << (50 if rank.rank else 3)
        entry = StateEntry("w", "param", uncut((numel,)), 0, numel, huge.as_strided((numel,), (0,)), SOLE_HOLDER)
        with pytest.raises(CheckpointError) as caught:
            rank.copies.take(1, lambda: wanted(1.0, rank=rank.rank, size=2, entries=[entry]))
        return caught.value.render()

    first, second = with_ranks(tmp_path, [0, 1], body)
    said = f"{tmp_path / 'host1'}: 4 copies in memory of 1 ranks' state have 4.0 PiB, and "
    assert f"error: rank 1 could not find room for a copy in memory: {said}" in first
    assert f"error: {said}" in second
    assert "hint: leave `checkpoint.memory_copy` out" in first
    assert not list(tmp_path.glob("host*/rank-*"))


@pytest.mark.parametrize("node_of", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1], [0, 1, 2, 3], [0, 0, 0, 0]])
@pytest.mark.parametrize("slices", [False, True])
def test_every_host_has_what_its_ranks_need_where_weights_are_cut_over_another_axis(
    tmp_path: Path, node_of: list[int], slices: bool
) -> None:
    grid = Grid(2, 2, slices=slices, whole_slices=not slices)
    spec = MeshSpec((Axis("data", 2), Axis(TENSOR, 2)))

    def run(collectives: LoopbackCollectives) -> None:
        rank = collectives.rank
        mail = LoopbackMail(office, rank) if office is not None else None
        files = CopyFiles(tmp_path / f"host{node_of[rank]}")
        copies = MemoryCopies(files, collectives, mail, spec=spec, node_of=node_of, device=CPU, every=1)
        random = entry_of(str(rank), torch.full((5,), float(rank)), role="rng")
        expected = [*entries_of_grid(grid, rank, WEIGHTS), random]
        copies.take(1, lambda: wanted(1.0, rank=rank, size=4, entries=expected))
        copies.wait()
        found = copies.restore(newer_than=-1)
        assert found is not None
        entries = [empty_like(entry) for entry in expected]
        read(found.index, found.folder, entries)
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(entries, expected, strict=True))
        copies.close()

    office = PostOffice(4) if len(set(node_of)) > 1 else None
    LoopbackWorld(4).run(run)
