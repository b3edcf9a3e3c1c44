"""Every rank's part, or none: saves beside the script and in it, their failures, and who is told of them when."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dsrun.checkpoint_files.folder.jobs import JobMarks
from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.calls import FileCalls
from dsrun.checkpoint_files.storage.tags import complete_tags, latest_tag
from dsrun.contract.environment import JOB_ID_ENV
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.format.load import read
from dsrun.runtime.checkpoint.format.plan import coalesce, plan_file
from dsrun.runtime.checkpoint.save.request import SaveRequest
from dsrun.runtime.checkpoint.save.saver import Saver
from support.entries import all_of, entry_of
from support.forked_programs import run_programs, with_words
from support.savers import nothing, value_of, wanted, with_savers


def save(saver: Saver, folder: Path, tag: str, value: float, rank: int, size: int, **changes: Any) -> None:
    saver.save(folder, tag, lambda: wanted(value, rank=rank, size=size, **changes), progress=nothing)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_saved_is_loaded_on_any_number_of_ranks(tmp_path: Path, size: int, asynchronous: bool) -> None:
    told: list[int] = []

    def body(saver: Saver, rank: int) -> None:
        for step in (1, 2):
            told_by = {"when_saved": lambda nbytes, seconds: told.append(nbytes)}
            save(saver, tmp_path, f"global_step{step}", float(step), rank, size, **told_by)
        saver.finish(nothing)

    with_savers(size, body, asynchronous=asynchronous)
    for step in (1, 2):
        target = tmp_path / f"global_step{step}"
        assert value_of(target, sizes=(1, 2, 4)) == step
        index = read_index(target)
        assert list(verify(target, index)) == []
        assert index.ranks == [{"rank": rank} for rank in range(size)]
        assert index.aliases == {"tied": "w"}
        assert index.world_size == size
    assert told == [sum(p.stat().st_size for p in (tmp_path / f"global_step{s}").iterdir()) for s in (1, 2)]
    assert latest_tag(tmp_path) == "global_step2"


def test_values_may_change_as_soon_as_a_save_returns(tmp_path: Path) -> None:
    def body(saver: Saver, rank: int) -> None:
        state = wanted(5.0, rank=rank, size=2)
        saver.save(tmp_path, "t", lambda: state, progress=nothing)
        for entry in state.entries:
            entry.tensor.zero_()

    with_savers(2, body)
    assert value_of(tmp_path / "t") == 5.0


class Gate(FileCalls):
    """A disk that waits before it makes a file, and fails where it is told to."""

    def __init__(self, *, fails: str = "", rank: int = 1, number: int = errno.EIO) -> None:
        self.fails = fails
        self.number = number
        self.rank = f"rank-{rank:05d}"
        self._paths: dict[int, str] = {}

    def _fail(self, what: str, path: str) -> None:
        if what == self.fails and (what == "rename" or self.rank in path):
            raise OSError(self.number, f"{os.strerror(self.number)} in {what}", path)

    def create(self, path: Path, *, direct: bool = False) -> int:
        self._fail("create", path.name)
        descriptor = super().create(path, direct=direct)
        self._paths[descriptor] = path.name
        return descriptor

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        self._fail("write", self._paths[descriptor])
        super().write(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        self._fail("sync", self._paths[descriptor])
        super().sync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        self._fail("rename", new.name)
        super().rename(old, new)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("fails", ["create", "write", "sync", "rename"])
def test_C6_C7_a_disk_that_fails_one_rank_fails_all_and_leaves_the_old_one(
    tmp_path: Path, fails: str, number: int
) -> None:
    with_savers(2, lambda saver, rank: save(saver, tmp_path, "t", 1.0, rank, 2), asynchronous=False)

    def body(saver: Saver, rank: int) -> str:
        with pytest.raises(CheckpointError, match="t: could not be saved, nothing was published") as caught:
            save(saver, tmp_path, "t", 2.0, rank, 2)
        return str(caught.value)

    texts = with_savers(2, body, calls=Gate(fails=fails, number=number), asynchronous=False)
    assert all(f"{os.strerror(number)} in {fails}" in text for text in texts)
    assert fails == "rename" or all("rank 1: " in text for text in texts)
    assert value_of(tmp_path / "t") == 1.0
    assert latest_tag(tmp_path) == "t"
    assert len(list((tmp_path / "t").iterdir())) == 3


def writer_of(saver: Saver) -> subprocess.Popen[bytes]:
    writer = saver._beside._writer
    assert writer is not None
    return writer.process


def test_a_full_disk_found_beside_training_is_told_to_every_rank_once(tmp_path: Path) -> None:
    def body(saver: Saver, rank: int) -> str:
        save(saver, tmp_path, "a", 1.0, rank, 2)
        saver.finish(nothing)
        resource.prlimit(writer_of(saver).pid, resource.RLIMIT_FSIZE, (1000, 1000))
        save(saver, tmp_path, "b", 2.0, rank, 2)
        with pytest.raises(CheckpointError) as caught:
            saver.finish(nothing)
        saver.check()  # once is enough
        saver.finish(nothing)
        return str(caught.value)

    for text in with_savers(2, body):
        said = "cannot be written: File too large"
        assert re.search(
            f"b: could not be saved, nothing was published: rank 0: {tmp_path}/b/rank-00000-.*: {said}", text
        )
        assert re.search(f"rank 1: {tmp_path}/b/rank-00001-.*: {said}", text)
    assert complete_tags(tmp_path) == ["a"]
    assert not (tmp_path / "b").exists()
    assert latest_tag(tmp_path) == "a"


def test_what_one_rank_was_not_told_is_raised_on_all_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    board_fails = threading.Event()

    def body(saver: Saver, rank: int) -> list[str]:
        texts: list[str] = []
        save(saver, tmp_path, "bad", 1.0, rank, 2, when_saved=_raise)
        saver._last.save.wait(nothing)  # type: ignore[union-attr]
        if rank == 0:
            with pytest.raises(CheckpointError) as caught:
                saver.check()
            texts.append(str(caught.value))
        board_fails.set()
        save(saver, tmp_path, "good", 2.0, rank, 2)
        saver.finish(nothing)
        return texts

    # Rank 0 alone met it, and was told: the next save goes on, on both.
    assert len(with_savers(2, body)[0]) == 1
    assert value_of(tmp_path / "good") == 2.0


def _raise(nbytes: int, seconds: float) -> None:
    raise OSError("no room for the record")


def test_a_writer_that_is_killed_is_named_and_publishes_nothing(tmp_path: Path) -> None:
    def body(saver: Saver, rank: int) -> str:
        save(saver, tmp_path, "a", 1.0, rank, 2)
        saver.finish(nothing)
        if rank == 1:
            os.kill(writer_of(saver).pid, signal.SIGKILL)
            writer_of(saver).wait()
        try:
            save(saver, tmp_path, "b", 2.0, rank, 2)
            saver.finish(nothing)
        except CheckpointError as error:
            save(saver, tmp_path, "c", 3.0, rank, 2)
            saver.finish(nothing)
            return str(error)
        return ""

    texts = with_savers(2, body)
    assert all("rank 1: the process that writes checkpoints was killed by signal 9" in text for text in texts)
    assert complete_tags(tmp_path) == ["a", "c"]
    assert not (tmp_path / "b").exists()
    assert value_of(tmp_path / "c") == 3.0


def test_a_writer_that_was_killed_while_it_had_nothing_to_do_fails_one_save_and_no_more(tmp_path: Path) -> None:
    numel = 1 << 20  # more memory than before, which the writer would have to be given

    def larger() -> SaveRequest:
        entry = entry_of("w", torch.ones(numel), holders=all_of(1))
        return wanted(0.0, rank=0, size=1, entries=[entry])

    def body(saver: Saver, rank: int) -> None:
        save(saver, tmp_path, "a", 1.0, rank, 1)
        saver.finish(nothing)
        writer_of(saver).kill()
        writer_of(saver).wait()
        with pytest.raises(CheckpointError, match="was killed by signal 9"):
            saver.save(tmp_path, "b", larger, progress=nothing)
        saver.save(tmp_path, "c", larger, progress=nothing)
        saver.finish(nothing)

    with_savers(1, body)
    assert complete_tags(tmp_path) == ["a", "c"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nobody_waits_for_a_part_that_failed_in_a_way_that_nobody_foresaw(tmp_path: Path, asynchronous: bool) -> None:
    def broken(*arguments: Any) -> None:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")

    def body(saver: Saver, rank: int) -> str:
        changes: dict[str, Any] = {}
        if rank == 1 and asynchronous:
            saver._beside._copy_rest = broken  # type: ignore[method-assign]
        elif rank == 1:
            values = torch.zeros(4, device="meta")  # whose bytes cannot be had
            changes["entries"] = [entry_of("b", values, role="buffer")]
        try:
            save(saver, tmp_path, "t", 1.0, rank, 2, **changes)
            saver.finish(nothing)
        except CheckpointError as error:
            return str(error)
        return ""

    for text in with_savers(2, body, asynchronous=asynchronous, timeout_s=10.0):
        assert "rank 1: NotImplementedError: Cannot copy out of meta tensor" in text
    assert not (tmp_path / "t").exists()


def test_a_rank_that_never_comes_is_named_after_the_time_out(tmp_path: Path) -> None:
    def body(saver: Saver, rank: int) -> str:
        if rank == 1:
            saver._here.write = lambda save, conclude, progress: None  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(CheckpointError) as caught:
            save(saver, tmp_path, "t", 1.0, rank, 2)
        return str(caught.value)

    assert (
        "rank 1 has not come within 0 s, and has not written its part"
        in with_savers(2, body, asynchronous=False, timeout_s=0.3)[0]
    )
    assert complete_tags(tmp_path) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_waits_for_a_slow_disk_of_another_is_not_silent(tmp_path: Path, asynchronous: bool) -> None:
    seen = threading.Event()
    waits = 0

    def waited() -> None:
        nonlocal waits
        waits += 1
        if waits > 5:
            seen.set()

    def body(saver: Saver, rank: int) -> None:
        if rank == 1:
            here, beside = saver._here.write, saver._beside.write

            def slowly(*args: Any, **more: Any) -> Any:
                assert seen.wait(60), "rank 0 says that it waits"
                return here(*args, **more) if not asynchronous else beside(*args)

            saver._here.write = saver._beside.write = slowly  # type: ignore[method-assign,assignment]
        progress = waited if rank == 0 else nothing
        saver.save(tmp_path, "t", lambda: wanted(1.0, rank=rank, size=2), progress=progress)
        saver.finish(progress)

    with_savers(2, body, asynchronous=asynchronous)
    assert value_of(tmp_path / "t") == 1.0


def test_a_second_save_may_be_refused_while_the_first_is_under_way(tmp_path: Path) -> None:
    going = threading.Event()

    def body(saver: Saver, rank: int) -> None:
        save(saver, tmp_path, "a", 1.0, rank, 2, when_saved=lambda nbytes, seconds: _wait(going))
        with pytest.raises(
            CheckpointError, match=r"a: it is still being written, and `checkpoint.when_busy` is refuse"
        ):
            save(saver, tmp_path, "b", 2.0, rank, 2)
        going.set()
        saver.finish(nothing)
        save(saver, tmp_path, "b", 2.0, rank, 2)

    with_savers(2, body, when_busy="refuse")
    assert sorted(complete_tags(tmp_path)) == ["a", "b"]


def _wait(event: threading.Event) -> None:
    assert event.wait(60)


def test_ten_thousand_parameters_with_long_names_are_a_few_copies(tmp_path: Path) -> None:
    flat = torch.arange(20_000, dtype=torch.float32)
    entries = [entry_of(f"layers.{number}.{'x' * 200}", flat[2 * number : 2 * number + 2]) for number in range(10_000)]

    def body(saver: Saver, rank: int) -> None:
        save(saver, tmp_path, "t", 1.0, rank, 1, entries=entries, aliases={})
        saver.finish(nothing)

    with_savers(1, body)
    assert len(coalesce(plan_file(entries), entries)) == 1
    expected = flat.clone()
    flat.zero_()
    read(read_index(tmp_path / "t"), tmp_path / "t", entries)
    assert torch.equal(flat, expected)


def test_old_ones_are_removed_but_those_that_are_kept(tmp_path: Path) -> None:
    def body(saver: Saver, rank: int) -> None:
        for step in range(1, 8):
            save(saver, tmp_path, f"global_step{step}", float(step), rank, 1)
        save(saver, tmp_path, "best", 9.0, rank, 1)
        saver.finish(nothing)

    with_savers(1, body, keep_last=2, keep_every=3)
    assert sorted(complete_tags(tmp_path)) == ["best", "global_step3", "global_step6", "global_step7"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best",
        "global_step3",
        "global_step6",
        "global_step7",
        "latest",
    ]


class NoRoom(FileCalls):
    """A file system on which nothing may be written any more."""

    def create(self, path: Path, *, direct: bool = False) -> int:
        raise AssertionError("the first byte comes after the look for room")


def test_room_is_looked_for_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 70_000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)

    def body(saver: Saver, rank: int) -> None:
        with pytest.raises(CheckpointError, match=r"it has 7\d\.\d KiB, and 68\.4 KiB are free there"):
            save(saver, tmp_path, "t", 1.0, rank, 2)

    with_savers(2, body, calls=NoRoom(), asynchronous=False)
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_two_jobs_in_one_folder_leave_a_whole_checkpoint_each_time(tmp_path: Path) -> None:
    start = threading.Barrier(2)

    def job(value: float) -> None:
        def body(saver: Saver, rank: int) -> None:
            for _ in range(6):
                if rank == 0:
                    start.wait(60)
                save(saver, tmp_path, "t", value, rank, 2)
                saver.finish(nothing)
                seen.append(value_of(tmp_path / "t", sizes=(1,)) if rank == 0 and done.is_set() else value)

        with_savers(2, body, asynchronous=value > 1)

    seen: list[float] = []
    done = threading.Event()
    threads = [threading.Thread(target=job, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    assert len(seen) == 24
    assert value_of(tmp_path / "t") in (1.0, 2.0)
    assert list(verify(tmp_path / "t", read_index(tmp_path / "t"))) == []


def test_C15_a_tag_of_another_job_that_lives_is_refused_on_every_rank_and_others_of_it_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(JOB_ID_ENV, "theirs")
    theirs = JobMarks()
    with_savers(1, lambda saver, rank: save(saver, tmp_path, "global_step1", 1.0, rank, 1), asynchronous=False)
    theirs.claim(tmp_path, "global_step1", "0f0f0f0f")
    monkeypatch.setenv(JOB_ID_ENV, "mine")

    def body(saver: Saver, rank: int) -> str:
        for step in (2, 3):
            save(saver, tmp_path, f"global_step{step}", float(step), rank, 2)
        with pytest.raises(CheckpointError) as caught:
            save(saver, tmp_path, "global_step1", 4.0, rank, 2)
        if rank == 0:
            theirs.release()
        save(saver, tmp_path, "global_step4", 4.0, rank, 2)
        return str(caught.value)

    texts = with_savers(2, body, asynchronous=False, keep_last=1)
    assert all("job theirs (process" in text and "this is mine" in text for text in texts)
    assert capsys.readouterr().out.count("job theirs (process") == 1
    assert complete_tags(tmp_path) == ["global_step4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step4", "latest"]


LEAVES_AN_ENGINE = """
import gc, os, sys, torch, dsrun

