"""A disk is measured past the page cache, within a cap, and nothing is left of the file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.bench.disk import answer, measure

CAP = 8 << 20


def test_a_real_disk_is_written_and_read_and_left_as_it_was(tmp_path: Path) -> None:
    found = measure(str(tmp_path), cap_bytes=CAP, pass_s=0.02)
    assert [one.name for one in found.figures] == [
        *("write in order", "read in order", "random 4 KiB reads, 1 at once", "random 4 KiB reads, 16 at once")
    ]
    assert [one.unit for one in found.figures] == ["B/s", "B/s", "1/s", "1/s"]
    assert all(one.low > 0 and one.repetitions == 3 for one in found.figures)
    assert (found.path, found.file_bytes) == (str(tmp_path), CAP)
    assert os.listdir(tmp_path) == []


def test_the_cap_is_rounded_down_to_whole_blocks(tmp_path: Path) -> None:
    assert measure(str(tmp_path), cap_bytes=CAP + 5, pass_s=0.01).file_bytes == CAP


@pytest.mark.parametrize(("refused", "direct"), [(os.O_DIRECT, False), (os.O_TMPFILE, True)])
def test_what_a_filesystem_refuses_is_done_without_and_said(tmp_path: Path, refused: int, direct: bool) -> None:
    def open_file(path: str, flags: int, mode: int) -> int:
        # O_DIRECT is what tmpfs of kernels before 6.6 refuses, O_TMPFILE what NFS does.
        if flags & refused == refused:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.open(path, flags, mode)

    found = measure(str(tmp_path), cap_bytes=CAP, pass_s=0.01, open_file=open_file)
    assert found.to_json()["direct"] is found.direct is direct
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no: cannot be measured: No such file or directory") as caught:
        measure(str(tmp_path / "no"))
    assert caught.value.hint == "name a folder you may write to: `--path DIR`"


def test_a_cap_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="too little to measure with"):
        measure(str(tmp_path), cap_bytes=4096)


def test_nothing_is_left_where_the_process_is_killed_while_it_writes(tmp_path: Path) -> None:
    code = "import sys; from dsrun.launcher.bench.disk import measure; print('up', flush=True); "
    words = [sys.executable, "-c", code + "measure(sys.argv[1], pass_s=60)", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        # Killed with the file open, or just before: in both cases the folder is empty.
        process.kill()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no /dev/shm")
def test_tmpfs_is_measured_too() -> None:
    with ExitStack() as keep:
        found = answer({"path": "/dev/shm", "cap_bytes": CAP}, keep)
    assert found["file_bytes"] == CAP
    assert {one["source"] for one in found["figures"]} == {"measured"}