def main():
    engine = dsrun.initialize(model=torch.nn.Linear(4, 4), config={"train_micro_batch_size_per_gpu": 1})[0]
    engine.save_checkpoint(sys.argv[1], tag="a")
    engine.wait_for_checkpoint()
    saver = engine._components.checkpoints._saver
    saver._beside._writer.process.kill()
    saver._beside._writer.process.wait()
    engine.save_checkpoint(sys.argv[1], tag="b")
    if sys.argv[2] == "waits":
        saver._last.save.wait(int)

main()
gc.collect()
print("the end")
"""


def test_a_script_whose_engine_is_gone_fails_where_its_last_save_did(tmp_path: Path) -> None:
    """Also where the engine goes first: then the save's own thread lets go of the last that knows of it."""
    folders = {leaves: tmp_path / leaves for leaves in ("waits", "at once")}
    programs = [with_words(LEAVES_AN_ENGINE, str(folder), leaves) for leaves, folder in folders.items()]
    for ended, folder in zip(
        run_programs(programs, modules=["dsrun.runtime.engine.initialize"]), folders.values(), strict=True
    ):
        assert "the end" in ended.out
        assert "the process that writes checkpoints was killed by signal 9" in ended.err
        assert ended.code == 1
        assert complete_tags(folder) == ["a"]
